# SPDX-License-Identifier: Apache-2.0
"""Stacks of the operators of our graphs, of no model's sizes, opened and timed as a bundle's graph is."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.backends.measuring import CONTEXT
from speccompile.backends.onnxruntime.attention_cases import AttentionSizes, attention_attributes, attention_inputs
from speccompile.backends.onnxruntime.linear_cases import random_packed
from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES, TREE_MASK, TensorSpec
from speccompile.core.tree import chain_mask
from speccompile.ops.conv_rows import CONV_ROWS
from speccompile.ops.gated_delta import GATED_DELTA, pending_width
from speccompile.ops.int8_caches import INT8_ATTENTION
from speccompile.ops.op import DOMAIN, OPSET, Op
from speccompile.ops.packing import COLUMNS
from speccompile.ops.registry import OPS
from speccompile.planner.machine import INT8_CACHES, OTHER_BITS

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime

Clock = Callable[[], float]
Beside = tuple[float, float]  # seconds of the fastest and the slowest probe beside runs
Timed = tuple[Beside, float]  # and of a run
Arrays = dict[str, np.ndarray]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
SLOTS, GROUP = 4, 4  # of attention: sequences of `CONTEXT` rows, query heads of a K head
_HIDDEN, _INNER = 512, 1408  # of a gated decoder's layer, and columns of its Q, K and V
_QKV = 768
_LAYER = (
    ("NormPackedLinear", _HIDDEN, _QKV),
    ("PackedLinear", _HIDDEN, _HIDDEN),
    ("NormGatedPackedLinear", _HIDDEN, 2 * _INNER),
    ("PackedLinear", _INNER, _HIDDEN),
)
_KV_HEADS, _HEAD_DIM, _MOST_QUERIES = 2, 64, 64
_KEY_HEADS, _VALUE_HEADS, _KERNEL, _PENDING = 4, 8, 4, 16  # of recurrent states of 64 x 64
_NUM_LAUNCHES = 64
_SECONDS, _LEAST, _MOST = 0.06, 3, 100  # of the runs that count, and how many
_PATIENCE_S = 0.15
_WARM_S, _MOST_WARM = 0.01, 8  # a step of decoding finds what steps of its own kind left in the caches
_NEAR, _PROBES = math.log(1.1), 5  # of the usual speed; of so many probes in a row the fastest counts
PROBE, _PROBE_ROWS = (8, 512, 512), 4  # some 0.5 ms, with 8 MB of weights: other tenants take memory more than cores
_OUT = ".out"


@dataclass(frozen=True)
class Call:
    """An operator: constants, or names of the stack's inputs, by the names of the operator's inputs."""

    op: str
    inputs: Mapping[str, np.ndarray | str]
    attributes: Mapping[str, int | float]
    domain: str = DOMAIN


@dataclass(frozen=True)
class Stack:
    """Operators side by side. Activations are few and used again, as in a step; caches are updated in place."""

    calls: Sequence[Call]
    num: int  # numbers that it reads: weights, columns of K and V in all rows, states
    rows: Sequence[int]  # of activations, or queries of one K head, or nodes of a sequence
    feeds: Callable[[int], Arrays]  # its inputs for so many rows
    others_bytes: int = 0  # read before each run, beside the time


def linears(form: str, num_bytes: int) -> Stack:
    """Returns linears; a panel of weights is repeated, as times do not depend on the numbers."""
    calls, num, made = [], 0, 0
    for index, (kind, num_in, num_out) in enumerate(itertools.cycle(_LAYER)):
        packed = random_packed(form, num_in, COLUMNS, 0)
        constants = {n: np.concatenate([a] * (num_out // COLUMNS)) for n, a in packed.constants.items()}
        given = {"x": f"x{num_in}", "residual": f"x{num_in}", "gamma": np.ones(num_in, np.float32), **constants}
        given["bias"] = np.zeros(num_out, np.float32)
        sizes = {"num_in": num_in, "num_out": num_out, **packed.attributes}
        calls.append(_call(OPS[kind + form], index, given, sizes))
        num, made = num + num_in * num_out, made + sum(array.nbytes for array in constants.values())
        if made >= num_bytes:
            return Stack(calls, num, ROWS, _activations(calls))
    raise AssertionError


def caches(kind: str, num_bytes: int) -> Stack:
    """Returns attention over `CACHES` or `INT8_CACHES` of `SLOTS` sequences with `CONTEXT` rows each."""
    op = OPS["RotaryQkvAttention"]
    op = INT8_ATTENTION[op.name] if kind == INT8_CACHES else op
    columns, most, lengths = 2 * _KV_HEADS * _HEAD_DIM, _MOST_QUERIES // GROUP, np.full(SLOTS, CONTEXT)
    row_bytes = columns * OTHER_BITS[kind][0] / 8
    count = math.ceil(num_bytes / (SLOTS * CONTEXT * row_bytes))

    def step(nodes: int) -> Arrays:
        sizes = AttentionSizes(SLOTS, nodes, _KV_HEADS, GROUP, _HEAD_DIM, CONTEXT + most, _HEAD_DIM)
        return attention_inputs(op, sizes, np.random.default_rng(0), lengths)

    attributes = attention_attributes(op, AttentionSizes(SLOTS, 1, _KV_HEADS, GROUP, _HEAD_DIM, 1, _HEAD_DIM))
    calls = [_call(op, index, {}, attributes) for index in range(count)]
    held = {n: a for n, a in step(1).items() if _updated(op.name, n)}
    own = {f"{n}.{i}": a.copy() for i in range(count) for n, a in held.items()}

    def feeds(queries: int) -> Arrays:
        return {**{n: a for n, a in step(queries // GROUP).items() if n not in held}, **own}

    rows = [n for n in ROWS if GROUP <= n <= _MOST_QUERIES]
    return Stack(calls, count * SLOTS * CONTEXT * columns, rows, feeds)


def states(num_bytes: int) -> Stack:
    """Returns the two operators of recurrent layers for `SLOTS` sequences, whose nodes are drafts."""
    keys, size = _KEY_HEADS * _HEAD_DIM, _VALUE_HEADS * _HEAD_DIM
    channels, num = 2 * keys + size, size * _HEAD_DIM
    count = -(-num_bytes // (SLOTS * num * 4))
    shapes = {
        "state": (_VALUE_HEADS, _HEAD_DIM, _HEAD_DIM),
        "pending": (_PENDING, pending_width(_KEY_HEADS, _VALUE_HEADS, _HEAD_DIM, _HEAD_DIM)),
        "rows": (_KERNEL - 1 + _PENDING, channels),
    }
    own = {f"{n}.{i}": np.full((SLOTS, *s), -0.01, np.float32) for i in range(2 * count) for n, s in shapes.items()}
    heads = {"num_key_heads": _KEY_HEADS, "num_value_heads": _VALUE_HEADS}
    weights = {"weight": np.full((channels, _KERNEL), 0.1, np.float32), "bias": np.zeros(channels, np.float32)}
    calls = []
    for index in range(count):
        calls.append(_call(CONV_ROWS, index, weights, {"activation": 1}))
        calls.append(_call(GATED_DELTA, index, {}, heads))

    def feeds(nodes: int) -> Arrays:
        widths = {"q": keys, "k": keys, "v": size, "g": _VALUE_HEADS, "beta": _VALUE_HEADS, "x": channels}
        made: Arrays = {n: np.full((SLOTS, nodes, wide), -0.1, np.float32) for n, wide in widths.items()}
        made |= {n: np.full(SLOTS, CONTEXT) for n in (LENGTHS, STATE_LENGTHS)}
        made |= {SURE_NODES: np.zeros(SLOTS, np.int64), TREE_MASK: chain_mask(SLOTS, nodes)}
        return {**made, **own}

    return Stack(calls, count * SLOTS * num, [n for n in ROWS if n <= _PENDING], feeds)


def launches() -> Stack:
    # Returns operators of ours, which a sequence joins, that cost nothing but their launch.
    return _products(_NUM_LAUNCHES, COLUMNS, COLUMNS)


def _products(count: int, num_in: int, num_out: int) -> Stack:
    # Returns the same product several times.
    given: dict[str, Any] = {"x": f"x{num_in}", **random_packed("F32", num_in, num_out, 0).constants}
    given["bias"] = np.zeros(num_out, np.float32)
    calls = [_call(OPS["PackedLinearF32"], 0, given, {"num_in": num_in, "num_out": num_out})] * count
    return Stack(calls, count, (1,), _activations(calls))


def others(num_bytes: int) -> Stack:
    # Returns operators of ONNX Runtime on activations, run as in a step: after it has read `num_bytes` of weights.
    calls = [Call("Mul", {"a": f"x{_HIDDEN}", "b": f"x{_HIDDEN}"}, {}, domain="")] * _NUM_LAUNCHES
    return Stack(calls, _NUM_LAUNCHES, ROWS, _activations(calls), num_bytes)


def _activations(calls: Sequence[Call]) -> Callable[[int], Arrays]:
    names = sorted({value for call in calls for value in call.inputs.values() if isinstance(value, str)})
    return lambda rows: {
        name: np.random.default_rng(0).standard_normal((1, rows, int(name[1:])), dtype=np.float32) for name in names
    }


def _updated(op: str, name: str) -> str | None:
    # Returns the output that an input of an operator is updated as; None: it is not.
    found = f"{name.removesuffix('_cache')}_updated"
    return found if op in OPS and any(tensor.name == found for tensor in OPS[op].outputs) else None


def _call(op: Op, index: int, given: Mapping[str, Any], attributes: Mapping[str, int | float]) -> Call:
    # Returns the operator with inputs of its own where it updates them, given ones, and those of the stack.
    inputs = {}
    for name in (tensor.name for tensor in op.inputs):
        inputs[name] = f"{name}.{index}" if _updated(op.name, name) else given.get(name, name)
    return Call(op.name, inputs, {**op.attributes, **attributes})


class Probe:
    """Times runs at one speed, which a product beside each tells: other tenants halve it for seconds."""

    def __init__(self, threads: int, clock: Clock, folder: Path, usual_s: float | None = None) -> None:
        stack = _products(*PROBE)
        self._clock, self._run = clock, bound_run(open_stack(stack, threads, folder), stack.feeds(_PROBE_ROWS))
        # The product's seconds at that speed; None: the median so far.
        self._given, self._seen = usual_s, [self._once() for _ in range(_PROBES)]

    @property
    def usual_s(self) -> float:
        return self._given or float(np.median(self._seen))

    def is_usual(self, beside: Beside) -> bool:
        return _distance(beside, self.usual_s) < _NEAR

    def time(
        self, run: Callable[[], object], before: Callable[[], object] = lambda: None, patience_s: float = _PATIENCE_S
    ) -> Timed:
        """Returns the fastest and slowest probe beside the runs that count, and their seconds, a low quantile."""
        runs: list[Timed] = []
        num_warm = min(int(_WARM_S / self._seconds(run, before)), _MOST_WARM)
        counted, end, last = list[float](), time.monotonic() + patience_s, self._speed()
        while len(counted) < _LEAST or (sum(counted) < _SECONDS and len(counted) < _MOST):
            for _ in range(num_warm):
                self._seconds(run, before)
            took = [self._seconds(run, before) for _ in range(max(num_warm, 1))]
            speed = self._speed()
            runs += [((min(last, speed), max(last, speed)), seconds) for seconds in took]
            last, usual_s = speed, self.usual_s
            counted = [one for beside, one in runs if _distance(beside, usual_s) < _NEAR]
            if time.monotonic() > end and len(runs) >= _LEAST:
                break
        chosen = sorted(runs, key=lambda timed: _distance(timed[0], usual_s))[: max(len(counted), _LEAST)]
        beside = min(low for (low, _), _ in chosen), max(high for (_, high), _ in chosen)
        return beside, float(np.quantile([one for _, one in chosen], 0.1))

    def _speed(self) -> float:
        self._seen.append(min(self._once() for _ in range(_PROBES)))
        return self._seen[-1]

    def _once(self) -> float:
        return self._seconds(self._run)

    def _seconds(self, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        before()
        start = self._clock()
        run()
        return self._clock() - start


def _distance(beside: Beside, usual_s: float) -> float:
    return max(abs(math.log(seconds / usual_s)) for seconds in beside)


def times_by_rows(stack: Stack, threads: int, probe: Probe, folder: Path) -> dict[int, Timed]:
    # Returns what `Probe.time` does of a run of a stack, by rows.
    session, others = open_stack(stack, threads, folder), np.ones(stack.others_bytes // 8)
    return {rows: probe.time(bound_run(session, stack.feeds(rows)), others.sum) for rows in stack.rows}


def open_stack(stack: Stack, threads: int, folder: Path) -> onnxruntime.InferenceSession:
    """Returns a session of a stack, written to `folder`."""
    import onnx_ir as ir

    from speccompile.backends.onnxruntime.engine import open_session
    from speccompile.backends.onnxruntime.sequences import write_sequences
    from speccompile.passes.edit import Editor
    from speccompile.passes.save import save_model

    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": OPSET, DOMAIN: 1}, name="stack"), ir_version=11)
    sources = {name: _source(name, array) for name, array in stack.feeds(stack.rows[0]).items()}
    model.graph.inputs.extend(sources.values())
    edit = Editor(model)
    for index, call in enumerate(stack.calls):
        given = call.inputs.items()
        values = [sources[v] if isinstance(v, str) else edit.const(v, f"{n}.{index}") for n, v in given]
        outputs = OPS[call.op].outputs if call.domain else (TensorSpec("y", (), "float32"),)
        made = edit.op(call.op, *values, domain=call.domain, num_outputs=len(outputs), **call.attributes)
        for tensor, value in zip(outputs, [made] if len(outputs) == 1 else made, strict=True):
            # An updated state is the output of the name of its input.
            own = next((v for n, v in given if _updated(call.op, n) == tensor.name), f"{tensor.name}.{index}")
            element = ir.DataType.INT8 if tensor.dtype == "int8" else ir.DataType.FLOAT
            value.name, value.type = f"{own}{_OUT}", ir.TensorType(element)
            model.graph.outputs.append(value)
    path = folder / "graph.onnx"
    save_model(model, path)
    write_sequences(path)
    return open_session(path, {"threads": threads})


def _source(name: str, array: np.ndarray) -> ir.Value:
    import onnx_ir as ir

    element = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    return ir.Value(name=name, type=element, shape=ir.Shape([None] * array.ndim))


def bound_run(session: onnxruntime.InferenceSession, feeds: Arrays) -> Callable[[], object]:
    # Returns a run of a stack that writes to the same arrays each time.
    binding, buffers = session.io_binding(), dict[tuple[int, ...], np.ndarray]()
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    made = session.run(None, feeds)  # it says the shapes
    for value, array in zip(session.get_outputs(), made, strict=True):
        to = feeds.get(value.name.removesuffix(_OUT))
        to = buffers.setdefault(array.shape, array) if to is None else to
        binding.bind_output(value.name, "cpu", 0, to.dtype.type, to.shape, to.ctypes.data)
    return lambda: (session.run_with_iobinding(binding), feeds, buffers)
