# SPDX-License-Identifier: Apache-2.0
"""A plan on the device: deserialised, compared with its spec, ready to give execution contexts.

Deserialising runs code that a plan may carry, so a plan's digest must have been compared with its manifest before.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from speccompile.backends.cuda.device import LOWER_MEMORY, Device
from speccompile.backends.cuda.steps import Profile
from speccompile.backends.tensorrt.import_helper import text_from_lines
from speccompile.backends.tensorrt.variants import DTYPE_NAMES, Variant
from speccompile.common.code_cache import find_code_file, write_file
from speccompile.core.specs import GraphSpec
from speccompile.errors import BundleError, RuntimeFault

_log = logging.getLogger(__name__)
_HEAD_BYTES = 1 << 20
_WORK_BYTES = 1 << 30  # for scratch memory, contexts and the buffers of steps; an estimate
_MEMORY_WORDS = ("out of memory", "outofmemory", "memoryallocation")  # of TensorRT's and CUDA's messages


def validity_from_plan(variant: Variant, plan: mmap.mmap) -> dict[str, Any]:
    """Compares a plan with this machine without deserialising it.

    Returns:
        {"validity": "VALID", "SUBOPTIMAL", "INVALID" or "not checked", "diagnostics": str}.
    """
    if not variant.can.supports_validity_check:
        return {"validity": "not checked", "diagnostics": f"{variant.name} has no such check"}
    validity, diagnostics = variant.trt.Runtime(variant.logger).get_engine_validity(plan)
    return {"validity": str(validity.name), "diagnostics": str(getattr(diagnostics, "name", diagnostics))}


class Plan:
    """A deserialised plan and the scratch memory that its execution contexts share.

    Args:
        settings: `cuda_graphs`, `runtime_cache` (false: compiled kernels are not kept for the next load),
            `others_bytes` (of plans that are loaded after it, for which streamed weights leave room).
        cache_bytes: bytes of its caches, for which streamed weights leave room.

    Raises:
        BundleError: it does not fit this machine or this TensorRT, or differs from its spec.
    """

    graph_fault: str | None = None  # TensorRT-RTX does not tell where it does not capture
    idle_runs = 256  # an estimate: the memory of creating a context was not measured

    def __init__(
        self,
        variant: Variant,
        path: Path,
        spec: GraphSpec,
        device: Device,
        settings: Mapping[str, Any],
        cache_bytes: int = 0,
    ) -> None:
        self.variant, self.path, self.spec, self.device = variant, path, spec, device
        with path.open("rb") as file:  # mapped: no second copy of the weights stays on the host
            blob = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.validity = validity_from_plan(variant, blob)
        if self.validity["validity"] == "INVALID":
            expected = "a plan that TensorRT finds valid for this machine"
            todo = "Build the bundle again for this GPU: engine.tensorrt.compute_capabilities."
            raise BundleError(str(path), f"an invalid plan: {self.validity['diagnostics']}", expected, todo)
        self._runtime = variant.trt.Runtime(variant.logger)
        self.engine = self._runtime.deserialize_cuda_engine(blob)
        if self.engine is None:
            log = text_from_lines(variant.logger.lines)
            if any(word in log.lower() for word in _MEMORY_WORDS):
                raise RuntimeFault(str(path), f"a plan without room: {log}", "free memory of the GPU", LOWER_MEMORY)
            got = f"a plan that cannot be loaded: {log}"
            expected = f"one of {variant.name} {variant.version} for this GPU"
            raise BundleError(str(path), got, expected, "Build the bundle again with the TensorRT installed here.")
        _check_io(path, spec, variant, self.engine)
        streamable = int(self.engine.streamable_weights_size)  # 0 where the plan was built without the flag
        taken = cache_bytes + int(settings.get("others_bytes", 0))
        if streamable > 0 and streamable + taken + _WORK_BYTES > device.memory_bytes()[0]:
            # TensorRT streams nothing by default. The budget also determines the scratch memory.
            budget = self.engine.get_weight_streaming_automatic_budget() - taken
            self.engine.weight_streaming_budget_v2 = max(budget, 0)
        self.profiles = tuple(_read_profile(self.engine, spec, i) for i in range(self.engine.num_optimization_profiles))
        self._scratch = device.allocate(int(self.engine.device_memory_size_v2))
        self.captures_itself = variant.can.supports_cuda_graph_strategy
        self._config = self._make_config(settings, blob) if variant.can.supports_runtime_cache else None

    def _make_config(self, settings: Mapping[str, Any], blob: mmap.mmap) -> Any:
        trt, config = self.variant.trt, self.engine.create_runtime_config()
        # By default a slower kernel runs until that of the shape is compiled: times would be wrong, and near ties may
        # end otherwise once the kernels are exchanged.
        config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if settings.get("cuda_graphs", True):
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        if settings.get("runtime_cache", True):
            kept = _cache_file(blob, str(self.device.properties()["name"]))
            cache = config.create_runtime_cache()
            if kept.exists():
                cache.deserialize(kept.read_bytes())  # TensorRT refuses one from elsewhere; it is then filled again
            config.set_runtime_cache(cache)
            weakref.finalize(self, _keep, cache, kept)
        return config

    def make_context(self, profile: Profile, is_kept: bool = False) -> Any:
        """Returns an execution context for one profile. All contexts share one scratch memory, so they run in turn."""
        del is_kept
        strategy = self.variant.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self.engine.create_execution_context(self._config if self._config is not None else strategy)
        if context is None:
            self.fail("an execution context", "none")
        context.set_device_memory(self._scratch.address, self._scratch.num_bytes)
        if not context.set_optimization_profile_async(profile.index, self.device.stream):
            self.fail(f"profile {profile.index}", "it was refused")
        self.device.synchronize()
        return context

    def find_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> Profile:
        """Returns the last profile that accepts these shapes: that of steps comes after that of prompts."""
        fitting = [p for p in self.profiles if p.find_fault(shapes) is None]
        if not fitting:
            faults = "; ".join(str(p.find_fault(shapes)) for p in self.profiles)
            todo = "Widen engine.tensorrt.profiles in the recipe and build again."
            raise RuntimeFault(f"engine {self.spec.name}", faults, "shapes inside one profile", todo)
        return fitting[-1]

    def fail(self, wanted: str, got: str) -> NoReturn:
        log = text_from_lines(self.variant.logger.lines)
        raise RuntimeFault(f"engine {self.spec.name}", f"{got}: {log}", wanted, "See TensorRT's message.")


def _read_profile(engine: Any, spec: GraphSpec, index: int) -> Profile:
    bounds = {}
    for tensor in spec.inputs:
        low, _, high = engine.get_tensor_profile_shape(tensor.name, index)
        bounds[tensor.name] = (tuple(int(n) for n in low), tuple(int(n) for n in high))
    return Profile(index, bounds)


def _check_io(path: Path, spec: GraphSpec, variant: Variant, engine: Any) -> None:
    """Compares names, directions, dtypes, memory locations and static dims with the spec."""
    trt, todo = variant.trt, "Build the bundle again."
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    is_input = {name: engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
    wanted = {**{t.name: True for t in spec.inputs}, **{t.name: False for t in spec.outputs}}
    if is_input != wanted:
        differing = sorted(name for name in {*is_input, *wanted} if is_input.get(name) != wanted.get(name))
        raise BundleError(str(path), f"tensors {differing}", "those of the manifest", todo)
    for tensor in (*spec.inputs, *spec.outputs):
        dtype = engine.get_tensor_dtype(tensor.name)
        got = DTYPE_NAMES.get(str(dtype.name), str(dtype.name))
        shape = tuple(int(n) for n in engine.get_tensor_shape(tensor.name))
        fits = len(shape) == len(tensor.dims) and all(
            n == dim if isinstance(dim, int) else n >= -1 for n, dim in zip(shape, tensor.dims, strict=True)
        )
        if got != tensor.dtype or not fits:
            expected = f"{tensor.dtype}{list(tensor.dims)}"
            raise BundleError(f"{path} ({tensor.name})", f"{got}{list(shape)}", expected, todo)
        if engine.get_tensor_location(tensor.name) != trt.TensorLocation.DEVICE:
            raise BundleError(f"{path} ({tensor.name})", "a tensor in host memory", "one on the device", todo)


def _cache_file(blob: mmap.mmap, gpu: str) -> Path:
    # By GPU, as machines with others may share the folder, and TensorRT takes no kernels of another one.
    marks = len(blob).to_bytes(8, "little") + gpu.encode()
    digest = hashlib.sha256(blob[:_HEAD_BYTES] + marks).hexdigest()[:32]
    return find_code_file(f"tensorrt/{digest}.kernels")


def _keep(cache: Any, kept: Path) -> None:
    try:
        write_file(kept, bytes(memoryview(cache.serialize())))
    except OSError as fault:
        _log.warning("the kernels compiled for a plan are not kept: %s", fault)
