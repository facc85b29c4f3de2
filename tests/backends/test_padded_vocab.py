# SPDX-License-Identifier: Apache-2.0
"""A draft and a target of one tokenizer whose vocabularies are padded differently, drawn from on real engines."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core import specs
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import warp
from speccompile.core.specs import GraphSpec
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from speccompile.passes.attach_tail import ABSENT, attach_tail, fit_vocab
from speccompile.passes.base import run_pipeline
from speccompile.passes.edit import sizes_of
from speccompile.passes.pipelines import tensorrt_table
from speccompile.speculators.draft_model.config import DraftModelConfig, DraftModelMethod
from tests.lab.graphs import compile_graph
from tests.speculators.distribution_check import LEAST, PROMPT, Warp, decode_many, fit_p_value

WIDE, NARROW = 97, 89
ROWS, SLOTS, NODES = 40, 20, 8
pytestmark = [pytest.mark.usefixtures("cheap_measurements"), pytest.mark.export]
PAIRS = [(WIDE, NARROW), (NARROW, WIDE)]  # (target's vocabulary, draft's)
CHAIN: dict[str, Any] = {"num_draft_tokens": 2}
TREE: dict[str, Any] = {"tree": {"widths": [2, 1]}, "num_candidates": 2}
FORMS = [("chain", CHAIN), ("tree", TREE)]
HEAT: Warp = (1.5, 4, 1.0)


def with_vocab(model: ir.Model, vocab: int, noise: float) -> ir.Model:
    """Returns a decoder whose embedding and LM head have `vocab` tokens, moved by noise."""
    made, rng = model.clone(), np.random.default_rng(5)
    for name, value in list(made.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or WIDE not in sizes_of(tensor):
            continue
        array = np.take(tensor.numpy(), np.arange(vocab), axis=sizes_of(tensor).index(WIDE))
        array = (array + noise * rng.standard_normal(array.shape)).astype(np.float32)
        value.const_value, value.shape = ir.tensor(array, name=name), ir.Shape(array.shape)
    logits = {v.name: v for v in made.graph.outputs}[specs.LOGITS]
    assert logits.shape is not None
    logits.shape = ir.Shape([*logits.shape[:-1], vocab])
    return made


def draft_spec(dims: ModelDims, vocab: int, form: str) -> GraphSpec:
    plain = decoder_spec("draft", replace(dims, vocab_size=vocab))
    tails = {"tree": candidate_spec(plain, 2, dists=True), "chain": candidate_spec(plain, 1, dists=True)}
    return tails.get(form, plain)


@pytest.fixture(scope="module")
def engines(neutral: tuple[ir.Model, ModelDims], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """(backend, target's vocabulary, draft's, form) -> the engine of that form."""
    model, dims = neutral

    @functools.cache
    def make(backend: str, target: int, draft: int, form: str) -> Any:
        if form == "target":
            spec = verified_spec(decoder_spec("target", replace(dims, vocab_size=target)), keep_logits=True)
            graph = with_vocab(model, target, 0.0)
        else:
            spec, graph = draft_spec(dims, target, form), with_vocab(model, draft, 0.0 if form == "logits" else 0.05)
        built = compile_graph(graph, spec, tmp_path_factory.mktemp("padded"), backend, dims)
        return built.open(SLOTS, max_rows=ROWS)

    return make


class Scored:
    """The target as a function of its context, for `fit_p_value`."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.known = engine, dict[tuple[int, ...], np.ndarray]()

    def logits(self, context: np.ndarray) -> np.ndarray:
        """[vocab] float32 after the tokens `context`."""
        key = tuple(context.tolist())
        if key not in self.known:
            out = self.engine.run({specs.TOKENS: context[None], specs.LENGTHS: np.zeros(1, np.int64)})
            self.known[key] = out[specs.LOGITS][0, -1].copy()
        return self.known[key]


def propose_with(engine: Any, fields: dict[str, Any]) -> Any:
    context = MethodContext(SLOTS, ROWS - NODES - 1, NODES)
    return DraftModelMethod().make_proposer(DraftModelConfig("draft", **fields), {"draft": engine}, context)


@pytest.mark.distribution
@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize(("form", "fields"), FORMS)
def test_sampled_text_has_the_targets_distribution(engines, target, draft, form, fields):
    model = Scored(engines("onnxruntime", target, draft, "target"))
    proposer = propose_with(engines("onnxruntime", target, draft, form), fields)
    done = decode_many(model.engine, proposer, HEAT, 600, ROWS - NODES - 1)
    assert fit_p_value(done, model, HEAT) > LEAST
    tokens = [token for sequence in done for token in sequence.tokens[len(PROMPT) :]]
    assert any(token >= NARROW for token in tokens) == (target == WIDE)  # the draft reads tokens that it lacks
    accepted = sum(sequence.stats.num_tokens - sum(sequence.stats.outcomes.values()) for sequence in done)
    assert 100 < accepted < sum(sequence.stats.num_draft_tokens for sequence in done)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize(("form", "fields"), FORMS)
def test_backends_draw_the_same_tokens(engines, target, draft, form, fields):
    texts = []
    for backend in ("onnxruntime", "reference"):
        proposer = propose_with(engines(backend, target, draft, form), fields)
        done = decode_many(engines(backend, target, draft, "target"), proposer, HEAT, 3, ROWS - NODES - 1)
        texts.append([sequence.tokens for sequence in done])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_drafts_are_drawn_from_the_recorded_distribution(engines, backend, target, draft):
    logits = engines(backend, target, draft, "logits")
    feeds = {
        specs.TOKENS: np.array([[3, 1, NARROW + 2 if target == WIDE else 4]]),
        specs.LENGTHS: np.zeros(1, np.int64),
    }
    row = logits.run(feeds)[specs.LOGITS][0].copy()
    assert row.shape == (3, target)
    clamped = {**feeds, specs.TOKENS: np.minimum(feeds[specs.TOKENS], draft - 1)}
    np.testing.assert_array_equal(logits.run(clamped)[specs.LOGITS][0], row)
    own = row[:, : min(target, draft)]
    assert (row[:, min(target, draft) :] == ABSENT).all() and own.min() > -100
    wanted = np.zeros((3, target), np.float32)
    wanted[:, : own.shape[1]] = warp(own[None], [0.7], [0], [1.0])[0]
    np.testing.assert_allclose(warp(row[None], [0.7], [0], [1.0])[0], wanted, atol=1e-7)


def test_equal_vocabularies_are_left_alone(neutral):
    model, dims = neutral
    work = model.clone()
    assert fit_vocab(work, decoder_spec("draft", dims)) == 0
    assert len(work.graph) == len(model.graph)
    assert attach_tail(candidate_spec(decoder_spec("draft", dims), 1, dists=True))(work) == 1


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("form", ["chain", "tree"])
@pytest.mark.parametrize(("quantization", "dtype"), [("none", "float16"), ("int8", "float16"), ("none", "bfloat16")])
def test_tensorrts_table_takes_it(neutral, target, draft, form, quantization, dtype):
    model, dims = neutral
    spec = tensorrt_spec(draft_spec(dims, target, form), dtype, ROWS)
    work = with_vocab(model, draft, 0.0)
    run_pipeline(work, tensorrt_table(spec, quantization, dtype=dtype))
    assert [v.name for v in work.graph.outputs] == [t.name for t in spec.outputs]
