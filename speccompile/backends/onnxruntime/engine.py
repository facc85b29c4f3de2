# SPDX-License-Identifier: Apache-2.0
"""An ONNX Runtime session with caches in place and inputs bound once.

Every combination of shapes has a binding: input arrays read in place, output arrays, and each cache bound to one
address as input and as output. A step copies a few integers and calls `run_with_iobinding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from speccompile.backends.base import EngineBase, LoadJob
from speccompile.backends.feeds import neutral_value, shape_from_dims
from speccompile.backends.onnxruntime.bindings import MAX_BINDINGS, Binding, Bindings, CacheValues, Compaction
from speccompile.backends.onnxruntime.buffers import BoundCache, CacheBuffers, bind_borrowed, cache_sizes
from speccompile.backends.onnxruntime.crowding import Crowding
from speccompile.backends.onnxruntime.kernel_library import register_kernels, runnable_path
from speccompile.backends.states import HostStates, host_states
from speccompile.core import specs
from speccompile.core.jobs import StepCosts
from speccompile.core.specs import GraphSpec, updated_cache_name
from speccompile.errors import BundleError, RuntimeFault

_CPU = ("CPUExecutionProvider",)
# Exceptions of ONNX Runtime when it cannot open a graph or a provider; their only common base class is Exception.
FAULTS = (
    RuntimeError,
    ValueError,
    ort_state.EPFail,
    ort_state.Fail,
    ort_state.InvalidArgument,
    ort_state.InvalidGraph,
    ort_state.InvalidProtobuf,
    ort_state.NoSuchFile,
    ort_state.NotImplemented,
    ort_state.RuntimeException,
)
MAX_FALLBACK_BYTES = 1 << 30  # a second session may copy the weights: larger graphs have none


class OrtEngine(EngineBase[ort.InferenceSession]):
    """An `Engine` over a session; borrowed caches without an owner are allocated here.

    Args:
        rollback: session of the rollback graph of the same model, for trees.
    """

    states: HostStates | None

    def __init__(
        self, job: LoadJob, session: ort.InferenceSession, rollback: ort.InferenceSession | None = None
    ) -> None:
        spec, max_slots, max_rows = job.spec, job.max_slots, job.max_rows
        super().__init__(spec, max_slots, max_rows, host_states(spec, max_slots), job.owners)
        self.session, self.rollback = session, rollback
        self.plain_inputs = spec.plain_inputs
        self.plain_outputs = spec.plain_outputs
        self.caches = CacheBuffers(cache_sizes(spec, spec.own_caches), max_slots, max_rows)
        shared = {name: engine.caches for name, engine in job.owners.items()}
        self.bound = [BoundCache(name, self.caches, index) for index, name in enumerate(spec.own_caches)]
        self.bound += bind_borrowed(spec, shared, max_slots, max_rows)
        self._buffers = tuple(dict.fromkeys(cache.buffers for cache in self.bound))
        self._written = tuple(dict.fromkeys(cache.buffers for cache in self.bound if cache.name in spec.caches))
        self.cache_values = CacheValues(self.bound)
        self._bindings = Bindings()
        self._compactions: dict[tuple[int, ...], Compaction] = {}  # by shape of the path, and rows of the view
        self._logits: np.ndarray = np.zeros(0, np.float32)
        self._image_rows: np.ndarray = np.zeros(0, np.float32)
        self._crowding: Crowding | None = None

    def fall_back(self, crowding: Crowding, open_single: Callable[[], ort.InferenceSession]) -> None:
        """Uses a session with one thread, opened when first needed, where that is faster."""
        self._crowding, self._open_single = crowding, open_single
        self._sessions: dict[bool, ort.InferenceSession] = {False: self.session}  # by whether it has one thread

    def _observe(self, num_nodes: int, step_s: float) -> None:
        assert self._crowding is not None
        was_single = self._crowding.is_single
        self._crowding.observe(num_nodes, step_s)
        is_single = self._crowding.is_single
        if is_single != was_single:
            if is_single not in self._sessions:
                self._sessions[is_single] = self._open_single()
            self.session = self._sessions[is_single]
            self._unbind()

    def run_graph(self, feeds: Mapping[str, np.ndarray], first_slot: int) -> Mapping[str, np.ndarray]:
        key = (first_slot, *feeds, *[value.shape for value in feeds.values()])
        binding = self._bindings.latest.get(key)
        if binding is None or not binding.holds(feeds):
            binding = self._binding(feeds, first_slot)
            if not (self.spec.gives_probs and specs.TEMPERATURE in feeds):  # its values are part of the choice
                self._bindings.latest[key] = binding
        binding.fill(feeds)
        start = perf_counter()
        try:
            self.session.run_with_iobinding(binding.io)
        except FAULTS as fault:
            todo = "Send the request again; if that fails too, load the bundle again."
            raise RuntimeFault(f"engine {self.spec.name}", str(fault), "a step that runs", todo) from fault
        if self._crowding is not None:
            self._observe(binding.cost_size, perf_counter() - start)
        return binding.outputs

    def _binding(self, feeds: Mapping[str, np.ndarray], first_slot: int) -> Binding:
        sizes, rows = self.check_step(feeds, first_slot)
        for buffers in self._written:
            buffers.use(first_slot + sizes["batch"])
            buffers.grow(rows)
        # Memory never moves, so a binding depends only on the shapes and the rows of each view.
        key = (*sizes.values(), first_slot, *[buffers.rows for buffers in self._buffers])
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings.add(key, self._bind(sizes, first_slot))
        return binding

    def _bind(self, sizes: dict[str, int], first_slot: int) -> Binding:
        """Returns a new binding of these shapes."""
        batch, nodes = sizes["batch"], sizes["nodes"]
        views = tuple((buffers, buffers.rows) for buffers in self._buffers)
        cost_size = batch * (nodes if self.spec.caches else 1)
        binding = Binding(self.session.io_binding(), first_slot, cost_size, views, self._max_length(nodes))
        for spec in self.plain_inputs:
            neutral, array = self._input_arrays(spec, shape_from_dims(spec, sizes))
            binding.bind_input(spec.name, array, neutral)
        for spec in self.plain_outputs:
            binding.bind_output(spec.name, self._output_array(spec, shape_from_dims(spec, sizes)))
        for cache, value in zip(self.bound, self.cache_values.get(first_slot, batch), strict=True):
            binding.io.bind_ortvalue_input(cache.name, value)
            if cache.name in self.spec.caches:
                binding.io.bind_ortvalue_output(updated_cache_name(cache.name), value)
        for name, array in (self.states.arrays if self.states is not None else {}).items():
            shape, start = (batch, *array.shape[1:]), array[first_slot:].ctypes.data
            binding.io.bind_input(name, "cpu", 0, np.float32, shape, start)
            binding.io.bind_output(updated_cache_name(name), "cpu", 0, np.float32, shape, start)
        return binding

    def _unbind(self) -> None:
        self._bindings.clear()

    def _max_length(self, nodes: int) -> int | None:
        if not self._written:
            return None
        rows = min(self.max_rows, *(buffers.rows for buffers in self._written))
        return rows - nodes - self.spec.rows_written_ahead

    def _input_arrays(self, spec: specs.TensorSpec, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Returns an input's neutral value and its array; bindings share that of image rows, which are large."""
        if spec.name != specs.IMAGE_ROWS:
            neutral = neutral_value(spec.name, shape, spec.dtype)
            return neutral, neutral.copy()
        size = math.prod(shape)
        if size > self._image_rows.size:
            self._unbind()
            self._image_rows = np.zeros(size, spec.dtype)
        return np.broadcast_to(np.zeros(1, spec.dtype), shape), self._image_rows[:size].reshape(shape)

    def _output_array(self, spec: specs.TensorSpec, shape: tuple[int, ...]) -> np.ndarray:
        if spec.name != specs.LOGITS:
            return np.zeros(shape, spec.dtype)
        size = math.prod(shape)
        if size > self._logits.size:
            self._unbind()
            self._logits = np.zeros(size, spec.dtype)
        return self._logits[:size].reshape(shape)

    @property
    def view_rows(self) -> int:
        return self.caches.rows

    def reset(self, rows: int = 1) -> None:
        self.caches.num_used = 0
        self._bindings.latest.clear()  # a step uses its slots again
        super().reset(rows)

    def shrink(self, rows: int) -> None:
        self.caches.shrink(rows)

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        if source == dest:
            return
        self.caches.move_slot(source, dest, rows)
        if self.states is not None:
            self.states.move(source, dest, rows)

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        self.caches.swap_slots(first, second, rows)
        if self.states is not None:
            self.states.swap(first, second)

    def slide_slot(self, slot: int, first: int, num: int) -> None:
        self.caches.slide_slot(slot, first, num)

    def clear_slot(self, slot: int) -> None:
        self.caches.clear_slot(slot)
        if self.states is not None:
            self.states.clear(slot)

    def read_caches(self, slot: int, rows: int) -> Mapping[str, np.ndarray]:
        return self.caches.slot_rows(slot, rows)

    def compact_with(self, rollback: ort.InferenceSession, lengths: np.ndarray, path: np.ndarray) -> None:
        key = (*path.shape, self.caches.rows)
        compaction = self._compactions.get(key)
        if compaction is None:
            if len(self._compactions) >= MAX_BINDINGS:
                self._compactions.clear()
            own = zip(self.caches.names, self.cache_values.get(0, len(lengths)), strict=False)  # borrowed ones follow
            compaction = self._compactions[key] = Compaction(rollback, (lengths.shape, path.shape), dict(own))
        compaction.run(lengths, path)


