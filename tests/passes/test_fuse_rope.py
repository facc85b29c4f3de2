# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings, whole and partial, are fused and tabulated; lookalikes are left alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.errors import PassError
from speccompile.passes.cleanup import remove_dead
from speccompile.passes.fuse_rope import fuse_rope
from speccompile.passes.tabulate_rope import tabulate_rope, tabulate_rope_pass
from tests.passes.graphs import graph, ops, run

TOLERANCE = 3e-6  # of values up to about 4: cosines of one float32 angle by two libraries
MAX_SEQ_LEN = 40


def rope_model(heads: int, dim: int, rotary_dim: int, scaling: float | None = None, middle: int | None = None):
    half = rotary_dim // 2
    middle = half if middle is None else middle
    cut = rotary_dim < dim
    scaled = "cos = Mul(raw_cos, scaling)\n sin = Mul(raw_sin, scaling)" if scaling is not None else ""
    cos, sin = ("raw_cos", "raw_sin") if scaling is not None else ("cos", "sin")
    return graph(
        f"""rope (float[batch, {heads}, nodes, {dim}] x, int64[batch, nodes] positions)
            => (float[batch, {heads}, nodes, {dim}] y) {{
            columns = Unsqueeze(positions, two)
            floats = Cast<to = 1>(columns)
            angles = Mul(floats, frequencies)
            doubled = Concat<axis = -1>(angles, angles)
            {cos} = Cos(doubled)
            {sin} = Sin(doubled)
            {scaled}
            cos_4d = Unsqueeze(cos, one)
            sin_4d = Unsqueeze(sin, one)
            {"part = Slice(x, zero, rotary, three, one)" if cut else "part = Identity(x)"}
            low = Slice(part, zero, middle, three, one)
            high = Slice(part, middle, end, three, one)
            negated = Neg(high)
            rotated = Concat<axis = -1>(negated, low)
            straight = Mul(part, cos_4d)
            turned = Mul(rotated, sin_4d)
            {"whole" if cut else "y"} = Add(straight, turned)
            {"rest = Slice(x, rotary, end, three, one)" if cut else ""}
            {"y = Concat<axis = -1>(whole, rest)" if cut else ""}
        }}""",
        {
            "frequencies": (0.3 ** np.arange(half)).astype(np.float32).reshape(1, 1, half),
            **{n: np.array([i], np.int64) for n, i in (("zero", 0), ("one", 1), ("two", 2), ("three", 3))},
            "middle": np.array([middle], np.int64),
            "rotary": np.array([rotary_dim], np.int64),
            "end": np.array([np.iinfo(np.int64).max], np.int64),
            "scaling": np.float32(scaling or 1.0),
        },
    )


def feeds_for(heads: int, dim: int, batch: int = 2, nodes: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(dim)
    return {
        "x": rng.standard_normal((batch, heads, nodes, dim)).astype(np.float32),
        "positions": rng.integers(0, MAX_SEQ_LEN, (batch, nodes)),
    }


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 4), st.sampled_from([None, 1.3]))
def test_fused_and_tabulated(heads, half, rest, scaling):
    rotary_dim = 2 * half
    dim = rotary_dim + rest
    model, feeds = rope_model(heads, dim, rotary_dim, scaling), feeds_for(heads, dim)
    before = run(model, feeds)[0]
    remove_dead(model)
    assert fuse_rope(model) == 1
    np.testing.assert_allclose(run(model, feeds)[0], before, atol=TOLERANCE)
    assert tabulate_rope_pass(MAX_SEQ_LEN)(model) == 1
    remove_dead(model)
    assert ops(model) == {"RotaryEmbedding": 1}
    node = next(iter(model.graph))
    assert tuple(node.inputs[1].shape) == (MAX_SEQ_LEN, half)
    assert ("rotary_embedding_dim" in node.attributes) == (rest > 0)
    np.testing.assert_allclose(run(model, feeds)[0], before, atol=TOLERANCE)


def test_halves_of_unequal_length_are_not_rotated_halves():
    model = rope_model(2, 8, 8, middle=3)
    remove_dead(model)
    before = ops(model)
    assert fuse_rope(model) == 0
    assert ops(model) == before


def test_angles_that_are_not_a_function_of_positions_stay():
    """Half of the angles come from an input: there is no table for them."""
    model = graph(
        """given (float[batch, 2, nodes, 4] x, float[batch, nodes, 2] cos, float[batch, nodes, 2] sin)
            => (float[batch, 2, nodes, 4] y) { y = RotaryEmbedding<num_heads = 2>(x, cos, sin) }"""
    )
    assert tabulate_rope(model, MAX_SEQ_LEN) == 0


def test_tables_need_fused_ropes():
    model = rope_model(2, 8, 8)
    remove_dead(model)
    with pytest.raises(PassError, match=r"pass tabulate_rope: got before it ran: .* is an unfused rotary embedding"):
        tabulate_rope_pass(MAX_SEQ_LEN)(model)


@pytest.mark.parametrize("angles", ["quarter, quarter", "quarter, other"])
def test_halves_that_are_rotated_apart_keep_their_angles(angles):
    """Each angle is there once, whether or not the two halves of the angles are alike."""
    text = f"""rope (float[batch, 2, nodes, 8] x, float[batch, nodes, 2] quarter, float[batch, nodes, 2] other)
        => (float[batch, 2, nodes, 8] y) {{
            angles = Concat<axis = -1>({angles})
            cos = Cos(angles)
            sin = Sin(angles)
            c = Unsqueeze(cos, one)
            s = Unsqueeze(sin, one)
            low, high = Split<axis = 3>(x, sizes)
            low_c = Mul(low, c)
            high_s = Mul(high, s)
            high_c = Mul(high, c)
            low_s = Mul(low, s)
            first = Sub(low_c, high_s)
            second = Add(high_c, low_s)
            y = Concat<axis = -1>(first, second)
        }}"""
    model = graph(text, {"one": np.array([1], np.int64), "sizes": np.array([4, 4], np.int64)})
    feeds = {"x": feeds_for(2, 8)["x"]}
    feeds |= {
        name: np.random.default_rng(i).random((2, 3, 2), np.float32) for i, name in enumerate(("quarter", "other"))
    }
    before = run(model, feeds)[0]
    assert fuse_rope(model) == 1
    remove_dead(model)
    assert ops(model)["RotaryEmbedding"] == 1
    np.testing.assert_allclose(run(model, feeds)[0], before, atol=TOLERANCE)
