# SPDX-License-Identifier: Apache-2.0
"""A tiny random decoder with a recurrent and an attention layer, made node by node, and what its states must hold."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.core import registry, specs
from speccompile.core.dims import LayerDims, ModelDims, RecurrentDims
from speccompile.core.specs import GraphSpec, state_names
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input

VOCAB, WIDTH, NUM_DRAFTS, MAX_SEQ = 29, 16, 4, 96
RECURRENT = RecurrentDims(num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16, conv_channels=64, conv_kernel=3)
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 8
DIMS = ModelDims(
    "hybrid", VOCAB, WIDTH, 2, HEADS, KV_HEADS, HEAD_DIM, MAX_SEQ,
    layer_dims=(LayerDims(recurrent=RECURRENT), LayerDims(KV_HEADS, HEAD_DIM)),
)  # fmt: skip
MAX_ROWS = MAX_SEQ + NUM_DRAFTS + 1


def hybrid_spec() -> GraphSpec:
    """Returns the spec of the compiled target, with logits."""
    return verified_spec(_decoder(), keep_logits=True)


def _decoder() -> GraphSpec:
    return replace(decoder_spec("target", DIMS, max_pending=NUM_DRAFTS + 1), max_rows=MAX_SEQ)


def hybrid_model(seed: int = 3, bad: int | None = None) -> ir.Model:
    """Returns the neutral graph.

    Args:
        seed: of the weights.
        bad: a token whose row is NaN and that is never the next one.
    """
    spec, rng = _decoder(), np.random.default_rng(seed)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 24, OPS_DOMAIN: 1}, name="target")
    model = ir.Model(graph, ir_version=11)
    given, edit = {t.name: add_input(model, t.name, t.dims, t.dtype) for t in spec.inputs}, Editor(model)

    def weight(name: str, *shape: int, scale: float = 1.0) -> ir.Value:
        return edit.const((scale * rng.standard_normal(shape)).astype(np.float32), name)

    def linear(x: ir.Value, name: str, num_in: int, num_out: int) -> ir.Value:
        made: ir.Value = edit.op("MatMul", x, weight(name, num_in, num_out, scale=num_in**-0.5))
        return made

    rows, favour = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32), np.zeros(VOCAB, np.float32)
    if bad is not None:
        rows[bad], favour[bad] = np.nan, -1e4
    embedding = edit.const(rows, "embedding")
    x = edit.op("Gather", embedding, given[specs.TOKENS], axis=0)
    counts = [given[name] for name in (specs.LENGTHS, specs.STATE_LENGTHS, specs.SURE_NODES, specs.TREE_MASK)]
    state, pending, conv_rows = (given[name] for name in state_names(0))
    taps = weight("taps", RECURRENT.conv_channels, RECURRENT.conv_kernel)
    bias = edit.const(np.zeros(RECURRENT.conv_channels, np.float32), "bias")
    raw = linear(x, "in_proj", WIDTH, RECURRENT.conv_channels)
    conv, conv_after = edit.op(
        "ConvRows", raw, taps, bias, conv_rows, *counts, domain=OPS_DOMAIN, num_outputs=2, activation=1
    )
    keys, values = RECURRENT.key_dim, RECURRENT.num_value_heads * RECURRENT.value_dim
    q, k, v = edit.op("Split", conv, edit.ints([keys, keys, values]), axis=2, num_outputs=3)
    ones = edit.const(np.ones((keys, keys), np.float32), "ones")
    norm = edit.op("Sqrt", edit.op("Add", edit.op("MatMul", edit.op("Mul", k, k), ones), _small(edit)))
    # ONNX Runtime computes Softplus by vectors: the rest of a row that does not fill one gets other bits.
    gates = edit.op("Softplus", linear(x, "gates", WIDTH, 16))
    gate, weight_of_row, _ = edit.op("Split", gates, edit.ints([2, 2, 12]), axis=2, num_outputs=3)
    g, beta = edit.op("Neg", gate), edit.op("Sigmoid", weight_of_row)
    heads = {"num_key_heads": 1, "num_value_heads": 2, "scale": RECURRENT.key_dim**-0.5, "delta": 1}
    out, state_after, pending_after = edit.op(
        "GatedDelta", q, edit.op("Div", k, norm), v, g, beta, state, pending, *counts,
        domain=OPS_DOMAIN, num_outputs=3, **heads,
    )  # fmt: skip
    x = edit.op("Add", x, linear(out, "out_proj", values, WIDTH))

    nums = (HEADS, KV_HEADS, KV_HEADS)
    sides = [linear(x, f"{n}_proj", WIDTH, num * HEAD_DIM) for n, num in zip("qkv", nums, strict=True)]
    split = [edit.op("Reshape", side, edit.ints([0, 0, num, HEAD_DIM])) for side, num in zip(sides, nums, strict=True)]
    turned = [_shaped(edit.op("Transpose", r, perm=[0, 2, 1, 3]), n) for r, n in zip(split, nums, strict=True)]
    caches = [given[name] for name in spec.caches]
    attended, k_after, v_after = edit.op(
        "CachedAttention", *turned, *caches, given[specs.LENGTHS], given[specs.TREE_MASK],
        domain=OPS_DOMAIN, num_outputs=3, scale=HEAD_DIM**-0.5, softcap=0.0, window=0,
    )  # fmt: skip
    joined = edit.op("Reshape", attended, edit.ints([0, 0, HEADS * HEAD_DIM]))
    x = edit.op("Add", x, linear(joined, "o_proj", HEADS * HEAD_DIM, WIDTH))
    picked = edit.op("GatherND", x, edit.op("Unsqueeze", given[specs.SCORED_NODES], edit.ints([2])), batch_dims=1)
    logits = edit.op("Add", linear(picked, "head", WIDTH, VOCAB), edit.const(favour, "favour"))
    after = (logits, state_after, pending_after, conv_after, k_after, v_after)
    for value, tensor in zip(after, spec.outputs, strict=True):
        value.name, value.shape = tensor.name, ir.Shape(list(tensor.dims))
        value.type = ir.TensorType(ir.DataType.FLOAT)
        graph.outputs.append(value)
    return model


def _small(edit: Editor) -> ir.Value:
    return edit.const(np.full((1,), 1e-6, np.float32), "epsilon")


def _shaped(value: ir.Value, heads: int) -> ir.Value:
    value.shape, value.type = ir.Shape(["batch", heads, "nodes", HEAD_DIM]), ir.TensorType(ir.DataType.FLOAT)
    return value


class Hybrid:
    """The compiled target.

    Args:
        folder: of the graph; made here.
        backend: `onnxruntime` or `reference`.
        form: kernel form on ONNX Runtime.
        bad: see `hybrid_model`.
    """

    def __init__(self, folder: Path, backend: str = "onnxruntime", form: str = "fp32", bad: int | None = None) -> None:
        self.backend, self.spec, self.path = registry.backend(backend), hybrid_spec(), folder / "graph.onnx"
        self.backend.compile(CompileJob(hybrid_model(bad=bad), self.spec, folder, form=form))
        self.rollback = folder / "rollback"
        self.rollback.mkdir()
        self.backend.compile_rollback(DIMS, self.rollback)
        self._fresh: Any = None

    def open(self, max_slots: int) -> Any:
        """Returns an engine."""
        tuning = {"threads": 1, "spinning": "off"}
        sizes = {"max_slots": max_slots, "max_rows": MAX_ROWS}
        rollback = self.rollback / "graph.onnx"
        return self.backend.load(LoadJob(self.path, self.spec, **sizes, tuning=tuning, rollback=rollback))

    def held(self, tokens: Sequence[int], applied: int) -> list[np.ndarray]:
        """Returns what the states hold after a fresh prefill: state, pending rows and conv rows.

        Args:
            tokens: of the sequence.
            applied: how many of them the state holds; the others are pending.
        """
        if self._fresh is None:
            self._fresh = self.open(1)
        engine = self._fresh
        engine.reset()
        if applied:
            engine.run(feed([tokens[:applied]], [0], [applied]))
        if tokens[applied:]:
            engine.run(feed([tokens[applied:]], [applied], [0]))
        return self.parts(engine, 0, tokens)

    def check(self, engine: Any, slot: int, tokens: Sequence[int]) -> None:
        """Checks that the states of a slot hold these tokens, in the bits of a fresh prefill; so does its snapshot."""
        states = engine.states
        if not tokens:
            return
        applied = int(states.lengths[slot])
        assert 0 <= len(tokens) - applied <= states.num_pending[slot], "a slot whose states hold other tokens"
        got, wanted = self.parts(engine, slot, tokens), self.held(tokens, applied)
        for name, part, other in zip(("state", "pending", "conv_rows"), got, wanted, strict=True):
            assert part.tobytes() == other.tobytes(), f"other bits of {name} in slot {slot}"
        if (snapshot := states.snapshots[slot]) is not None:
            num = snapshot.length + snapshot.num_pending
            assert num <= len(tokens), "a snapshot of other tokens"
            arrays = {name: array[None] for name, array in zip(states.arrays, snapshot.arrays, strict=True)}
            wanted = self.held(tokens[:num], snapshot.length)
            for part, other in zip(_parts(arrays, 0, snapshot.num_pending), wanted, strict=True):
                assert part.tobytes() == other.tobytes(), f"other bits of the snapshot of slot {slot}"

    def parts(self, engine: Any, slot: int, tokens: Sequence[int]) -> list[np.ndarray]:
        """Returns what the states of a slot hold of its tokens: state, pending rows and conv rows."""
        return _parts(engine.states.arrays, slot, len(tokens) - int(engine.states.lengths[slot]))


def _parts(arrays: dict[str, np.ndarray], slot: int, num_pending: int) -> list[np.ndarray]:
    state, pending, conv_rows = arrays.values()
    history = RECURRENT.conv_kernel - 1
    return [state[slot].copy(), pending[slot, :num_pending].copy(), conv_rows[slot, : history + num_pending].copy()]


def feed(tokens: Any, lengths: Any, sure: Any) -> dict[str, np.ndarray]:
    """Returns the inputs of a step of chains: tokens [batch, nodes], lengths [batch], sure nodes [batch]."""
    values = {specs.TOKENS: tokens, specs.LENGTHS: lengths, specs.SURE_NODES: sure}
    return {name: np.asarray(value, np.int64) for name, value in values.items()}
