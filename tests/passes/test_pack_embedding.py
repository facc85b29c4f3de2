# SPDX-License-Identifier: Apache-2.0
"""Embeddings: a tied one is stored once, with the head; rows have the bits of the packed weights."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.linear_cases import random_grid
from speccompile.core.specs import GraphSpec
from speccompile.ops.registry import attach_functions
from speccompile.passes.attach_grids import attach_grids, attach_stored
from speccompile.passes.cleanup import remove_dead
from speccompile.passes.fuse_norm_linears import fuse_norm_linears
from speccompile.passes.gather_blocks import gather_blocks
from speccompile.passes.pack_embedding import pack_embedding
from speccompile.passes.pack_linears import pack_linears
from speccompile.passes.pipelines import onnxruntime_table
from speccompile.passes.quantize_blocks import quantize_blocks
from speccompile.passes.quantize_int8 import quantize_int8
from speccompile.passes.stored_rows import StoredRows
from speccompile.passes.tie_weights import tie_embedding
from tests.lab.graphs import open_session
from tests.passes.graphs import GridTable, graph, ops

V, H = 140, 48
RNG = np.random.default_rng(0)


def numbers(*shape: int, is_bfloat16: bool = False) -> np.ndarray:
    array = (RNG.standard_normal(shape) * 0.2).astype(np.float32)
    return (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if is_bfloat16 else array


TIED = "e = Gather(table, tokens) y = MatMul(e, w)"
SCALED = "g = Gather(table, tokens) e = Mul(g, size) y = MatMul(e, w)"
NORMED = "e = Gather(table, tokens) s = Add(e, r) n = RMSNormalization<axis = -1>(s, g) y = MatMul(n, w)"


def make(body: str, **weights: np.ndarray) -> ir.Model:
    declared = ", ".join(
        f"{'int64' if w.dtype == np.int64 else 'float'}{list(w.shape)} {n}" for n, w in weights.items()
    )
    head = f"test (int64[b, t] tokens, float[b, t, {H}] r) => (float[b, t, {H}] e, float[b, t, {V}] y) <{declared}>"
    return graph(f"{head} {{{body}}}", weights)


def run(model: ir.Model) -> list[np.ndarray]:
    """Rows and logits under ONNX Runtime without our kernels; the vocabulary's ends are among the tokens."""
    attach_functions(model)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # AVX2 alone: no saturation at 16 bits
    session = open_session(model, options=options)
    rest = np.random.default_rng(1).standard_normal((2, 3, H)).astype(np.float32)
    feeds = {"tokens": np.array([[0, V - 1, 33], [31, 32, 7]]), "r": rest}
    return session.run(None, {v.name: feeds[v.name] for v in session.get_inputs()})


def check(before: ir.Model, after: ir.Model, rows: float, logits: float) -> None:
    for wanted, got, tolerance in zip(run(before), run(after), (rows, logits), strict=True):
        assert got.shape == wanted.shape and np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()


def packed_bytes(model: ir.Model) -> int:
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.size > 200)


FORMS = {
    "Bf16": ("float", 2.0, 0, 4e-6),
    "F32": ("float", 4.0, 0, 4e-6),
    "Int8": ("int8", 1.0625, 0.01, 0.02),
    "Int4": ("int4", 0.5625, 0.2, 0.3),
}


