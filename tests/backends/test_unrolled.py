# SPDX-License-Identifier: Apache-2.0
"""A draft unrolled over several steps: the numbers of as many single steps, in every form it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from speccompile.core import registry, specs
from speccompile.core.specs import (
    GraphSpec,
    ModelDims,
    decoder_spec,
    sampled_spec,
    stepwise_spec,
    unrolled_spec,
)
from speccompile.core.tensorrt_specs import tensorrt_spec
from speccompile.errors import RuntimeFault
from speccompile.ops.registry import attach_functions
from speccompile.passes.attach_tail import attach_tail
from speccompile.passes.base import run_pipeline
from speccompile.passes.lower_draft_tensorrt import chains_of
from speccompile.passes.pipelines import reference_table, tensorrt_table
from speccompile.passes.unroll_draft import unroll_draft
from tests.ops.tensorrt.lab import Parsed

VOCAB, NUM_STEPS, MAX_ROWS, TOLERANCE = 97, 5, 160, 2e-5
RNG = np.random.default_rng(11)
PROMPT = RNG.integers(0, VOCAB, (3, 40))
DRAWS = RNG.random((3, NUM_STEPS)).astype(np.float32)
HOT = {
    specs.TEMPERATURE: np.array([0.8, 0.0, 1.3], np.float32),
    specs.TOP_K: np.array([0, 0, 20]),
    specs.TOP_P: np.array([1.0, 1.0, 0.9], np.float32),
}
COLD = {specs.TEMPERATURE: np.zeros(3, np.float32), specs.TOP_K: HOT[specs.TOP_K], specs.TOP_P: HOT[specs.TOP_P]}
LENGTHS = np.array([20, 31, 0])  # rows read before; the step reads 1 to 4 tokens more
SCORED = np.array([[3], [0], [2]])

Neutral = tuple[ir.Model, ModelDims]


def _specs(dims: ModelDims) -> tuple[GraphSpec, GraphSpec]:
    one = replace(sampled_spec(decoder_spec("draft", dims)), max_rows=MAX_ROWS)
    return one, unrolled_spec(one, NUM_STEPS)


@pytest.fixture(scope="module")
def files(neutral: Neutral, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, GraphSpec]]:
    """{"BACKEND FORM": (graph, spec)}."""
    model, dims = neutral
    made = {}
    for backend in ("onnxruntime", "reference"):
        for form, spec in zip(("stepwise", "unrolled"), _specs(dims), strict=True):
            folder = tmp_path_factory.mktemp(f"{backend}-{form}")
            registry.backend(backend).compile(model, spec, folder)
            made[f"{backend} {form}"] = (folder / "graph.onnx", spec)
    return made


def _engine(files: dict[str, tuple[Path, GraphSpec]], name: str, max_rows: int = MAX_ROWS) -> Any:
    path, spec = files[name]
    tuning = {"threads": 1, "log_severity": 2}
    return registry.backend(name.split()[0]).load(path, spec, max_slots=3, max_rows=max_rows, tuning=tuning)


def _fill(engine: Any) -> None:
    """Every slot reads its first LENGTHS tokens."""
    for slot, length in enumerate(LENGTHS):
        if length:
            engine.run(
                {
                    specs.TOKENS: PROMPT[slot : slot + 1, :length],
                    specs.LENGTHS: np.zeros(1, np.int64),
                    specs.SCORED_NODES: np.array([[length - 1]]),
                },
                first_slot=slot,
            )


def _first_tokens() -> np.ndarray:
    """[3, 4]: what each slot reads next; padding behind the scored node."""
    return np.stack([PROMPT[slot, length : length + 4] for slot, length in enumerate(LENGTHS)])


def _unrolled(engine: Any, warp: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    feeds = {specs.TOKENS: _first_tokens(), specs.LENGTHS: LENGTHS, specs.SCORED_NODES: SCORED}
    out = engine.run({**feeds, specs.UNIFORMS: DRAWS, **warp})
    return tuple(out[n].copy() for n in (specs.SAMPLED_TOKENS, specs.CONFIDENCES, specs.SAMPLED_LAWS))


def _stepwise(engine: Any, warp: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    feeds = {specs.TOKENS: _first_tokens(), specs.LENGTHS: LENGTHS, specs.SCORED_NODES: SCORED}
    steps = []
    for step in range(NUM_STEPS):
        out = engine.run({**feeds, specs.UNIFORMS: DRAWS[:, step], **warp})
        steps.append([out[n].copy() for n in (specs.SAMPLED_TOKEN, specs.CONFIDENCE, specs.SAMPLED_PROBS)])
        feeds = {specs.TOKENS: steps[-1][0][:, None], specs.LENGTHS: LENGTHS + SCORED[:, 0] + step + 1}
    return tuple(np.stack(column, axis=1) for column in zip(*steps, strict=True))


def test_the_specs_are_inverse(neutral: Neutral) -> None:
    one, chain = _specs(neutral[1])
    assert stepwise_spec(chain) == one and not specs.is_unrolled(one) and specs.is_unrolled(chain)
    assert specs.chain_rows(chain) == NUM_STEPS - 1 and specs.chain_rows(one) == 0


@pytest.mark.parametrize("warp", [HOT, COLD], ids=["hot", "cold"])
@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
def test_a_chain_has_the_bits_of_single_steps(files: Any, backend: str, warp: dict[str, np.ndarray]) -> None:
    single, chain = _engine(files, f"{backend} stepwise"), _engine(files, f"{backend} unrolled")
    _fill(single)
    _fill(chain)
    expected, got = _stepwise(single, warp), _unrolled(chain, warp)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])
    np.testing.assert_array_equal(got[2][:, 1:], expected[2])
    assert not got[2][:, 0].any()
    assert len(set(got[0].ravel().tolist())) > 4
    if backend == "onnxruntime":
        for index in range(len(chain.caches.names)):
            for slot, rows in enumerate(LENGTHS + SCORED[:, 0] + NUM_STEPS):
                mine, theirs = (e.caches.view(index)[slot, :, :rows] for e in (chain, single))
                np.testing.assert_array_equal(mine, theirs)


def test_a_chain_copies_no_cache(files: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime warns whenever a TensorScatter copies: not here, but with the inner updates kept inside."""
    engine = _engine(files, "onnxruntime unrolled")
    _fill(engine)
    _unrolled(engine, COLD)
    assert "TensorScatter" not in capfd.readouterr().err
    for name in engine.cache_outputs:
        engine.cache_outputs[name] = [specs.updated_cache_name(name)]
    engine._bindings.clear()
    _unrolled(engine, COLD)
    assert "TensorScatter: in-place optimization not activated" in capfd.readouterr().err


