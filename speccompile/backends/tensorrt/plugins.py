# SPDX-License-Identifier: Apache-2.0
"""SpecVerify and KVRollback as Python plugins (IPluginV3) that launch the compiled kernels.

A plan with them needs this registration wherever it is loaded; the C++ library (`make plugins`) can be embedded
instead. Plans are built without CUDA: only enqueue loads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from speccompile.backends.cuda.arrays import item_bytes
from speccompile.backends.tensorrt.kernels import copy_memory, launch_rollback, launch_verify, sources_digest
from speccompile.backends.tensorrt.launches import DTYPES, SpecVerifyArgs, verify_workspace_bytes
from speccompile.backends.tensorrt.plugin_names import (
    ABI_FIELD,
    KV_ROLLBACK,
    NUM_CACHES,
    PLUGIN_ABI,
    PLUGIN_NAMESPACE,
    PLUGIN_OPS,
    PLUGIN_VERSION,
    SPEC_VERIFY,
)
from speccompile.errors import BuildError

_VERIFY_INPUTS = ("logits", "int64", "int64", "float32", "float32", "float32", "int64", "float32", "int64")
_VERIFY_NAMES = ("logits", "tokens", "parents", "draft_probs", "uniforms", "temperature", "top_k", "top_p", "d2t")
_VERDICT_NAMES = ("path", "num_accepted", "next_token")


def plugin_abi() -> dict[str, Any]:
    """Returns the manifest's record of the plugins; JSON-ready."""
    return {
        "namespace": PLUGIN_NAMESPACE,
        "version": PLUGIN_VERSION,
        "abi": PLUGIN_ABI,
        "ops": list(PLUGIN_OPS),
        "sources_sha256": sources_digest(),
    }


def register_plugins(trt: ModuleType) -> None:
    """Register the creators with TensorRT's registry, unless one of that name exists (also from a C++ library)."""
    registry = trt.get_plugin_registry()
    for name, creator in _creators(trt).items():
        if registry.get_creator(name, PLUGIN_VERSION, PLUGIN_NAMESPACE) is not None:
            continue
        if not registry.register_creator(creator, PLUGIN_NAMESPACE):
            todo = "Another library has registered it; start a fresh process."
            raise BuildError(f"plugin {name}", "refused by the registry", "a registered creator", todo)


def load_plugin_library(trt: ModuleType, library: Path) -> None:
    """Register the plugins of the C++ library that `make plugins` builds."""
    registry = trt.get_plugin_registry()
    if not library.is_file():
        raise BuildError("plugin library", str(library), "a file", "Run: make plugins TENSORRT_INCLUDE_DIR=...")
    registry.load_library(str(library.resolve()))
    for name in PLUGIN_OPS:
        if registry.get_creator(name, PLUGIN_VERSION, PLUGIN_NAMESPACE) is None:
            todo = "Build it again from the sources of this version: make plugins TENSORRT_INCLUDE_DIR=..."
            raise BuildError(f"plugin library {library}", f"no {name}", f"{name} version {PLUGIN_VERSION}", todo)


def _fields(trt: ModuleType, values: dict[str, int]) -> tuple[Any, Any]:
    arrays = {name: np.array([value], dtype=np.int32) for name, value in values.items()}
    fields = [trt.PluginField(name, array, trt.PluginFieldType.INT32) for name, array in arrays.items()]
    return trt.PluginFieldCollection(fields), (arrays, fields)


def _dtype_name(trt: ModuleType, kind: Any) -> str:
    names = {trt.float32: "float32", trt.float16: "float16", trt.bfloat16: "bfloat16", trt.int64: "int64"}
    return names.get(kind, str(kind))


def _base(trt: ModuleType) -> type[Any]:
    """Returns the base class of both plugins, created here since its bases belong to the given module."""
    core, build, run = trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime

    class Plugin(trt.IPluginV3, core, build, run):  # type: ignore[misc, valid-type, name-defined]
        name = ""

        def __init__(self, num_outputs: int, state: dict[str, int]) -> None:
            trt.IPluginV3.__init__(self)
            trt.IPluginV3OneCore.__init__(self)
            trt.IPluginV3OneBuildV2.__init__(self)
            trt.IPluginV3OneRuntime.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = self.name, PLUGIN_VERSION, PLUGIN_NAMESPACE
            self.num_outputs, self.state = num_outputs, state

        def get_capability_interface(self, capability: Any) -> Any:
            return self

        def clone(self) -> Any:
            return type(self)(self.num_outputs, self.state)

        def attach_to_context(self, context: Any) -> Any:
            return self.clone()

        def get_fields_to_serialize(self) -> Any:
            collection, self._kept = _fields(trt, {ABI_FIELD: PLUGIN_ABI, **self.state})
            return collection

        def configure_plugin(self, inputs: Any, outputs: Any) -> None: ...

        def on_shape_change(self, inputs: Any, outputs: Any) -> None: ...

        def set_tactic(self, tactic: int) -> None: ...

        def supports_format_combination(self, pos: int, in_out: Any, num_inputs: int) -> bool:
            kinds = [_dtype_name(trt, item.desc.type) for item in in_out[: pos + 1]]
            return in_out[pos].desc.format == trt.TensorFormat.LINEAR and self.takes(kinds, num_inputs)

        def takes(self, kinds: Sequence[str], num_inputs: int) -> bool:
            raise NotImplementedError

    return Plugin