@pytest.mark.parametrize("body", [TIED, SCALED, NORMED])
@pytest.mark.parametrize("form", FORMS)
def test_a_tied_embedding_is_stored_once_with_the_head(form, body):
    weights, bytes_a_weight, rows, logits = FORMS[form]
    table = numbers(V, H, is_bfloat16=form == "Bf16")
    used = {"table": table, "w": table.T.copy()}
    used |= ({"size": np.float32([7.0])} if "size" in body else {}) | ({"g": numbers(H)} if "(s, g)" in body else {})
    model = make(body, **used)
    after = model.clone()
    assert tie_embedding(after) == 1 and "table" not in after.graph.initializers
    check(model, after, 0, 4e-6)
    assert pack_linears(after, weights) == 1 and pack_embedding(after, weights) == 1  # type: ignore[arg-type]
    fuse_norm_linears(after)
    names = ops(after)
    assert names[f"PackedRows{form}"] == 1 and "Gather" not in names and "Transpose" not in names
    padded = (V + 31) // 32 * 32 * 64 if form.startswith("Int") else (V + 31) // 32 * 32 * H
    assert packed_bytes(after) == padded * bytes_a_weight
    check(model, after, rows, logits)


@pytest.mark.parametrize("has_view", [False, True])
def test_views_and_copies_are_tied_and_other_numbers_are_not(has_view):
    table = numbers(V, H)
    model = make(TIED, table=table, w=table.T.copy())
    if has_view:
        model.graph.initializers["w"].const_value = ir.Tensor(table.T, name="w")
        model.graph.initializers["table"].const_value = ir.Tensor(table, name="table")
    assert tie_embedding(model) == 1
    other = table.copy()
    other[-1, -1] += 1
    assert tie_embedding(make(TIED, table=other, w=table.T.copy())) == 0
    square = numbers(V, H)
    assert tie_embedding(make("e = Gather(table, tokens) y = MatMul(e, w)", table=square, w=numbers(H, V))) == 0


def test_a_head_beside_another_linear_is_still_the_table():
    """Merged with it, the table would be written a second time, in float32."""
    table = numbers(V, H)
    body = "e = Gather(table, tokens) z = MatMul(e, w) v = MatMul(e, side) u = ReduceSum(v, axis) y = Add(z, u)"
    model = make(body, table=table, w=table.T.copy(), side=numbers(H, 96), axis=np.array([-1]))
    for one in onnxruntime_table(GraphSpec("head", (), ()), "int4", "packed")[1:]:  # without the tail
        one(model)
    assert ops(model)["PackedRowsInt4"] == 1
    tensors = [value.const_value for value in model.graph.initializers.values()]
    assert sum(tensor.nbytes for tensor in tensors if tensor is not None) < table.nbytes / 2


def test_two_gathers_and_two_heads_share_one_copy():
    table = numbers(V, H)
    body = "e = Gather(table, tokens) f = Gather(table, tokens) a = MatMul(e, w) b = MatMul(f, w) y = Add(a, b)"
    model = make(body, table=table, w=table.T.copy())
    after = model.clone()
    assert tie_embedding(after) == 2 and pack_linears(after, "int8") == 2 and pack_embedding(after, "int8") == 2
    assert {name for name in after.graph.initializers if name.startswith(("w", "table"))} == {
        "w.packed",
        "w.packed.scales",
    }
    check(model, after, 0.01, 0.02)


@pytest.mark.parametrize(
    ("weights", "is_bfloat16", "form"),
    [
        ("float", True, "Bf16"),
        ("float", False, None),
        ("int8", False, "Int8"),
        ("int4", False, "Int8"),
        ("int8", True, "Int8"),
    ],
)
def test_an_embedding_of_its_own(weights, is_bfloat16, form):
    model = make(TIED, table=numbers(V, H, is_bfloat16=is_bfloat16), w=numbers(H, V))
    after = model.clone()
    assert tie_embedding(after) == 0 and pack_linears(after, weights) == 1  # type: ignore[arg-type]
    assert pack_embedding(after, weights) == (form is not None)  # type: ignore[arg-type]
    assert ("table" in after.graph.initializers) == (form is None)
    if form is not None:
        assert ops(after)[f"PackedRows{form}"] == 1
        check(model, after, 0.01 if form == "Int8" else 0, 0.3)


