# SPDX-License-Identifier: Apache-2.0
"""Packed linears on the CPU: kernel, body and twin agree; a row has the same bits whatever shares its step."""

from pathlib import Path

import numpy as np
import pytest

from speccompile.backends.onnxruntime.kernel_build import cpu_features
from speccompile.backends.onnxruntime.linear_cases import OTHER_GRIDS
from speccompile.ops.packed_linear import PACKED_LINEARS
from tests.lab.graphs import open_session
from tests.plugins.cpu_lab import (
    VARIANTS,
    isa_of,
    library_for,
    linear_case,
    linear_model,
    needs_compiler,
    rows_for,
    run,
    twin_of,
)

pytestmark = [needs_compiler, pytest.mark.plan]
NAMES = [op.name for op in PACKED_LINEARS]
SIZES = [(1, 2), (33, 70), (128, 96), (257, 34)]  # one, beyond one group and one panel, none of them padded, odd
NUM_ROWS = (*range(1, 17), 17, 48, 100)


@pytest.fixture(params=[name for name in VARIANTS if name != "avx512-vnni" or "amx_bf16" in cpu_features()])
def kernels(request: pytest.FixtureRequest) -> Path:
    """The library for one instruction set."""
    return library_for(request.param)


@pytest.mark.parametrize("variant", ["avx2", "avx512-vnni", "portable"])
def test_options_choose_the_instruction_set(variant):
    assert isa_of(library_for(variant)) == variant


def naive(name: str, values: dict, attributes: dict, dtype: type) -> tuple[np.ndarray, ...]:
    """The formula in one dtype, with the levels of the twin where the form is an integer."""
    from speccompile.ops.packed_linear import GELU_TANH, SILU, columns_of, quantize_rows
    from speccompile.ops.packing import Packed, unpack

    form = name.rsplit("PackedLinear", 1)[1]
    x, results = values["x"].astype(dtype), []
    if "gamma" in values:
        x = x + values["residual"].astype(dtype)
        results.append(x)
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=dtype)
        x = x / np.sqrt(mean + dtype(attributes["epsilon"])) * values["gamma"].astype(dtype)
    has_gate = "activation" in attributes
    group, unit = attributes.get("group", 32), attributes.get("unit", 32)
    packed = Packed(values["weights"], values.get("scales"), values.get("minimums"), group, unit)
    weight = unpack(packed, form).astype(dtype)
    weight = weight[:, columns_of(attributes["num_out"], has_gate)]
    if form.startswith("Int"):
        levels, scales = quantize_rows(x[0].astype(np.float32), unit)
        x = (levels.astype(dtype) * scales[..., None].astype(dtype)).reshape(1, len(levels), -1)
    y = np.zeros((*x.shape[:2], weight.shape[1]), dtype)
    for k in range(x.shape[-1]):
        y += x[..., k, None] * weight[k]
    y += values["bias"].astype(dtype)
    if has_gate:
        gate, up = np.split(y, 2, axis=-1)
        kind = attributes["activation"]
        assert kind in (SILU, GELU_TANH)
        if kind == SILU:
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = gate * dtype(0.5) * (1 + np.tanh(dtype(np.sqrt(2 / np.pi)) * (gate + dtype(0.044715) * gate**3)))
        y = gate * up
    return (y, *results)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_in", "num_out"), SIZES)
def test_kernel_body_and_twin_agree(name, num_in, num_out, kernels):
    constants, attributes = linear_case(name, num_in, num_out, seed=num_in)
    feeds = rows_for(name, 5, num_in)
    for kind in (0, 1, 2) if "activation" in attributes else (None,):
        if kind is not None:
            attributes["activation"] = kind
        model = linear_model(name, constants, attributes)
        wanted = twin_of(name, {**constants, **feeds}, attributes)
        for executor in (kernels, None):
            for got, right in zip(run(open_session(model, executor), feeds), wanted, strict=True):
                assert got.shape == right.shape
                np.testing.assert_allclose(got, right, rtol=0, atol=2e-6 * np.abs(right).max(), err_msg=f"{executor}")


@pytest.mark.parametrize("grid", OTHER_GRIDS, ids=lambda grid: "_".join(map(str, grid.values())))
@pytest.mark.parametrize("form", ["Int8", "Int4", "Int8Min", "Int4Min"])
def test_kernel_and_twin_agree_on_every_grid(form, grid, kernels):
    """Groups of several units end within a stretch of K, at its end and beyond it."""
    for name, num_in in ((f"PackedLinear{form}", 1090), (f"NormGatedPackedLinear{form}", 290)):
        constants, attributes = linear_case(name, num_in, 98, **grid)
        model, feeds = linear_model(name, constants, attributes), rows_for(name, 19, num_in)
        session, wanted = open_session(model, kernels), twin_of(name, {**constants, **feeds}, attributes)
        whole = run(session, feeds)
        for got, right in zip(whole, wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=0, atol=2e-6 * np.abs(right).max())
        for row in range(19):
            alone = run(session, {n: a[:, row : row + 1].copy() for n, a in feeds.items()})
            for mine, single in zip(whole, alone, strict=True):
                assert np.array_equal(mine[:, row].view(np.int32), single[:, 0].view(np.int32)), f"row {row}"


