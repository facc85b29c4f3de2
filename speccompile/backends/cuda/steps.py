# SPDX-License-Identifier: Apache-2.0
"""Steps of a plan, one per combination of shapes: addresses, host views, and after some runs a CUDA graph.

Inputs from the host are contiguous in a pinned buffer and copied at once; small outputs come back in one copy. A step
has an execution context of its own from its second run on, and is captured as a CUDA graph at the third.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from speccompile.backends.cuda.arrays import DeviceArray, host_dtype, item_bytes
from speccompile.backends.cuda.device import Device, Graph, Memory, PinnedMemory, aligned
from speccompile.backends.feeds import neutral_value, shape_from_dims
from speccompile.core import specs
from speccompile.core.specs import GraphSpec, TensorSpec, compacted_cache_name, updated_cache_name
from speccompile.errors import RuntimeFault

MemoryT = TypeVar("MemoryT", bound=Memory)
MAX_HOST_DIM = 64  # largest static dims of small outputs, e.g. the drafts of a chain


class Region:
    """Device memory with a pinned twin for its first part; it grows by doubling."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.memory: Memory = device.allocate(0)
        self.pinned: PinnedMemory = device.allocate_pinned(0)

    def fit(self, num_bytes: int, pinned_bytes: int) -> bool:
        """Make room; returns whether addresses changed. Where there is no memory, all stays as it is."""
        memory = _grown(self.memory, num_bytes, self.device.allocate)
        pinned = _grown(self.pinned, pinned_bytes, self.device.allocate_pinned)
        has_changed = memory is not self.memory or pinned is not self.pinned
        self.memory, self.pinned = memory, pinned
        return has_changed


def _grown(held: MemoryT, num_bytes: int, allocate: Callable[[int], MemoryT]) -> MemoryT:
    """Returns `held` where it has so many bytes; else twice its bytes, or `num_bytes` where there are not so many."""
    if num_bytes <= held.num_bytes:
        return held
    with suppress(RuntimeFault):
        return allocate(max(num_bytes, 2 * held.num_bytes))
    return allocate(num_bytes)


def comes_to_host(tensor: TensorSpec) -> bool:
    """Whether an output is small enough to be copied with every step: integers, and one number per slot or draft."""
    is_small = all(dim != "draft_vocab" and (isinstance(dim, str) or dim <= MAX_HOST_DIM) for dim in tensor.dims)
    is_float = tensor.dtype.startswith(("float", "bfloat"))
    return is_small and (not is_float or len(tensor.dims) <= 2 or tensor.name == specs.CANDIDATE_PROBS)