def test_what_the_tokens_do_not_choose_stays():
    """Tables of positions, small tables, columns."""
    position = "one = Constant<value_ints = [1]>() p = Add(tokens, one) e = Gather(table, p) y = MatMul(e, w)"
    model = make(position, table=numbers(V + 1, H, is_bfloat16=True), w=numbers(H, V))
    assert pack_linears(model, "int8") == 1 and pack_embedding(model, "int8") == 0
    small = make("e = Gather(table, tokens) y = MatMul(e, w)", table=numbers(40, H), w=numbers(H, V))
    assert pack_linears(small, "int8") == 1 and pack_embedding(small, "int8") == 0


QUANTISED = {
    "rowq8": (quantize_int8, 1.0, 0.01, 0.02),
    "int8": (lambda model: quantize_blocks(model, 8), 1.125, 0.01, 0.02),
    "int4": (lambda model: quantize_blocks(model, 4), 0.625, 0.2, 0.3),
}


@pytest.mark.parametrize("body", [TIED, SCALED])
@pytest.mark.parametrize("form", QUANTISED)
def test_without_our_kernels_too_it_is_stored_once(form, body):
    quantize, bytes_a_weight, rows, logits = QUANTISED[form]
    table = numbers(V, H)
    model = make(body, table=table, w=table.T.copy(), **({"size": np.float32([7.0])} if "size" in body else {}))
    after = model.clone()
    assert tie_embedding(after) == 1 and quantize(after) == 1 and gather_blocks(after) == 1
    assert not {"table", "w"} & set(after.graph.initializers)
    assert packed_bytes(after) == V * (H if form == "rowq8" else 64) * bytes_a_weight
    check(model, after, rows, logits)


@pytest.mark.parametrize("form", ["Int8", "Int4", "Int8Min", "Int4Min"])
@pytest.mark.parametrize("group", [16, 32, 0])
def test_rows_of_a_grid_in_blocks(form, group):
    grid = random_grid(form, H, V, 0, group=group, dtype="float16")
    model = make(TIED, table=grid.weight(), w=grid.weight().T.copy())
    after = model.clone()
    assert tie_embedding(after) == 1 and attach_grids(after, {"w": grid}) == 1
    assert quantize_blocks(after, None) == 1 and gather_blocks(after) == 1 and "w" not in after.graph.initializers
    check(model, after, 1e-6, 0.02)


def test_a_table_of_its_own_grid_is_packed_on_it():
    """Two grids of one checkpoint: the table's, and that of the head, which is not tied."""
    grids = [random_grid("Int8Min", H, V, seed, group=16, dtype="float32") for seed in range(2)]
    model = make(TIED, table=grids[0].weight(), w=grids[1].weight().T.copy())
    after = model.clone()
    rows = StoredRows(GridTable({str(at): grid for at, grid in enumerate(grids)}))
    assert tie_embedding(after) == 0 and attach_stored(after, rows) == 1
    assert [[kind is None for kind, _ in held] for held in rows.attached.values()] == [[False], [False]]
    tensor = after.graph.initializers["table"].const_value
    assert tensor is not None and np.array_equal(tensor.numpy(), grids[0].weight())
    assert pack_linears(after, "stored") == 1 and pack_embedding(after, "stored") == 1
    assert ops(after) == {"PackedRowsInt8Min": 1, "PackedLinearInt8Min": 1}
    check(model, after, 0, 0.02)


def test_rows_of_a_tied_grid_have_its_bits():
    grid = random_grid("Int8Min", H, V, 0, group=16, dtype="float32")
    model = make(TIED, table=grid.weight(), w=grid.weight().T.copy())
    after = model.clone()
    assert tie_embedding(after) == 1 and attach_grids(after, {"w": grid}) == 1
    assert pack_linears(after, "float") == 1 and pack_embedding(after, "float") == 1
    remove_dead(after)
    assert sorted(name for name in after.graph.initializers if name.startswith(("w", "table"))) == [
        *("w.packed", "w.packed.minimums", "w.packed.scales")
    ]
    check(model, after, 0, 0.02)