@pytest.mark.parametrize("form", ["Int8", "Int4"])
def test_graphs_that_name_no_group_and_no_unit_have_groups_of_32(form, kernels):
    """As those of older bundles do."""
    name = f"NormPackedLinear{form}"
    constants, attributes = linear_case(name, 70, 52)
    older = {key: value for key, value in attributes.items() if key not in ("group", "unit")}
    feeds, executors = rows_for(name, 5, 70), (kernels, None)
    for executor in executors:
        got, right = (run(open_session(linear_model(name, constants, a), executor), feeds) for a in (older, attributes))
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(got, right, strict=True))


@pytest.mark.parametrize("form", ["Int8", "Int4", "Int8Min", "Int4Min"])
def test_padding_of_a_row_has_no_scale(form, kernels):
    """Rows of 70 have five units of 16 and are padded to six: what stands after five scales is another panel's."""
    constants, attributes = linear_case(f"PackedLinear{form}", 70, 64, group=16, dtype="float32")
    feeds = rows_for(f"PackedLinear{form}", 3, 70)
    (right,) = run(open_session(linear_model(f"PackedLinear{form}", constants, attributes), kernels), feeds)
    for name in set(constants) & {"scales", "minimums"}:
        changed = {**constants, name: constants[name].copy()}
        changed[name][1] = np.nan
        (got,) = run(open_session(linear_model(f"PackedLinear{form}", changed, attributes), kernels), feeds)
        assert np.array_equal(got[..., :32], right[..., :32]) and np.isnan(got[..., 32:]).all()


@pytest.mark.parametrize("name", NAMES)
def test_error_is_at_most_twice_that_of_the_naive_formula(name, kernels):
    constants, attributes = linear_case(name, 515, 130)
    feeds = rows_for(name, 16, 515)
    got = run(open_session(linear_model(name, constants, attributes), kernels), feeds)
    values = {**constants, **feeds}
    exact, simple = (naive(name, values, attributes, dtype) for dtype in (np.float64, np.float32))
    for mine, plain, right in zip(got, simple, exact, strict=True):
        allowed = 2 * np.abs(plain - right).max()
        worst = np.unravel_index(np.abs(mine - right).argmax(), right.shape)
        assert np.abs(mine - right).max() <= allowed, f"{name} at {worst}: {mine[worst]}, {right[worst]}"


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_same_bits_in_every_step_and_with_any_threads(name, kernels):
    num_in, num_out = 291, 324  # 10 groups: more than one stretch; several tasks
    constants, attributes = linear_case(name, num_in, num_out)
    model = linear_model(name, constants, attributes)
    sessions = [open_session(model, kernels, threads) for threads in (1, 2)]
    feeds = rows_for(name, max(NUM_ROWS), num_in)
    alone = [run(sessions[0], {n: a[:, r : r + 1].copy() for n, a in feeds.items()}) for r in range(max(NUM_ROWS))]
    right = [np.concatenate(rows, axis=1) for rows in zip(*alone, strict=True)]
    for count in NUM_ROWS:
        order = np.random.default_rng(count).permutation(max(NUM_ROWS))[:count]
        for session in sessions:
            got = run(session, {n: np.ascontiguousarray(a[:, order]) for n, a in feeds.items()})
            for mine, single in zip(got, right, strict=True):
                assert np.array_equal(mine.view(np.int32), single[:, order].view(np.int32)), f"{count} rows"


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("F32", "Bf16"))])
def test_rows_have_the_same_bits_where_panels_share_stretches_of_them(name, kernels):
    num_in, num_out, num_rows = 1102, 300, 260  # more than 1 MiB of float32; ten panels, which are more than share one
    constants, attributes = linear_case(name, num_in, num_out)
    session = open_session(linear_model(name, constants, attributes), kernels)
    feeds = rows_for(name, num_rows, num_in)
    whole = run(session, feeds)
    for begin in range(0, num_rows, 13):
        few = run(session, {n: a[:, begin : begin + 13].copy() for n, a in feeds.items()})
        for mine, right in zip(whole, few, strict=True):
            assert np.array_equal(mine[:, begin : begin + 13].view(np.int32), right.view(np.int32)), f"from row {begin}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(name, value, kernels):
    constants, attributes = linear_case(name, 70, 52)
    session, feeds = open_session(linear_model(name, constants, attributes), kernels), rows_for(name, 3, 70)
    before = run(session, feeds)
    feeds["x"][0, 1, 5] = value
    after = run(session, feeds)
    for clean, dirty in zip(before, after, strict=True):
        assert not np.isfinite(dirty[0, 1]).all()
        assert np.array_equal(clean[:, ::2], dirty[:, ::2])


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_zeros_and_steps_without_rows(name, kernels):
    constants, attributes = linear_case(name, 70, 52)
    session = open_session(linear_model(name, constants, attributes), kernels)
    zeros = {n: np.zeros((1, 2, 70), np.float32) for n in rows_for(name, 1, 1)}
    got = run(session, zeros)[0]
    np.testing.assert_allclose(got, twin_of(name, {**constants, **zeros}, attributes)[0], rtol=2e-6, atol=1e-6)
    assert run(session, {n: a[:, :0].copy() for n, a in zeros.items()})[0].shape == (1, 0, got.shape[2])