@dataclass(frozen=True)
class Profile:
    """One optimization profile: the shapes that it accepts."""

    index: int
    bounds: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def find_fault(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Returns None where all shapes fit, otherwise the first that does not."""
        for name, shape in shapes.items():
            low, high = self.bounds[name]
            if len(shape) != len(low) or any(not a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
                return f"{name} {list(shape)} (profile {self.index} takes {list(low)} to {list(high)})"
        return None


class Executable(Protocol):
    """The interface of a plan for a runner: `loading.Plan`, or a session of ONNX Runtime on CUDA."""

    spec: GraphSpec
    device: Device
    captures_itself: bool  # its contexts capture CUDA graphs themselves
    graph_fault: str | None  # why they do not, where they should
    idle_runs: int  # a step loses its context to another after so many runs without it

    def find_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> Profile:
        """Returns the profile that accepts these shapes."""
        ...

    def make_context(self, profile: Profile, is_kept: bool = False) -> Any:
        """Returns an execution context; one that is kept runs one combination of shapes and addresses only."""
        ...

    def fail(self, wanted: str, got: str) -> NoReturn:
        """Raise a RuntimeFault."""
        ...


class Bound(Protocol):
    """Inputs that stay in device memory from step to step, caches or states, and the outputs that update them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        ...

    @property
    def layout(self) -> tuple[int, ...]:
        """What shapes and addresses depend on besides the batch and the first slot."""
        ...

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the inputs with `batch` slots."""
        ...

    def addresses(self, first_slot: int, names: frozenset[str]) -> dict[str, int]:
        """Returns addresses by tensor name, of `names` only: of inputs, updates and compacted forms."""
        ...


class StepMemory(ABC):
    """A plan with the memory of its inputs and outputs, which all its steps share.

    Args:
        kv_address: of a resident vector of which only the length is read (`kv_rows`).
    """

    def __init__(self, plan: Executable, bound: Sequence[Bound], kv_address: int) -> None:
        self.plan, self.device, self.bound, self.kv_address = plan, plan.device, tuple(bound), kv_address
        names = [name for part in self.bound for name in part.names]
        kept = {n for c in names for n in (c, updated_cache_name(c), compacted_cache_name(c))}
        self.bound_tensors = frozenset(t.name for t in (*plan.spec.inputs, *plan.spec.outputs) if t.name in kept)
        self.plain_inputs = tuple(t for t in plan.spec.inputs if t.name not in kept)
        self.plain_outputs = tuple(t for t in plan.spec.outputs if t.name not in kept)
        self.inputs, self.outputs = Region(plan.device), Region(plan.device)

    @abstractmethod
    def shared_context(self, profile: Profile) -> Any:
        """Returns the context of a profile for steps without their own; its earlier binding is void."""

    @abstractmethod
    def forget_steps(self) -> None:
        """Discards all steps and graphs, as addresses have changed."""


class Step:
    """One combination of shapes. It does not refer to its runner: a cycle would keep the memory of both.

    Args:
        first_slot: the slot of batch row 0.
        shared: inputs that are on the device already, bound in place.
        copied: inputs in this runner's own output region, copied into its input region before each run.

    Raises:
        RuntimeFault: no profile accepts the shapes, or TensorRT refuses them.
    """

    def __init__(
        self,
        runner: StepMemory,
        sizes: Mapping[str, int],
        first_slot: int,
        shared: Mapping[str, DeviceArray],
        copied: Mapping[str, DeviceArray],
    ) -> None:
        self.plan, self.device = runner.plan, runner.device
        self.inputs, self.outputs = runner.inputs, runner.outputs
        self.num_runs = self.last_run = 0
        self.context: Any = None
        self.graph: Graph | None = None
        self.nodes = sizes.get("nodes", 1)
        self.shapes = {t.name: shape_from_dims(t, sizes) for t in runner.plain_inputs}
        for part in runner.bound:
            self.shapes |= part.shapes(sizes["batch"])
        self.profile = runner.plan.find_profile(self.shapes)
        self.output_shapes = self._infer_output_shapes(runner)
        self.addresses = {name: array.address for name, array in shared.items()}
        for part in runner.bound:
            self.addresses |= part.addresses(first_slot, runner.bound_tensors)
        if specs.KV_ROWS in self.shapes:
            self.addresses[specs.KV_ROWS] = runner.kv_address
        self.arrays: dict[str, NDArray[Any]] = {}
        self.neutral: dict[str, NDArray[Any]] = {}
        self.changed: set[str] = set()
        self._place_inputs(runner, copied)
        self.results: dict[str, Any] = {}
        self._place_outputs(runner)

    def _infer_output_shapes(self, runner: StepMemory) -> dict[str, tuple[int, ...]]:
        context, plan = runner.shared_context(self.profile), self.plan
        self.set_shapes(context)
        unknown = context.infer_shapes()
        if unknown:
            plan.fail("inputs that determine all shapes", f"nothing known of {', '.join(unknown)}")
        found = {t.name: tuple(int(n) for n in context.get_tensor_shape(t.name)) for t in runner.plain_outputs}
        for name, shape in found.items():
            if min(shape, default=0) < 0:
                plan.fail("outputs whose shapes follow from the inputs'", f"{name} {list(shape)}")
        return found

    def set_shapes(self, context: Any) -> None:
        for name, shape in self.shapes.items():
            if not context.set_input_shape(name, shape):
                self.plan.fail("a shape inside the profile", f"{name} {list(shape)}")

    def bind(self, context: Any) -> None:
        self.set_shapes(context)
        for name, address in self.addresses.items():
            if not context.set_tensor_address(name, address):
                self.plan.fail("an address that TensorRT takes", f"{name} at {address:#x}")

    def _place_inputs(self, runner: StepMemory, copied: Mapping[str, DeviceArray]) -> None:
        offsets, end = {}, 0
        tensors = [t for t in runner.plain_inputs if t.name not in self.addresses]
        for tensor in sorted(tensors, key=lambda t: t.name in copied):  # staged tensors come first
            offsets[tensor.name] = end
            end += aligned(math.prod(self.shapes[tensor.name]) * item_bytes(tensor.dtype))
        self.staged_bytes = min((offsets[name] for name in copied), default=end)
        if self.inputs.fit(end, self.staged_bytes):
            runner.forget_steps()
        start = self.inputs.memory.address
        self.addresses |= {name: start + offset for name, offset in offsets.items()}
        self.copies = [(self.addresses[name], array.address, array.nbytes) for name, array in copied.items()]
        for tensor in tensors:
            if tensor.name not in copied:
                self._stage(tensor, offsets[tensor.name])

    def _stage(self, tensor: TensorSpec, offset: int) -> None:
        shape, dtype = self.shapes[tensor.name], host_dtype(tensor.dtype)
        neutral = neutral_value(tensor.name, shape, tensor.dtype)  # host_dtype has registered bfloat16 with numpy
        part = self.inputs.pinned.bytes[offset : offset + neutral.nbytes]
        self.neutral[tensor.name], self.arrays[tensor.name] = neutral, part.view(dtype).reshape(shape)

    def _place_outputs(self, runner: StepMemory) -> None:
        offsets, end = {}, 0
        self.returned_bytes = 0
        for tensor in sorted(
            runner.plain_outputs, key=lambda t: not comes_to_host(t)
        ):  # outputs that are copied to the host come first
            offsets[tensor.name] = end
            end += aligned(math.prod(self.output_shapes[tensor.name]) * item_bytes(tensor.dtype))
            if comes_to_host(tensor):
                self.returned_bytes = end
        if self.outputs.fit(end, self.returned_bytes):
            runner.forget_steps()
        memory, pinned = self.outputs.memory, self.outputs.pinned
        for tensor in runner.plain_outputs:
            offset, shape = offsets[tensor.name], self.output_shapes[tensor.name]
            self.addresses[tensor.name] = memory.address + offset
            if comes_to_host(tensor):
                num_bytes = math.prod(shape) * item_bytes(tensor.dtype)
                part = pinned.bytes[offset : offset + num_bytes]
                self.results[tensor.name] = part.view(host_dtype(tensor.dtype)).reshape(shape)
            else:
                self.results[tensor.name] = DeviceArray(
                    self.device, memory.address + offset, shape, tensor.dtype, memory
                )

    def fill(self, feeds: Mapping[str, Any], ran_last: bool) -> None:
        """Writes `feeds` to the pinned buffer that steps share, all unless this step ran last; the rest are neutral."""
        if not ran_last:
            for name in self.arrays.keys() - feeds.keys():
                self.arrays[name][...] = self.neutral[name]
        else:
            for name in self.changed.difference(feeds):
                self.arrays[name][...] = self.neutral[name]
        self.changed = {name for name in feeds if name in self.arrays}
        for name in self.changed:
            self.arrays[name][...] = np.asarray(feeds[name])

    def enqueue(self, context: Any) -> None:
        """Enqueue copies and kernels on the stream."""
        device, inputs, outputs = self.device, self.inputs, self.outputs
        if self.staged_bytes:
            device.copy(inputs.memory.address, inputs.pinned.address, self.staged_bytes)
        for dest, source, num_bytes in self.copies:
            device.copy(dest, source, num_bytes)
        if not context.execute_async_v3(device.stream):
            self.plan.fail("a step that runs", "TensorRT refused to enqueue it")
        if self.returned_bytes:
            device.copy(outputs.pinned.address, outputs.memory.address, self.returned_bytes)