def _wrong_inputs(op: str, got: int, expected: str) -> BuildError:
    return BuildError(f"node {op}", f"{got} inputs", expected, f"See plugin_names.py for the signature of {op}.")


def _verify_plugin(trt: ModuleType) -> type[Any]:
    class SpecVerify(_base(trt)):  # type: ignore[misc]
        name = SPEC_VERIFY

        def get_output_data_types(self, inputs: Any) -> list[Any]:
            if len(inputs) not in (len(_VERIFY_NAMES) - 1, len(_VERIFY_NAMES)):
                raise _wrong_inputs(SPEC_VERIFY, len(inputs), "8, or 9 with d2t")
            return [trt.int64] * 3

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
            path, *counts = trt.DimsExprs(2), trt.DimsExprs(1), trt.DimsExprs(1)
            path[0], path[1] = inputs[1][0], inputs[1][1]
            for count in counts:
                count[0] = inputs[1][0]
            return [path, *counts]

        def get_aliased_input(self, output: int) -> int:
            return -1

        def takes(self, kinds: Sequence[str], num_inputs: int) -> bool:
            pos = len(kinds) - 1
            if pos == 0:
                return kinds[0] in DTYPES
            return kinds[pos] == (_VERIFY_INPUTS[pos] if pos < num_inputs else "int64")

        def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
            batch, nodes, vocab = inputs[0].max
            return verify_workspace_bytes(batch, nodes, vocab, len(inputs) == len(_VERIFY_NAMES))

        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            batch, nodes, vocab = input_desc[0].dims
            pointers = dict(zip((*_VERIFY_NAMES[: len(inputs)], *_VERDICT_NAMES), (*inputs, *outputs), strict=True))
            dtype = DTYPES.index(_dtype_name(trt, input_desc[0].type))
            sizes = {"batch": batch, "nodes": nodes, "vocab": vocab, "draft_vocab": input_desc[3].dims[2]}
            launch_verify(SpecVerifyArgs(**pointers, workspace=workspace, dtype=dtype, **sizes), stream)

    return SpecVerify


def _rollback_plugin(trt: ModuleType) -> type[Any]:
    class KVRollback(_base(trt)):  # type: ignore[misc]
        name = KV_ROLLBACK

        def get_output_data_types(self, inputs: Any) -> list[Any]:
            if len(inputs) != self.num_outputs + 2:
                expected = f"{self.num_outputs} caches ({NUM_CACHES}), lengths and path"
                raise _wrong_inputs(KV_ROLLBACK, len(inputs), expected)
            return list(inputs[: self.num_outputs])

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
            return [trt.DimsExprs(dims) for dims in inputs[: self.num_outputs]]

        def get_aliased_input(self, output: int) -> int:
            return output

        def takes(self, kinds: Sequence[str], num_inputs: int) -> bool:
            pos, caches = len(kinds) - 1, num_inputs - 2
            if caches <= pos < num_inputs:
                return kinds[pos] == "int64"
            return kinds[pos] in DTYPES and kinds[pos] == kinds[0]

        def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
            return 0

        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            caches, (lengths, path) = list(inputs[:-2]), inputs[-2:]
            batch, depth = input_desc[-1].dims
            dims, dtype = tuple(input_desc[0].dims), _dtype_name(trt, input_desc[0].type)
            for source, dest in zip(caches, outputs, strict=True):
                # TensorRT may put a copy in between, and its builder times plugins on buffers of its own.
                if source != dest:
                    copy_memory(dest, source, math.prod(dims) * item_bytes(dtype), stream)
            launch_rollback(list(outputs), (batch, *dims[1:]), dtype, lengths, path, depth, stream)

    return KVRollback


def _creators(trt: ModuleType) -> dict[str, Any]:
    verify, rollback = _verify_plugin(trt), _rollback_plugin(trt)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[name-defined]
        def __init__(self, name: str, fields: Sequence[str]) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = name, PLUGIN_VERSION, PLUGIN_NAMESPACE
            self.field_names, self._kept = _fields(trt, dict.fromkeys(fields, 0))

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            values = {field.name: int(np.asarray(field.data).reshape(-1)[0]) for field in fields}
            if values.get(ABI_FIELD, PLUGIN_ABI) != PLUGIN_ABI:
                got, expected = f"a plan for plugin ABI {values[ABI_FIELD]}", f"ABI {PLUGIN_ABI}"
                raise BuildError(f"plugin {self.name}", got, expected, "Build the bundle with this version.")
            if self.name == SPEC_VERIFY:
                return verify(3, {})
            num_caches = values.get(NUM_CACHES, 1)
            return rollback(num_caches, {NUM_CACHES: num_caches})

    return {SPEC_VERIFY: Creator(SPEC_VERIFY, (ABI_FIELD,)), KV_ROLLBACK: Creator(KV_ROLLBACK, (ABI_FIELD, NUM_CACHES))}
