# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU: kernels against their definition, equal bits of chains, trees and single steps, bounds."""

from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.attention_cases import (
    CACHES,
    NODE_AXIS,
    Arrays,
    AttentionSizes,
    attention_attributes,
    attention_inputs,
    chain_fault,
)
from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.backends.onnxruntime.kernel_selftest import run
from speccompile.core.specs import LENGTHS, TREE_MASK
from speccompile.ops.cached_attention import (
    CACHED_ATTENTION,
    LATENT_ATTENTION,
    SHARED_ATTENTION,
    SINK_ATTENTION,
    cached_attention,
)
from speccompile.ops.int8_caches import INT8_ATTENTION, quantize_rows
from speccompile.ops.op import Op
from speccompile.ops.qkv_attention import QKV_ATTENTION
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of
from tests.ops.qkv_lab import Call, Sizes, naive, random_call, tree_mask
from tests.plugins.cpu_lab import library, library_for, needs_compiler

pytestmark = [needs_compiler, pytest.mark.plan]

FLOAT_OPS = (CACHED_ATTENTION, SINK_ATTENTION, LATENT_ATTENTION, *QKV_ATTENTION.values())
OPS = (*FLOAT_OPS, *(INT8_ATTENTION[op.name] for op in FLOAT_OPS))
NAMES = [op.name for op in OPS]
HEAD_DIMS = (1, 2, 6, 16, 20, 64, 80, 128, 256)
KINDS: list[dict[str, Any]] = [
    {},
    {"rotary": True},
    {"rotary": True, "interleaved": 1},
    {"norm": True, "epsilon": 1e-3},
    {"norm": True, "rotary": True, "window": 3},
    {"rotary": True, "softcap": 1.5},
    {"window": 17, "softcap": 30.0},
    {"rotary": True, "window": 4, "has_image": True},
]


def caches_of(inputs: Arrays) -> list[str]:
    """The names of the caches among the inputs of a call."""
    return [name for name in CACHES if name in inputs]


VARIANTS = ("native", "avx2", "portable")  # instruction sets


def open_op(op: Op, threads: int = 1, variant: str = "native", **attributes: Any) -> ort.InferenceSession:
    return open_session(model_of(op.name, **attributes), library_for(variant), threads)


