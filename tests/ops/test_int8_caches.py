# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from speccompile.backends.onnxruntime.attention_cases import attention_cases, chain_fault, cross_cases
from speccompile.ops.int8_caches import INT8_ATTENTION, Int8Rows, quantize_rows
from speccompile.ops.registry import OPS
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of

TOLERANCE = 2e-5  # of outputs of size 1: float32 sums in another order, of levels up to 127 times a scale
CASES = [case for case in (*attention_cases(), *cross_cases()) if case[0].name.startswith("Int8")]
IDS = [f"{op.name}-{i}" for i, (op, _, _) in enumerate(CASES)]


def test_a_row_is_within_half_a_level_of_itself():
    rows = np.random.default_rng(0).standard_normal((3, 2, 5, 83)).astype(np.float32)
    rows[..., 32:64] *= 1e3
    rows[0, 0, 0] = 0
    levels, scales = quantize_rows(rows)
    for first, group in ((0, 0), (32, 1), (64, 2)):  # each group by its own scale, the last one of 19 columns too
        part, own = rows[..., first : first + 32], scales[..., group, None]
        assert (np.abs(levels[..., first : first + 32].astype(np.float32) * own - part) <= own * 0.5001).all()
        assert np.abs(levels[0, 0, 1:, first : first + 32]).max(axis=-1).tolist() == [127] * 4  # the peak
    assert not scales[0, 0, 0].any() and not levels[0, 0, 0].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("run", ["twin", "body"])
def test_a_row_that_is_not_finite_has_no_scale(value: float, run: str):
    rows = np.ones((1, 1, 3, 40), np.float32)
    rows[0, 0, 1, 33] = value
    body: Callable[..., list[np.ndarray]] = open_session(model_of("QuantizeRows")).run
    _, scales = quantize_rows(rows) if run == "twin" else body(None, {"rows": rows})
    assert np.isnan(scales[0, 0]).tolist() == [[False, False], [False, True], [False, False]]


@pytest.mark.parametrize(("op", "inputs", "attributes"), CASES, ids=IDS)
def test_the_body_is_the_twin(op, inputs, attributes):
    model = model_of(op.name, **attributes)
    wanted = op.twin(*inputs.values(), **attributes)
    for got in (open_session(model).run(None, inputs), ReferenceEvaluator(model).run(None, inputs)):
        for mine, theirs, tensor in zip(got, wanted, op.outputs, strict=True):
            if mine.dtype == np.int8:  # rotations and norms differ in the last bits, and so may a tie between levels
                assert np.abs(mine.astype(int) - theirs).max() <= 1 and (mine != theirs).mean() < 1e-3
            np.testing.assert_allclose(
                mine, theirs, atol=1 if mine.dtype == np.int8 else TOLERANCE, err_msg=tensor.name
            )


@pytest.mark.parametrize(("op", "inputs", "attributes"), CASES, ids=IDS)
def test_attention_is_that_over_the_rows_as_they_are_stored(op, inputs, attributes):
    """By the float op over caches that hold what the levels stand for, the step's own rows among them."""
    made = dict(zip([t.name for t in op.outputs], op.twin(*inputs.values(), **attributes), strict=True))
    floats = OPS[op.name.removeprefix("Int8")]
    if "lengths" not in inputs or len(made) == 1:  # nothing is written
        stored = {n: np.array(Int8Rows(inputs[f"{n}_cache"], inputs[f"{n}_scale"])) for n in "kv"}
        names = [t.name for t in floats.inputs]
        given = [stored[name[0]] if name.endswith("_cache") else inputs[name] for name in names]
        (wanted,) = floats.twin(*given, **attributes)
    elif "qkv" in inputs:
        return  # the same twin after norms and rotations
    else:
        pairs = {n: (f"{n}_updated", f"{n}_scale_updated") for n in "kv" if f"{n}_updated" in made}
        rows = {n: np.array(Int8Rows(made[levels], made[scales])) for n, (levels, scales) in pairs.items()}
        rest = {n: a for n, a in inputs.items() if n in ("q", "lengths", "tree_mask", "sinks")}
        step = (rest["q"], rows["k"], rows.get("v", rows["k"]), rest["lengths"], rest["tree_mask"])
        sinks = [rest["sinks"]] if "sinks" in rest else []
        (wanted,) = OPS["SharedAttention"].twin(*step, *sinks, **attributes)
    np.testing.assert_array_equal(made["out"], wanted)


@pytest.mark.parametrize(("op", "inputs", "attributes"), CASES[:-2], ids=IDS[:-2])
def test_a_chain_has_the_bits_of_single_steps(op, inputs, attributes):
    session = open_session(model_of(op.name, **attributes))
    assert chain_fault(op, lambda feeds: session.run(None, feeds), inputs) is None


def test_every_attention_over_caches_has_the_form():
    over_caches = {op.name for op in OPS.values() if any(t.name == "k_cache" for t in op.inputs)}
    assert over_caches == {*INT8_ATTENTION, *(op.name for op in INT8_ATTENTION.values())}
