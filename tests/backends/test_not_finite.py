# SPDX-License-Identifier: Apache-2.0
"""Rows of NaN in a cache: seen in the verdict, kept from other slots, and gone when the slot is cleared."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.core import specs
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import SamplingParams
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from speccompile.runtime.requests import Request
from speccompile.runtime.service import Service
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.speculators.ngram.config import NgramConfig, NgramMethod
from tests.lab.graphs import compile_graph
from tests.runtime.test_service import Sink

pytestmark = pytest.mark.export

BAD = 91
PROMPT = [5, 9, 5, 9, 5, 9]
DISTS = [
    SamplingParams(max_new_tokens=7),
    SamplingParams(max_new_tokens=7, temperature=0.8, seed=3, top_k=20, top_p=0.9),
    SamplingParams(max_new_tokens=7, temperature=1.0, seed=3, min_p=0.02, presence_penalty=0.5),
]


def embedding(model: ir.Model) -> ir.Value:
    """The embedding table; a tied LM head gets its own copy."""
    [node] = [
        n for n in model.graph if n.op_type == "Gather" and n.inputs[1] is not None and n.inputs[1].name == "tokens"
    ]
    shared = node.inputs[0]
    own = ir.Value(name="embedding.own", const_value=ir.tensor(shared.const_value.numpy().copy(), name="embedding.own"))
    model.graph.register_initializer(own)
    node.replace_input_with(0, own)
    return own


@pytest.fixture(scope="module", params=["onnxruntime", "reference"])
def engines(request: Any, neutral: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(engine whose embedding of BAD is NaN, the same without): (factory of SpecEngines)."""
    model, dims = neutral
    spec, opened = verified_spec(decoder_spec("target", dims), keep_logits=True), {}
    for is_bad in (True, False):
        graph, folder = model.clone(), tmp_path_factory.mktemp(f"{request.param}-{is_bad}")
        table = embedding(graph)
        array = table.const_value.numpy()
        if is_bad:
            array[BAD] = np.nan
        table.const_value = ir.tensor(array, name=table.name)
        opened[is_bad] = compile_graph(graph, spec, folder, request.param, form="fp32").open(3, max_rows=80)

    def make(is_bad: bool) -> SpecEngine:
        context = MethodContext(3, 64, 8)
        proposer = NgramMethod().make_proposer(NgramConfig(), {}, context)
        return SpecEngine(opened[is_bad], {}, proposer, None, context, chunk=16)

    return make


def test_a_spoilt_prompt_harms_no_other(engines):
    fresh, engine = engines(False), engines(True)
    for params in DISTS:
        [wanted] = fresh.generate([PROMPT], params)
        assert BAD not in wanted.tokens
        long = [1, BAD, *range(2, 40)]
        results = engine.generate([PROMPT, long, PROMPT, [BAD, 3], [BAD], PROMPT], params)
        assert [g.finish_reason for g in results] == ["length", "error", "length", "error", "error", "length"]
        assert [g.tokens for g in results] == [wanted.tokens, [], wanted.tokens, [], [], wanted.tokens]
        assert [g.tokens for g in engine.generate([PROMPT] * 4, params)] == [wanted.tokens] * 4


def test_a_service_goes_on(engines):
    wanted = [engines(False).generate([PROMPT], params)[0].tokens for params in DISTS]
    service = Service(engines(True))
    service.start()
    try:
        sinks = [Sink() for _ in range(12)]
        for i, sink in enumerate(sinks):
            prompt = [*PROMPT * 4, BAD, 1] if i % 2 else PROMPT
            service.submit(Request(prompt, DISTS[i % 3], speculation="on"), sink)
        for i, sink in enumerate(sinks):
            step_outputs = sink.wait()
            if i % 2:
                assert step_outputs[-1].finish_reason == "error" and "not finite" in step_outputs[-1].error
            else:
                assert [t for p in step_outputs for t in p.tokens] == wanted[i % 3]
    finally:
        service.close()


@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
def test_nan_in_a_cache_is_reported_in_the_verdict_and_cleared(open_engine, backend):
    engine, tokens = open_engine(backend, max_rows=300), np.arange(1, 9)
    for slot in range(3):
        engine.run({specs.TOKENS: tokens[None], specs.LENGTHS: np.zeros(1, np.int64)}, first_slot=slot)
    feeds = {specs.TOKENS: np.array([[3], [4], [5]]), specs.LENGTHS: np.full(3, 8)}
    wanted = {name: np.array(value) for name, value in engine.run(feeds).items()}
    assert (wanted[specs.NEXT_TOKEN] >= 0).all()

    def views() -> list[np.ndarray]:
        if backend == "reference":
            return list(engine.caches.values())
        return [engine.caches.view(i) for i in range(len(engine.caches.names))]

    for view in views():
        view[1, :, 20:] = np.nan
    told = engine.run(feeds)
    assert told[specs.NEXT_TOKEN].tolist() == [wanted[specs.NEXT_TOKEN][0], -1, wanted[specs.NEXT_TOKEN][2]]
    np.testing.assert_array_equal(told[specs.LOGITS][[0, 2]], wanted[specs.LOGITS][[0, 2]])
    # A growing view moves its rows over others': no slot may read NaN from rows that it never wrote.
    for start in range(0, 140, 35):
        longer = {specs.TOKENS: np.arange(35)[None], specs.LENGTHS: np.array([start])}
        assert engine.run(longer, first_slot=2)[specs.NEXT_TOKEN][0] >= 0
    assert engine.run({**feeds, specs.LENGTHS: np.array([8, 8, 140])})[specs.NEXT_TOKEN][[0, 2]].min() >= 0
    engine.clear_slot(1)
    assert all(not view[1].any() for view in views())
    engine.run({specs.TOKENS: tokens[None], specs.LENGTHS: np.zeros(1, np.int64)}, first_slot=1)
    assert engine.run(feeds)[specs.NEXT_TOKEN][1] == wanted[specs.NEXT_TOKEN][1]