def test_rows_of_the_whole_chain_must_fit(files: Any) -> None:
    for backend in ("onnxruntime", "reference"):
        engine = _engine(files, f"{backend} unrolled", max_rows=int(LENGTHS.max()) + 4 + NUM_STEPS - 2)
        with pytest.raises(RuntimeFault, match=f"got {LENGTHS.max() + 4 + NUM_STEPS - 1} cache rows"):
            _unrolled(engine, COLD)


def _lowered(model: ir.Model, spec: GraphSpec, dtype: str) -> ir.Model:
    work = model.clone()
    run_pipeline(work, tensorrt_table(spec, "none", dtype=dtype))
    attach_functions(work, dialect="tensorrt")
    return work


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    known = {i.name for i in session.get_inputs()}
    results = session.run(None, {n: a for n, a in feeds.items() if n in known})
    return dict(zip((o.name for o in session.get_outputs()), results, strict=True))


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (6, 0.0), (2, 3.0)])
def test_joined_updates_have_the_numbers_of_chained_ones(neutral: Neutral, window: int, softcap: float) -> None:
    """TensorRT's form in float32 beside the neutral one: ragged slots, stale rows, windows shorter than the chain."""
    model, dims = neutral[0].clone(), neutral[1]
    for node in model.graph:
        if node.op_type == "CachedAttention":
            node.attributes["window"] = ir.AttrInt64("window", window)
            node.attributes["softcap"] = ir.AttrFloat32("softcap", softcap)
    one, chain = _specs(dims)
    plain = model.clone()
    run_pipeline(plain, reference_table(chain))
    attach_functions(plain)
    shape = (3, dims.num_kv_heads, MAX_ROWS, dims.head_dim)
    caches = {n: RNG.normal(size=shape).astype(np.float32) for n in one.caches}
    mask = np.broadcast_to(np.tril(np.ones((4, 4), bool)), (3, 4, 4))
    feeds = {specs.TOKENS: _first_tokens(), specs.LENGTHS: LENGTHS + 3, specs.SCORED_NODES: SCORED}
    feeds |= {specs.TREE_MASK: mask, specs.UNIFORMS: DRAWS, **HOT, **caches}
    expected = _run(plain, feeds)
    lowered = _lowered(model, tensorrt_spec(chain, "float32", MAX_ROWS), "float32")
    scatters = [n for n in lowered.graph if n.op_type == "TensorScatter"]
    assert len(scatters) == 2 * dims.num_layers and all(n.inputs[0].is_graph_input() for n in scatters)
    got = _run(lowered, {**feeds, specs.KV_ROWS: np.zeros(64, np.int8)})
    np.testing.assert_array_equal(got[specs.SAMPLED_TOKENS], expected[specs.SAMPLED_TOKENS])
    np.testing.assert_allclose(got[specs.CONFIDENCES], expected[specs.CONFIDENCES], atol=TOLERANCE)
    np.testing.assert_allclose(got[specs.SAMPLED_LAWS][:, 1:], expected[specs.SAMPLED_LAWS][:, 1:], atol=TOLERANCE)
    for cache in one.caches:
        name = specs.updated_cache_name(cache)
        for slot, rows in enumerate(LENGTHS + 3 + SCORED[:, 0] + NUM_STEPS):
            np.testing.assert_allclose(got[name][slot, :, :rows], expected[name][slot, :, :rows], atol=1e-4)


