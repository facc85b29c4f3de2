# SPDX-License-Identifier: Apache-2.0
"""The library of CPU kernels in tests: compiled for an instruction set, sessions of one op with constant weights."""

import ctypes
import functools
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from speccompile.backends.onnxruntime import kernel_build, kernel_library
from speccompile.backends.onnxruntime.kernel_selftest import run
from speccompile.backends.onnxruntime.linear_cases import form_of, random_packed
from speccompile.ops.op import DOMAIN, OPSET, VERSION
from speccompile.ops.registry import OPS, functions
from tests import store

TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "uint8": TensorProto.UINT8,
    "int64": TensorProto.INT64,
}
Arrays = dict[str, Any]
needs_compiler = pytest.mark.skipif(
    kernel_build.find_compiler() is None, reason="NO C++ COMPILER: the CPU kernels WERE NOT TESTED. Install g++."
)


@functools.cache
def library() -> Path:
    """The library for this CPU."""
    found = kernel_library.find_library()
    assert found is not None
    return found


# Options of each instruction set and what they must compile to; "native" is this CPU's, as the product compiles it.
# Nobody times the others, and "native" is compiled with the product's options; it stands for the one that it is.
VARIANTS = {
    "native": None,
    "avx2": ("-march=x86-64-v3", "-O1"),
    "avx512-vnni": ("-march=x86-64-v4", "-mavx512vnni", "-DSPECCOMPILE_NO_AMX", "-O1"),
    "portable": ("-march=x86-64", "-O1"),
}
_NEEDS = {variant.name: variant.features for variant in kernel_build.VARIANTS}


def can_run(variant: str) -> bool:
    """Whether this CPU has the instruction set; the native one was chosen for it."""
    if variant == "native":
        return True
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    needs = {"avx2": _NEEDS["x86-64-v3"], "avx512-vnni": _NEEDS["avx512-vnni"], "portable": frozenset()}
    return needs[variant] <= kernel_build.cpu_features()


@functools.cache
def library_for(variant: str) -> Path:
    """The library compiled for an instruction set, kept between runs of the tests."""
    flags = VARIANTS[variant]
    if flags is None or isa_of(library()) == variant:
        return library()
    if not can_run(variant):
        pytest.skip(f"this CPU has no {variant}: its kernels WERE NOT TESTED")
    sources, compiler = kernel_library.find_sources(), kernel_build.find_compiler()
    assert sources is not None and compiler is not None
    name = "".join((f"test-{variant}", *(flag for flag in flags if flag.startswith("-O"))))
    path = kernel_library.code_file(f"{name}-{kernel_build.sources_digest(sources)[:16]}.so")
    with store.locked(path.stem):
        if not path.is_file():
            assert kernel_build.compile_library(sources, path, compiler, flags) is None
    return path


def has_amx() -> bool:
    """Whether the library for this CPU multiplies by AMX."""
    return isa_of(library()).endswith("+amx")


def isa_of(path: Path) -> str:
    """The name of the instruction set that a library was compiled for."""
    name = ctypes.CDLL(str(path)).speccompile_kernel_isa
    name.restype = ctypes.c_char_p
    return bytes(name()).decode()


def linear_case(op_name: str, num_in: int, num_out: int, seed: int = 0, **grid: Any) -> tuple[Arrays, Arrays]:
    """Constants and attributes of a packed linear; `grid` as in `random_packed`."""
    op, rng = OPS[op_name], np.random.default_rng(seed)
    packed = random_packed(form_of(op), num_in, num_out, seed, has_gate="activation" in op.attributes, **grid)
    known = {
        "gamma": (1 + 0.1 * rng.standard_normal(num_in)).astype(np.float32),
        **packed.constants,
        "bias": rng.standard_normal(num_out).astype(np.float32),
    }
    attributes: Arrays = {**op.attributes, "num_in": num_in, "num_out": num_out, **packed.attributes}
    return {t.name: known[t.name] for t in op.inputs if t.name in known}, attributes


def rows_for(op_name: str, num_rows: int, num_in: int, seed: int = 1) -> Arrays:
    """Random computed inputs [1, rows, num_in]; some numbers are much larger than the others."""
    rng = np.random.default_rng(seed)
    names = [t.name for t in OPS[op_name].inputs if t.name in ("x", "residual")]
    return {n: (rng.standard_normal((1, num_rows, num_in)) ** 3).astype(np.float32) for n in names}


def _tensor(name: str, array: Any) -> TensorProto:
    return helper.make_tensor(name, TYPES[array.dtype.name], array.shape, array.tobytes(), raw=True)


def linear_model(op_name: str, constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> ModelProto:
    """A model of one packed linear whose weights are initializers, with its body attached."""
    op = OPS[op_name]
    inputs = [
        helper.make_tensor_value_info(t.name, TYPES[t.dtype], ["batch", "nodes", attributes["num_in"]])
        for t in op.inputs
        if t.name not in constants
    ]
    outputs = [helper.make_tensor_value_info(t.name, TYPES[t.dtype], ["batch", "nodes", None]) for t in op.outputs]
    names = [[t.name for t in side] for side in (op.inputs, op.outputs)]
    node = helper.make_node(op_name, *names, domain=DOMAIN, **attributes)
    tensors = [_tensor(name, array) for name, array in constants.items()]
    opsets = [("", OPSET), (DOMAIN, VERSION), ("com.microsoft", 1)]
    return helper.make_model(
        helper.make_graph([node], op_name, inputs, outputs, tensors),
        opset_imports=[helper.make_opsetid(*opset) for opset in opsets],
        functions=functions([op_name]),
        ir_version=11,
    )


def expert_model(op_name: str, constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> ModelProto:
    """A model of one expert op whose weights are initializers, with its body attached."""
    op = OPS[op_name]
    inputs = [
        helper.make_tensor_value_info(t.name, TYPES[t.dtype], t.dims) for t in op.inputs if t.name not in constants
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["ids", None])]
    node = helper.make_node(op_name, [t.name for t in op.inputs], ["y"], domain=DOMAIN, **attributes)
    tensors = [_tensor(name, array) for name, array in constants.items()]
    return helper.make_model(
        helper.make_graph([node], op_name, inputs, outputs, tensors),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        functions=functions([op_name]),
        ir_version=11,
    )


def rows_model(op_name: str, constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> ModelProto:
    """A model of one op that gathers rows of an embedding, whose weights are initializers, with its body attached."""
    names = [t.name for t in OPS[op_name].inputs]
    node = helper.make_node(op_name, names, ["rows"], domain=DOMAIN, **attributes)
    inputs = [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "nodes"])]
    outputs = [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["batch", "nodes", None])]
    tensors = [_tensor(name, array) for name, array in constants.items()]
    return helper.make_model(
        helper.make_graph([node], op_name, inputs, outputs, tensors),
        opset_imports=[helper.make_opsetid(*opset) for opset in (("", OPSET), (DOMAIN, VERSION))],
        functions=functions([op_name]),
        ir_version=11,
    )


def twin_of(op_name: str, values: Mapping[str, Any], attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the numpy twin computes."""
    op = OPS[op_name]
    return op.twin(*[values[t.name] for t in op.inputs], **attributes)


__all__ = [
    "Arrays",
    "expert_model",
    "library",
    "linear_case",
    "linear_model",
    "needs_compiler",
    "rows_for",
    "rows_model",
    "run",
    "twin_of",
]
