# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime sessions on CUDA as the plans of a `speccompile.backends.cuda.runner.Runner`.

The "execution contexts" of a session are bindings to device addresses; those that are kept may have a CUDA graph each
(`gpu_graph_id`). The first run with an id runs the graph several times, as ONNX Runtime allocates before it captures.
So steps may be captured, which write K and V of their own nodes to rows given by their inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
import onnxruntime as ort

from speccompile.backends.cuda.device import Device
from speccompile.backends.cuda.steps import Profile
from speccompile.backends.onnxruntime.engine import FAULTS, check_io, open_session
from speccompile.core.specs import GraphSpec
from speccompile.errors import BundleError, RuntimeFault
from speccompile.graph_kinds.features import NEXT_STATES

_log = logging.getLogger(__name__)
_REFUSAL = "cannot use the graph capture feature"
NO_GRAPH = -1  # ONNX Runtime's `gpu_graph_id` of a run that is neither captured nor replayed
# GPUs that the x86-64 wheel of onnxruntime-gpu 1.31.1 has machine code for; it has no PTX, which others would compile.
_GPUS = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (12, 0))
MAX_GRAPHS = 128  # most graphs of a session, which never releases one


class SessionContext:
    """An execution context for steps (see `speccompile.backends.cuda.steps`), over a session.

    Args:
        is_kept: it runs one combination of shapes and addresses only, and may capture a CUDA graph.
    """

    def __init__(self, plan: SessionPlan, is_kept: bool) -> None:
        self.plan, self.is_kept = plan, is_kept
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._io: Any = None
        self._options: Any = None
        self._graph_id = NO_GRAPH

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name], self._io = shape, None
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name], self._io = address, None
        return True

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an input as it was set, of an output by the names of its dims."""
        if name in self._shapes:
            return self._shapes[name]
        sizes: dict[Any, int] = {}
        for tensor in self.plan.spec.inputs:
            sizes |= {d: n for d, n in zip(tensor.dims, self._shapes[tensor.name], strict=True) if isinstance(d, str)}
        sizes.setdefault("draft_vocab", self.plan.spec.dist_width)  # distributions have full width
        sizes.setdefault(NEXT_STATES, sizes.get("nodes", 0) + 1)
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.plan.spec.output(name).dims)

    def unbind(self) -> None:
        self._io = None

    def _bind(self) -> None:
        io, plan = self.plan.session.io_binding(), self.plan
        for tensors, bind in ((plan.spec.inputs, io.bind_input), (plan.spec.outputs, io.bind_output)):
            for tensor in tensors:
                shape, address = self.get_tensor_shape(tensor.name), self._addresses[tensor.name]
                dtype = np.dtype(tensor.dtype).type
                bind(tensor.name, plan.device_name, plan.device.ordinal, dtype, shape, address)
        bound = frozenset(self._shapes.items()), frozenset(self._addresses.items())
        self._io, self._graph_id = io, plan.graph_id(bound) if self.is_kept else NO_GRAPH
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", str(self._graph_id))

    def execute_async_v3(self, stream: int) -> bool:
        """Runs on the session's own stream, after ours, and waits; without CUDA graphs if the first capture fails."""
        del stream
        self.plan.device.synchronize()
        fault = self._run()
        if fault is not None and self._graph_id not in self.plan.proven:
            self.plan.give_up_graphs(fault)
            fault = self._run()
        if fault is not None:
            self.plan.fail("a step that runs", fault)
        return True

    def _run(self) -> str | None:
        if self._io is None:
            self._bind()
        try:
            self.plan.session.run_with_iobinding(self._io, self._options)
        except FAULTS as fault:
            return str(fault)
        self.plan.proven.add(self._graph_id)
        return None