def test_weights_are_shared(neutral: Neutral) -> None:
    """The unrolled graph holds each weight once, and one chain of attention nodes a layer."""
    model, dims = neutral[0].clone(), neutral[1]
    one, chain = _specs(dims)
    attach_tail(one).run(model)
    before = sum(v.const_value.nbytes for v in model.graph.initializers.values())
    assert unroll_draft(model, chain) == NUM_STEPS
    after = sum(v.const_value.nbytes for v in model.graph.initializers.values())
    assert after - before < 1000
    assert [len(c) for c in chains_of(model)] == [NUM_STEPS] * dims.num_layers


def test_a_plan_of_a_chain_builds(neutral: Neutral) -> None:
    model, dims = neutral
    spec = tensorrt_spec(_specs(dims)[1], "float16", MAX_ROWS)
    lowered = _lowered(model, spec, "float16")
    sizes = {"batch": (1, 2, 3), "nodes": (1, 2, 4), "scored": (1, 1, 1), "kv": (32, 64, MAX_ROWS)}

    def shape(dims: tuple[str | int, ...], column: int) -> tuple[int, ...]:
        return tuple(sizes[d][column] if isinstance(d, str) else d for d in dims)

    profile = {t.name: tuple(shape(t.dims, column) for column in range(3)) for t in spec.inputs}
    made = Parsed(ir.to_proto(lowered), profile)
    assert made.kinds.count("KV_CACHE_UPDATE") == 2 * dims.num_layers
    assert not {k for k in made.kinds if "PLUGIN" in k or "LOOP" in k}
