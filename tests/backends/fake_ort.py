# SPDX-License-Identifier: Apache-2.0
"""A fake of ONNX Runtime's CUDA graphs: sessions of the CPU provider over a fake device's memory.

The first run with a `gpu_graph_id` runs the graph three times: twice to allocate, once to capture and replay. Later
ones replay what was captured, whatever is bound then.
"""

import weakref

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from speccompile.backends.cuda.device import Device
from speccompile.backends.onnxruntime import cuda_engine, cuda_session
from speccompile.errors import BundleError

REFUSAL = "This session cannot use the graph capture feature as requested by the user"
NUM_FIRST_RUNS = 3


class Opened:
    """Record of a session.

    Args:
        session: of the CPU provider; held weakly.
        has_graphs: it was opened for CUDA graphs.
    """

    def __init__(self, session, has_graphs):
        self.has_graphs, self._session = has_graphs, weakref.ref(session._sess)
        self.ids = []  # `gpu_graph_id` of all runs

    @property
    def is_gone(self):
        """Nobody holds it, bindings included."""
        return self._session() is None


class FakeSession:
    """One session.

    Args:
        session: of the CPU provider.
        opened: its record.
        faults: of the next runs, taken from the front; such a run has done its work and raises.
    """

    def __init__(self, session, opened, faults):
        self._session, self._opened, self._faults = session, opened, faults
        self._captured = {}  # binding by id

    def __getattr__(self, name):
        return getattr(self._session, name)

    def run_with_iobinding(self, io, options: ort.RunOptions):
        graph_id = int(options.get_run_config_entry("gpu_graph_id"))
        self._opened.ids.append(graph_id)
        fault = self._faults.pop(0) if self._faults else None
        may_capture = self._opened.has_graphs and graph_id != cuda_session.NO_GRAPH
        for _ in range(NUM_FIRST_RUNS if may_capture and graph_id not in self._captured else 1):
            self._session.run_with_iobinding(self._captured.get(graph_id, io))
        if fault is not None:
            raise ort_state.Fail(fault)
        if may_capture:
            self._captured.setdefault(graph_id, io)


class FakeOrt:
    """Replaces the functions that open devices and sessions.

    Args:
        monkeypatch: of the test.
        cuda: the fake device.
    """

    def __init__(self, monkeypatch, cuda):
        self.device = Device(cuda)
        self.opened = []  # in order
        self.refused = set()  # folders of graphs that ONNX Runtime does not take for CUDA graphs
        self.faults = []  # see FakeSession
        self._open = cuda_session.open_session
        monkeypatch.setattr(cuda_engine, "open_device", lambda ordinal: self.device)
        monkeypatch.setattr(cuda_session, "open_session", self.open_session)
        monkeypatch.setattr(cuda_session.SessionPlan, "device_name", "cpu")

    def open_session(self, path, settings, providers):
        (name, options), last = providers
        assert (name, last) == ("CUDAExecutionProvider", "CPUExecutionProvider")
        has_graphs = options["enable_cuda_graph"] == "1"
        if has_graphs and path.parent in self.refused:
            raise BundleError(str(path), REFUSAL, "a graph that ONNX Runtime loads", "Build the bundle again.")
        self.were_gone = [opened.is_gone for opened in self.opened]  # at the latest opening
        session = self._open(path, settings, [last])
        self.opened.append(Opened(session, has_graphs))
        return FakeSession(session, self.opened[-1], self.faults)
