# SPDX-License-Identifier: Apache-2.0
"""The two variants of TensorRT and their capabilities; no other module depends on a variant's name."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

VariantName = Literal["tensorrt", "tensorrt_rtx"]

# Our name of a dtype by TensorRT's.
DTYPE_NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class Capabilities:
    """What a variant offers.

    Args:
        library, parser_library: file names of its shared libraries, as its wheel ships them.
        unversioned_library: the name its ONNX parser opens at the first plugin node; None: no workaround is needed.
        target_capabilities: (major, minor) of the GPUs a plan can be built for; empty: those of this machine's GPU.
    """

    name: VariantName  # the module's name and the recipe's word
    extra: str
    library: str
    parser_library: str
    unversioned_library: str | None
    needs_gpu_to_build: bool
    supports_compute_capabilities: bool  # a plan can be built for named GPUs other than this machine's
    supports_timing_cache: bool  # measured kernels can be kept for the next build
    supports_optimization_level: bool  # the builder searches longer at a higher level
    supports_version_compatible: bool  # a plan can be made loadable by later versions of TensorRT
    supports_runtime_cache: bool  # kernels compiled at load can be kept for the next load
    supports_cuda_graph_strategy: bool  # the runtime can capture steps as CUDA graphs by itself
    supports_validity_check: bool  # a plan can be compared with the machine before it is deserialised
    target_capabilities: tuple[tuple[int, int], ...]


TENSORRT = Capabilities(
    name="tensorrt",
    extra="tensorrt",
    library="libnvinfer.so.11",
    parser_library="libnvonnxparser.so.11",
    unversioned_library=None,
    needs_gpu_to_build=True,
    supports_compute_capabilities=False,
    supports_timing_cache=True,
    supports_optimization_level=True,
    supports_version_compatible=True,
    supports_runtime_cache=False,
    supports_cuda_graph_strategy=False,
    supports_validity_check=False,
    target_capabilities=(),
)

TENSORRT_RTX = Capabilities(
    name="tensorrt_rtx",
    extra="tensorrt-rtx",
    library="libtensorrt_rtx.so.1",
    parser_library="libtensorrt_onnxparser_rtx.so.1",
    # TensorRT-RTX 1.7.1: the parser opens this name and ends the process when there is no such file.
    unversioned_library="libtensorrt_rtx.so",
    needs_gpu_to_build=False,
    supports_compute_capabilities=True,
    supports_timing_cache=False,
    supports_optimization_level=False,
    supports_version_compatible=False,
    supports_runtime_cache=True,
    supports_cuda_graph_strategy=True,
    supports_validity_check=True,
    target_capabilities=((7, 5), (8, 0), (8, 6), (8, 9), (12, 0), (12, 1)),
)

VARIANTS: dict[str, Capabilities] = {c.name: c for c in (TENSORRT, TENSORRT_RTX)}


@dataclass(frozen=True)
class Variant:
    """A variant that has been imported."""

    can: Capabilities
    trt: ModuleType
    version: str
    logger: Any  # the process's only logger (an `ILogger`), for every Builder, Runtime, parser and registry

    @property
    def name(self) -> VariantName:
        return self.can.name