class SessionPlan:
    """A plan for a runner, over a session. `reopen`: opens a session without CUDA graphs."""

    device_name = "cuda"  # ONNX Runtime's name of the device
    captures_itself = True
    idle_runs = 0  # a binding is made in microseconds

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        device: Device,
        reopen: Callable[[], ort.InferenceSession],
        has_graphs: bool,
        graph_fault: str | None = None,
    ) -> None:
        self._session: ort.InferenceSession | None = session
        self.spec, self.device, self._reopen = spec, device, reopen
        self.has_graphs, self.graph_fault = has_graphs, graph_fault
        self.proven = {NO_GRAPH}  # ids of completed runs: a later fault is not due to a capture
        self._ids: dict[Hashable, int] = {}
        self._contexts: WeakSet[SessionContext] = WeakSet()

    @property
    def session(self) -> ort.InferenceSession:
        if self._session is None:
            self._session = self._reopen()
        return self._session

    @property
    def num_graphs(self) -> int:
        return len(self.proven) - 1 if self.has_graphs else 0

    def graph_id(self, bound: Hashable) -> int:
        """Returns the id of a binding, the same whenever it is bound again; `NO_GRAPH` where none is left."""
        if not self.has_graphs or (len(self._ids) >= MAX_GRAPHS and bound not in self._ids):
            return NO_GRAPH
        return self._ids.setdefault(bound, len(self._ids) + 1)

    def give_up_graphs(self, fault: str) -> None:
        """Run without CUDA graphs from now on; the session is released first, as two would hold the weights twice."""
        self.has_graphs, self.graph_fault, self._session = False, fault, None
        _log.warning("steps of %s run without CUDA graphs from now on: %s", self.spec.name, fault)
        for context in self._contexts:
            context.unbind()

    def find_profile(self, shapes: Mapping[str, tuple[int, ...]]) -> Profile:
        del shapes
        return Profile(0, {})

    def make_context(self, profile: Profile, is_kept: bool = False) -> SessionContext:
        del profile
        context = SessionContext(self, is_kept)
        self._contexts.add(context)
        return context

    def fail(self, wanted: str, got: str) -> NoReturn:
        raise RuntimeFault(f"engine {self.spec.name}", got, wanted, "See ONNX Runtime's message.")


def find_missing_kernels(device: Device) -> str | None:
    """Returns the GPU in words where ONNX Runtime has no kernels for it; None where it has."""
    major, minor = device.properties()["compute_capability"]
    if (major, minor) in _GPUS:
        return None
    return f"a GPU of compute capability {major}.{minor}, for which onnxruntime-gpu has no kernels"


def open_plan(path: Path, spec: GraphSpec, device: Device, settings: Mapping[str, Any]) -> SessionPlan:
    """Opens a session on CUDA, with CUDA graphs where ONNX Runtime can capture the graph."""
    if (missing := find_missing_kernels(device)) is not None:
        expected = f"one of {', '.join('{}.{}'.format(*pair) for pair in _GPUS)}"
        raise BundleError(str(path), missing, expected, "Build with engine.backend: tensorrt for this GPU.")
    _preload_libraries()
    reopen = partial(open_session, path, settings, _providers(device, False))
    has_graphs, graph_fault = bool(settings.get("cuda_graphs", True)), None
    try:
        session = open_session(path, settings, _providers(device, has_graphs))
    except BundleError as fault:
        if not has_graphs or _REFUSAL not in fault.got:
            raise
        has_graphs, graph_fault = False, fault.got
        _log.warning("steps of %s run without CUDA graphs: %s", spec.name, fault.got)
        session = reopen()
    check_io(path, spec, session)
    return SessionPlan(session, spec, device, reopen, has_graphs, graph_fault)


def _preload_libraries() -> None:
    if not hasattr(ort, "preload_dlls"):
        return
    found = find_spec("nvidia")
    folders = [] if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]
    for name, part in (("cuda", "cu13"), ("cudnn", "cudnn")):
        libraries = [str(f / part / "lib") for f in folders if (f / part / "lib").is_dir()]
        for library in libraries or (None,):
            ort.preload_dlls(cuda=name == "cuda", cudnn=name == "cudnn", directory=library)


def _providers(device: Device, has_graphs: bool) -> list[Any]:
    # TF32 rounds float32 products to 10 bits: a step of many nodes would differ from single steps.
    options = {"device_id": str(device.ordinal), "use_tf32": "0", "enable_cuda_graph": str(int(has_graphs))}
    # By default the arena doubles, with the weights in it.
    options["arena_extend_strategy"] = "kSameAsRequested"
    return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]