class StateOrtEngine(OrtEngine):
    """An engine whose graph has recurrent states: a class of its own, so that steps of other graphs do no more."""

    def run_graph(self, feeds: Mapping[str, np.ndarray], first_slot: int) -> Mapping[str, np.ndarray]:
        assert self.states is not None
        self.check_step(feeds, first_slot)
        step = self.states.begin(feeds, first_slot)
        outputs = super().run_graph({**feeds, specs.STATE_LENGTHS: step.state_lengths}, first_slot)
        self.states.end(step)
        return outputs


_SPINNING = {"stop": {"session.force_spinning_stop": "1"}, "off": {"session.intra_op.allow_spinning": "0"}}


def session_options(settings: Mapping[str, Any]) -> ort.SessionOptions:
    """Returns session options from a tuning record: `threads`, `spinning`, `log_severity`, `prepack` (default True)."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = int(settings.get("threads", 1)), 1
    options.log_severity_level = int(settings.get("log_severity", 3))
    # Without VNNI, sums of products with signed weights saturate at 16 bits (AVX2: errors 3 to 10 times as large).
    entries = {"session.x64quantprecision": "1"}
    entries["session.disable_prepacking"] = str(int(not settings.get("prepack", True)))
    # Two sessions that spin at once were measured 2.6 times slower: a session stops spinning when its run ends.
    entries |= _SPINNING.get(settings.get("spinning", "stop"), {})
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    return options


def open_session(path: Path, settings: Mapping[str, Any], providers: Sequence[Any] = _CPU) -> ort.InferenceSession:
    """Opens a lowered graph; on the CPU with our kernels and sequences of them, where there is a library.

    Raises:
        BundleError: ONNX Runtime cannot load it, or the requested provider is not available.
    """
    options = session_options(settings)
    try:
        if tuple(providers) != _CPU:
            options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        elif register_kernels(options):
            path = runnable_path(path)
        session = ort.InferenceSession(str(path), options, providers=list(providers))
    except FAULTS as fault:
        todo = "Build the bundle again."
        raise BundleError(str(path), str(fault), "a graph that ONNX Runtime loads", todo) from fault
    wanted = providers[0] if isinstance(providers[0], str) else providers[0][0]
    if session.get_providers()[0] != wanted:  # ONNX Runtime falls back to the CPU silently
        todo = "Install onnxruntime-gpu and the CUDA libraries it names, or set engine.device: cpu."
        raise BundleError(str(path), f"providers {session.get_providers()}", wanted, todo)
    return session


def load_engine(job: LoadJob) -> OrtEngine:
    """Opens a graph on the CPU and allocates its caches.

    Raises BundleError: it cannot, or they are not those of `spec`.
    """
    path, spec, settings = job.path, job.spec, job.tuning
    session = open_session(path, settings)
    check_io(path, spec, session)
    check_tensors(path, spec, session)
    compactor = open_session(job.rollback, {**settings, "threads": 1}) if job.rollback is not None else None
    engine = (StateOrtEngine if spec.states else OrtEngine)(job, session, compactor)
    costs, num_bytes = StepCosts.from_json(settings), sum(file.stat().st_size for file in path.parent.glob("*"))
    if int(settings.get("threads", 1)) > 1 and costs.ms(1) > 0 and num_bytes <= MAX_FALLBACK_BYTES:
        engine.fall_back(Crowding(costs, spec.name), lambda: open_session(path, {**settings, "threads": 1}))
    return engine


def check_io(path: Path, spec: GraphSpec, session: ort.InferenceSession) -> None:
    """Compare a session's inputs and outputs with its spec."""
    wanted, held = (*spec.inputs, *spec.outputs), (*session.get_inputs(), *session.get_outputs())
    got = [t.name for t in held]
    if got != [t.name for t in wanted]:
        differing = sorted(set(got) ^ {t.name for t in wanted}) or got
        raise BundleError(str(path), f"tensors {differing}", "those of the manifest", "Build the bundle again.")


def check_tensors(path: Path, spec: GraphSpec, session: ort.InferenceSession) -> None:
    """Compare the dims and kinds of a session's inputs and outputs with its spec, whose names are the session's."""
    held = (*session.get_inputs(), *session.get_outputs())
    for tensor, stated in zip(held, (*spec.inputs, *spec.outputs), strict=True):
        # A dim without a name is not stated by the graph; floats may be narrower than the spec's.
        dims = [own if own is None else other for own, other in zip(tensor.shape, stated.dims, strict=False)]
        is_kind = tensor.type == f"tensor({stated.dtype})" or ("float" in tensor.type and "float" in stated.dtype)
        if len(tensor.shape) != len(stated.dims) or dims != tensor.shape or not is_kind:
            got, expected = f"{tensor.name} {tensor.type} {tensor.shape}", f"{stated.dtype} {list(stated.dims)}"
            raise BundleError(str(path), got, f"{expected}, as the manifest says", "Build the bundle again.")


__all__ = ["FAULTS", "OrtEngine", "StateOrtEngine", "check_io", "load_engine", "open_session", "session_options"]
