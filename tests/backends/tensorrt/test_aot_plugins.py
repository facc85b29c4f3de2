# SPDX-License-Identifier: Apache-2.0
"""The ahead-of-time form against a stand-in for `tensorrt.plugin`: signatures, PTX, launches, order of arguments."""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing

import pytest

from speccompile.backends.tensorrt import aot_plugins
from speccompile.backends.tensorrt.kernels import find_nvcc
from speccompile.errors import BuildError
from tests import store

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="NO NVCC: the PTX of the AOT plugins WAS NOT COMPILED")


class Expression:
    """A dim that is known (an int) or not."""

    def __init__(self, value) -> None:  # type: ignore[no-untyped-def]
        self.value = value

    def constant_value(self) -> int:
        assert isinstance(self.value, int)
        return self.value

    def __mul__(self, other: int):  # type: ignore[no-untyped-def]
        return Expression((self.value, "times", other))


class TensorDesc:
    def __init__(self, dtype: str, *dims) -> None:  # type: ignore[no-untyped-def]
        self.dtype, self.shape_expr, self.alias = dtype, [Expression(d) for d in dims], None

    def like(self):  # type: ignore[no-untyped-def]
        return TensorDesc(self.dtype, *(d.value for d in self.shape_expr))

    def aliased(self):  # type: ignore[no-untyped-def]
        other = self.like()
        other.alias = self
        return other


class KernelLaunchParams:
    pass


class SymIntExprs(list):  # type: ignore[type-arg]
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


@pytest.fixture
def registered() -> dict[str, dict[str, object]]:
    """Functions by name and kind."""
    return {}


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch, registered: dict[str, dict[str, object]]) -> types.ModuleType:
    """TensorRT: `plugin` is a submodule that has to be imported."""

    def keep(kind: str):  # type: ignore[no-untyped-def]
        return lambda name: lambda function: registered.setdefault(name, {}).__setitem__(kind, function)

    module, plugin = types.ModuleType("stand_in"), types.ModuleType("stand_in.plugin")
    vars(module).update(float32="f32", float16="f16", bfloat16="bf16")
    vars(plugin).update(
        TensorDesc=TensorDesc, KernelLaunchParams=KernelLaunchParams, SymIntExprs=SymIntExprs,
        SymInt32=lambda value: getattr(value, "value", value),
        cdiv=lambda a, b: Expression((a.value, "cdiv", b)),
        register=keep("register"), aot_impl=keep("aot_impl"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    return module


def _verify_inputs() -> list[TensorDesc]:
    flat = [TensorDesc("f32", "batch"), TensorDesc("i64", "batch"), TensorDesc("f32", "batch")]
    trees = [TensorDesc("i64", "batch", "nodes")] * 2
    dists = [TensorDesc("f32", "batch", "nodes", "draft_vocab"), TensorDesc("f32", "batch", "nodes", 2)]
    return [TensorDesc("bf16", "batch", "nodes", "vocab"), *trees, *dists, *flat]


def _entry(ptx: bytes, kernel: str) -> list[str]:
    """Types of the parameters of a kernel in PTX, in order."""
    (parameters,) = re.findall(rf"\.entry {kernel}\((.*?)\)", ptx.decode(), re.DOTALL)
    return re.findall(r"\.param (\.\w+)", parameters)


def test_what_is_registered_has_the_signature_that_tensorrt_checks(
    trt: types.ModuleType, registered: dict[str, dict[str, object]]
) -> None:
    aot_plugins.register_aot_plugins(trt, (8, 0), 4)
    assert set(registered) == {"speccompile::SpecVerify", "speccompile::KVRollback"}
    for parts, names, said, num_outputs in (
        (registered["speccompile::SpecVerify"], list(aot_plugins._VERIFY_INPUTS), [], 3),
        (registered["speccompile::KVRollback"], aot_plugins._rollback_inputs(4), ["num_caches"], 4),
    ):
        described = inspect.signature(parts["register"])  # type: ignore[arg-type]
        assert list(described.parameters) == [*names, *said]
        assert all(p.annotation is TensorDesc for n, p in described.parameters.items() if n in names)
        assert typing.get_args(described.return_annotation) == (TensorDesc,) * num_outputs
        made = inspect.signature(parts["aot_impl"])  # type: ignore[arg-type]
        assert list(made.parameters) == [*names, "outputs", "tactic"]
        assert typing.get_args(made.return_annotation)[2:] == (KernelLaunchParams, SymIntExprs)


@pytest.mark.plan
@needs_nvcc
def test_spec_verify(trt: types.ModuleType) -> None:
    inputs = _verify_inputs()
    outputs = aot_plugins.verify_descriptor(trt)(*inputs)
    assert [[d.value for d in o.shape_expr] for o in outputs] == [["batch", "nodes"], ["batch"], ["batch"]]
    assert [o.dtype for o in outputs] == ["i64"] * 3
    with store.compiled_kernels():
        kernel, ptx, launch, sizes = aot_plugins.verify_implementation(trt, (8, 0))(*inputs, outputs, 0)
    assert sizes == ["batch", "nodes", "vocab", "draft_vocab", 2]
    assert launch.grid_x.value == "batch" and launch.block_x == 512
    assert launch.shared_mem.value == (("vocab", "cdiv", 256), "times", 12)
    assert _entry(ptx, kernel) == [".u64"] * len(inputs) + [".u32"] * len(sizes) + [".u64"] * len(outputs)


@pytest.mark.plan
@needs_nvcc
def test_kv_rollback(trt: types.ModuleType) -> None:
    caches = [TensorDesc("f16", "batch", 8, 2048, 128) for _ in range(4)]
    inputs = [*caches, TensorDesc("i64", "batch"), TensorDesc("i64", "batch", "depth")]
    outputs = aot_plugins.rollback_descriptor(trt, 4)(*inputs, num_caches=4)
    assert [o.alias for o in outputs] == caches
    kernel, ptx, launch, sizes = aot_plugins.rollback_implementation(trt, (8, 0), 4)(*inputs, outputs, 0)
    assert sizes == ["depth", 8, 2048, 16]
    assert (launch.block_x, launch.grid_x, launch.grid_y.value, launch.grid_z) == (128, 1, "batch", 4)
    assert _entry(ptx, kernel) == [".u64"] * len(inputs) + [".u32"] * len(sizes) + [".u64"] * len(outputs)


@pytest.mark.parametrize("num_caches", [0, 241])
def test_too_many_caches_are_refused(trt: types.ModuleType, num_caches: int) -> None:
    with pytest.raises(
        BuildError, match=f"plugin KVRollback: got {num_caches} caches; expected 1 to 240. Use the Python"
    ):
        aot_plugins.register_aot_plugins(trt, (8, 0), num_caches)
