# SPDX-License-Identifier: Apache-2.0
"""A wrong graph or an old ONNX Runtime is refused with a message: nothing is read outside a tensor."""

import ctypes
import re
from typing import Any

import numpy as np
import pytest

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.backends.onnxruntime.kernel_selftest import Case, open_case
from speccompile.ops.packed_linear import PACKED_LINEARS
from tests.lab.graphs import open_session
from tests.plugins.cpu_lab import library, linear_case, linear_model, needs_compiler, rows_for, run

pytestmark = [needs_compiler, pytest.mark.plan]


def shorter(array: Any, axis: int) -> Any:
    return np.ascontiguousarray(np.delete(array, 0, axis=axis))


@pytest.mark.parametrize("op", PACKED_LINEARS, ids=lambda op: op.name)
def test_constants_that_do_not_fit_the_attributes_are_refused_at_load(op):
    constants, attributes = linear_case(op.name, 96, 96)
    for name, array in constants.items():
        for axis in range(array.ndim):
            model = linear_model(op.name, {**constants, name: shorter(array, axis)}, attributes)
            expected = rf"{op.name}: {name} has dims \[.*\], expected \[.*\] from the attributes"
            with pytest.raises(FAULTS, match=expected):
                open_session(model, library())


@pytest.mark.parametrize("op", PACKED_LINEARS, ids=lambda op: op.name)
def test_computed_weights_that_do_not_fit_are_refused_in_the_step(op):
    constants, attributes = linear_case(op.name, 96, 96)
    feeds = rows_for(op.name, 2, 96)
    session = open_case(Case(op, {}, attributes, ()), str(library()))
    run(session, {**feeds, **constants})
    for name, array in constants.items():
        with pytest.raises(FAULTS, match=rf"{op.name}: {name} has dims"):
            run(session, {**feeds, **constants, name: shorter(array, 0)})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"unit": 8}, "group 32 and unit 8, expected a unit of 16 or 32 and a group of some units"),
        ({"unit": 64, "group": 64}, "group 64 and unit 64, expected a unit of 16 or 32"),
        ({"group": 16}, "group 16 and unit 32, expected a unit"),
        ({"group": 48}, "group 48 and unit 32, expected a unit"),
        ({"group": -32}, "group -32 and unit 32, expected a unit"),
        ({"group": 64}, r"scales has dims \[3, 3, 32\], expected \[3, 2, 32\] from the attributes"),
        ({"scales": "int64"}, "scales have element type 7, expected float16 or float32"),
        ({"minimums": "float32"}, "scales and minimums of two element types, expected one"),
    ],
)
def test_grids_that_contradict_themselves_are_refused(changes, expected):
    name = "PackedLinearInt4Min"
    constants, attributes = linear_case(name, 96, 96)
    for key, value in changes.items():
        if key in constants:
            constants[key] = constants[key].astype(value)
    attributes |= {key: value for key, value in changes.items() if key not in constants}
    model = linear_model(name, constants, attributes)
    with pytest.raises(FAULTS, match=expected):
        run(open_session(model, library()), rows_for(name, 1, 96))


@pytest.mark.parametrize("op", PACKED_LINEARS, ids=lambda op: op.name)
def test_rows_of_another_width_are_refused(op):
    constants, attributes = linear_case(op.name, 96, 96)
    session = open_case(Case(op, {}, attributes, ()), str(library()))
    with pytest.raises(FAULTS, match=re.escape("x has dims [1, 2, 64], expected [..., 96]")):
        run(session, {**rows_for(op.name, 2, 64), **constants})
    if "residual" in rows_for(op.name, 1, 1):
        feeds = {**rows_for(op.name, 2, 96), "residual": np.zeros((1, 3, 96), np.float32)}
        with pytest.raises(FAULTS, match="residual has dims"):
            run(session, {**feeds, **constants})


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("PackedLinearF32", {"num_in": 0}, "num_in 0 and num_out 96, expected 1 to"),
        ("PackedLinearInt4", {"num_out": -32}, "num_out -32, expected"),
        ("PackedLinearInt8", {"num_in": 2**40}, "expected 1 to 2^24"),
        ("GatedPackedLinearF32", {"num_out": 95}, "an even num_out"),
        ("GatedPackedLinearF32", {"activation": 3}, "activation 3, expected 0, 1 or 2"),
    ],
)
def test_attributes_out_of_range_are_refused(name, changed, message):
    constants, attributes = linear_case(name, 96, 96)
    with pytest.raises(FAULTS, match=re.escape(message)):
        open_session(linear_model(name, constants, {**attributes, **changed}), library())


@pytest.mark.parametrize(
    ("version", "accepted"), [("1.16.3", False), ("0.99.0", False), ("1.17.0", True), ("2.0", True)]
)
def test_an_old_onnx_runtime_is_refused(version, accepted):
    said: list[str] = []
    get_api_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    get_version_type = ctypes.CFUNCTYPE(ctypes.c_void_p)
    create_status_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    call_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

    def create_status(code: int, message: bytes) -> int:
        said.append(message.decode())
        return 1

    status, other = create_status_type(create_status), call_type(lambda *_: None)
    table = (ctypes.c_void_p * 300)(*[ctypes.cast(other, ctypes.c_void_p)] * 300)
    table[0] = ctypes.cast(status, ctypes.c_void_p)
    get_api = get_api_type(lambda number: ctypes.addressof(table))
    text = ctypes.create_string_buffer(version.encode())
    get_version = get_version_type(lambda: ctypes.addressof(text))
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(get_version, ctypes.c_void_p))
    register = ctypes.CDLL(str(library())).RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]
    refused = register(None, ctypes.addressof(base))
    assert bool(refused) is not accepted
    assert [f"ONNX Runtime {version}, expected 1.17 or later" in text for text in said] == ([] if accepted else [True])