def calls_of(kind: dict[str, Any]) -> list[Call]:
    """Every head size once: ragged trees, empty and full caches, tiles of rows that are not full."""
    rng, calls = np.random.default_rng(len(str(kind))), []
    for index, head_dim in enumerate(HEAD_DIMS):
        if head_dim == 1 and kind.get("rotary"):
            continue
        nodes, max_seq = (1, 5, 17)[index % 3], (19, 70, 301)[index % 3]
        sizes = Sizes(2, nodes, 1 + index % 2, 1 + index % 4, head_dim, max_seq, rotary_dim=[0, 2][index % 2])
        lengths = np.array([[0, max_seq - nodes], [max_seq // 2, 1]][index % 2])
        calls.append(random_call(rng, sizes, lengths=lengths, **kind))
    return calls


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_error_is_at_most_twice_the_formulas_own(kind, variant):
    calls = calls_of(kind)
    exact = [naive(call) for call in calls]
    bound = 2 * max(np.abs(naive(c, np.float32) - e).max() for c, e in zip(calls, exact, strict=True))
    for call, wanted in zip(calls, exact, strict=True):
        got = run(open_op(call.op, 2, variant, **call.attributes), call.inputs)
        errors = np.abs(got[0] - wanted)
        assert errors.max() <= bound, (call.attributes, np.argwhere(errors > bound)[0], errors.max(), bound)
        for new, twin in zip(got[1:], call.twin()[1:], strict=True):
            np.testing.assert_allclose(new, twin, atol=2.0**-21)


@pytest.mark.parametrize("variant", VARIANTS)
def test_latent_attention_gives_the_bits_of_two_equal_caches(variant):
    sizes = AttentionSizes(num_kv_heads=1, group=6, head_dim=72)
    inputs = attention_inputs(LATENT_ATTENTION, sizes, np.random.default_rng(9), np.array([0, 30]))
    attributes = attention_attributes(LATENT_ATTENTION, sizes, window=6)
    twice = {**inputs, "v": inputs["k"], "v_cache": inputs["k_cache"]}
    wanted = run(open_op(CACHED_ATTENTION, 2, variant, **attributes), twice)
    for mine, other in zip(run(open_op(LATENT_ATTENTION, 2, variant, **attributes), inputs), wanted[:2], strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_attention_gives_the_bits_of_the_layer_that_wrote(variant):
    sizes = AttentionSizes(group=2, head_dim=24)
    inputs = attention_inputs(CACHED_ATTENTION, sizes, np.random.default_rng(9), np.array([0, 30]))
    attributes = attention_attributes(CACHED_ATTENTION, sizes, window=6, softcap=2.0)
    wanted, k_cache, v_cache = run(open_op(CACHED_ATTENTION, 2, variant, **attributes), inputs)
    given = {t.name: inputs[t.name] for t in SHARED_ATTENTION.inputs} | {"k_cache": k_cache, "v_cache": v_cache}
    (out,) = run(open_op(SHARED_ATTENTION, 2, variant, **attributes), given)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_rows_are_the_twins_levels_and_scales_in_bits(variant):
    sizes = AttentionSizes(head_dim=37)
    op = INT8_ATTENTION[CACHED_ATTENTION.name]
    inputs = attention_inputs(op, sizes, np.random.default_rng(3), np.array([0, 30]))
    inputs["k"][0, 0] *= np.float32(1e-20)
    inputs["k"][0, 1, 2] = 0
    inputs["k"][1, 0, 1, 5] = 3e-31  # beside larger ones
    inputs["v"][1, 1, 3, 7], inputs["v"][1, 1, 4, 34] = np.inf, np.nan
    session = open_op(op, 2, variant, **attention_attributes(op, sizes))
    out, *caches = run(session, inputs)
    for name, levels, scales in (("k", *caches[:2]), ("v", *caches[2:])):
        wanted, steps = quantize_rows(inputs[name])
        for slot, length in enumerate(inputs[LENGTHS]):
            rows = np.isfinite(steps[slot].repeat(32, -1)[..., :37])
            part = slice(length, length + sizes.nodes)
            np.testing.assert_array_equal(levels[slot][:, part][rows], wanted[slot][rows])
            np.testing.assert_array_equal(scales[slot][:, part], steps[slot])
    faults = np.zeros(out.shape, bool)
    faults[1, 3:, 3:, :32] = faults[1, 4:, 3:, 32:] = True  # the columns of their groups
    np.testing.assert_array_equal(np.isnan(out), faults)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sink", [-200.0, -1.0, 3.0, 200.0])
def test_a_sink_takes_its_share_of_each_head(sink, variant):
    sizes = AttentionSizes()
    inputs = attention_inputs(SINK_ATTENTION, sizes, np.random.default_rng(8), np.array([0, 30]))
    inputs["sinks"] = np.linspace(sink, sink + 2, sizes.num_heads, dtype=np.float32)
    wide = {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in inputs.items()}
    for window in (0, 4):
        attributes = attention_attributes(SINK_ATTENTION, sizes, window=window)
        exact = cached_attention(**wide, **attributes)[0]
        bound = 2 * np.abs(cached_attention(**inputs, **attributes)[0] - exact).max() + 2.0**-22
        got = run(open_op(SINK_ATTENTION, 2, variant, **attributes), inputs)[0]
        assert np.abs(got - exact).max() <= bound
    assert (np.abs(exact).max() < 1e-6) == (sink > 100)
    if sink < -100:
        del inputs["sinks"]
        plain = attention_attributes(CACHED_ATTENTION, sizes, window=window)
        np.testing.assert_array_equal(run(open_op(CACHED_ATTENTION, 2, variant, **plain), inputs)[0], got)


@pytest.mark.parametrize(("window", "variant"), [(0, "native"), (3, "avx2"), (9, "native"), (5, "portable")])
@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_chains_of_every_length_give_the_bits_of_single_steps(op, window, variant):
    for head_dim, nodes in ((20, 16), (64, 17), (8, 100)):
        sizes = AttentionSizes(nodes=nodes, head_dim=head_dim, rotary_dim=head_dim // 2 // 2 * 2, max_seq=230)
        rng = np.random.default_rng(nodes)
        inputs = attention_inputs(op, sizes, rng, np.array([0, sizes.max_seq - nodes]))
        session = open_op(op, 1, variant, **attention_attributes(op, sizes, window=window))
        assert chain_fault(op, partial(run, session), inputs) is None


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_threads_slots_and_other_nodes_change_no_bit(op):
    sizes = AttentionSizes(batch=3, nodes=48, max_seq=300, head_dim=24)
    inputs = attention_inputs(op, sizes, np.random.default_rng(2), np.array([200, 0, 31]))
    attributes = attention_attributes(op, sizes, window=40)
    one, two = (open_op(op, threads, **attributes) for threads in (1, 2))
    whole = run(one, inputs)
    for mine, other in zip(whole, run(two, inputs), strict=True):
        np.testing.assert_array_equal(mine, other)
    by_slot = ("qkv", "q", "k", "v", *CACHES, LENGTHS, TREE_MASK)
    for slot in range(sizes.batch):
        alone = run(one, {n: a[slot : slot + 1] if n in by_slot else a for n, a in inputs.items()})
        np.testing.assert_array_equal(alone[0][0], whole[0][slot])
    for nodes in (1, 2, 3, 4, 5, 13, 16, 17, 47):
        fewer = {n: a.take(range(nodes), NODE_AXIS[n]) if n in NODE_AXIS else a for n, a in inputs.items()}
        fewer[TREE_MASK] = inputs[TREE_MASK][:, :nodes, :nodes]
        np.testing.assert_array_equal(run(one, fewer)[0], whole[0][:, :nodes])


@pytest.mark.parametrize("op", OPS, ids=NAMES)
@pytest.mark.parametrize("window", [0, 5])
def test_a_path_of_a_tree_gives_the_bits_of_a_chain(op, window):
    """Other branches, stale rows and rows of other slots may even be NaN: nothing of them is read."""
    chain, path = AttentionSizes(nodes=9, max_seq=70), [0, 2, 3, 7, 8, 9, 11, 13, 14]
    tree = AttentionSizes(nodes=15, max_seq=70)
    rng = np.random.default_rng(3)
    straight = attention_inputs(op, chain, rng, np.array([0, 33]))
    branched = attention_inputs(op, tree, rng, straight[LENGTHS])
    branched |= {n: straight[n].copy() for n in branched if n not in NODE_AXIS and n != TREE_MASK}
    for name, axis in NODE_AXIS.items():
        if name in branched:
            branched[name][:] = np.nan
            np.moveaxis(branched[name], axis, 0)[path] = np.moveaxis(straight[name], axis, 0)
    for slot, length in enumerate(straight[LENGTHS]):
        for name in caches_of(branched):
            branched[name][slot, :, length:] = 99 if branched[name].dtype == np.int8 else np.nan
    branched[TREE_MASK] = tree_mask(rng, 2, tree.nodes)
    for index, node in enumerate(path):
        branched[TREE_MASK][:, node] = np.isin(np.arange(tree.nodes), path[: index + 1])
    session = open_op(op, 2, **attention_attributes(op, tree, window=window))
    wanted = run(session, straight)[0]
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(run(session, branched)[0][:, path], wanted)


def test_nan_of_an_ancestor_reaches_its_descendants_alone():
    call = random_call(np.random.default_rng(0), Sizes(batch=2, nodes=4), is_chain=True, rotary=True)
    call.inputs["qkv"][0, 2] = np.nan
    out = run(open_op(call.op, **call.attributes), call.inputs)[0]
    assert np.isnan(out[0, 2:]).all() and np.isfinite(out[0, :2]).all() and np.isfinite(out[1]).all()


def bound_run(session: ort.InferenceSession, inputs: Arrays, caches: dict[str, np.ndarray]) -> np.ndarray:
    """Runs with each cache bound as input and output at one address; returns the first output."""
    binding = session.io_binding()
    for name, array in inputs.items():
        held = caches.get(name, array)
        binding.bind_input(name, "cpu", 0, held.dtype.type, held.shape, held.ctypes.data)
    binding.bind_output("out", "cpu")
    for name, held in caches.items():
        output = name.replace("cache", "updated").replace("scale", "scale_updated")
        binding.bind_output(output, "cpu", 0, held.dtype.type, held.shape, held.ctypes.data)
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0]


@pytest.mark.parametrize("op", OPS, ids=NAMES)
def test_bound_caches_are_updated_in_place(op):
    sizes = AttentionSizes()
    inputs = attention_inputs(op, sizes, np.random.default_rng(4), np.array([3, 30]))
    session = open_op(op, **attention_attributes(op, sizes))
    wanted = run(session, inputs)
    caches = {name: inputs[name].copy() for name in caches_of(inputs)}
    np.testing.assert_array_equal(bound_run(session, inputs, caches), wanted[0])
    for held, copied in zip(caches.values(), wanted[1:], strict=True):
        np.testing.assert_array_equal(held, copied)


@pytest.mark.parametrize("op", OPS, ids=NAMES)
@pytest.mark.parametrize("length", [-1, 34, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_lengths_outside_the_caches_are_refused_and_nothing_is_written(op, length):
    sizes = AttentionSizes()
    inputs = attention_inputs(op, sizes, np.random.default_rng(5), np.array([3, 30]))
    inputs[LENGTHS][1] = length
    session = open_op(op, **attention_attributes(op, sizes))
    caches = {name: inputs[name].copy() for name in caches_of(inputs)}
    with pytest.raises(FAULTS, match=rf"{op.name}: lengths\[1\] is {length} "):
        bound_run(session, inputs, caches)
    for name, held in caches.items():
        np.testing.assert_array_equal(held, inputs[name])


def test_a_position_without_rotation_is_refused():
    call = random_call(np.random.default_rng(6), Sizes(max_seq=20), rotary=True, lengths=np.array([3, 17]))
    for name in ("cos", "sin"):
        call.inputs[name] = call.inputs[name][:10]
    with pytest.raises(FAULTS, match="at position 17, expected one below the 10"):
        run(open_op(call.op, **call.attributes), call.inputs)


WRONG_DIMS = [
    ("v_cache", (2, 2, 19, 8)),
    ("k_cache", (2, 4, 20, 8)),
    ("k_cache", (2, 2, 20, 4)),
    ("lengths", (1,)),
    ("tree_mask", (2, 3, 2)),
    ("qkv", (2, 3, 60)),
    ("q_gamma", (7,)),
    ("k_gamma", (9,)),
    ("cos", (20, 5)),
    ("sin", (19, 4)),
]


@pytest.mark.parametrize(("name", "shape"), WRONG_DIMS, ids=str)
def test_tensors_of_other_dims_are_refused(name, shape):
    call = random_call(np.random.default_rng(7), Sizes(), norm=True, rotary=True)
    call.inputs[name] = np.zeros(shape, call.inputs[name].dtype)
    model = model_of(call.op.name, **call.attributes)
    for value in model.graph.input:  # ONNX Runtime itself would refuse a rank
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(FAULTS, match="NormRotaryQkvAttention: "):
        run(open_session(model, library()), call.inputs)


@pytest.mark.parametrize("wrong", [{"rotary_dim": 10}, {"rotary_dim": 3}, {"window": -1}, {"softcap": -1.0}], ids=str)
def test_attributes_that_make_no_sense_are_refused(wrong):
    attributes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, **wrong}
    with pytest.raises(FAULTS, match="RotaryQkvAttention: "):
        open_op(QKV_ATTENTION[False, True], **attributes)
