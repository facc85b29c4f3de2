# SPDX-License-Identifier: Apache-2.0
"""Engines over the fakes: a fake device and variant put where `load_engine` looks for the real ones."""

from typing import Any

from speccompile.backends.base import LoadJob
from speccompile.backends.cuda.device import Device
from speccompile.backends.cuda.kv_caches import rollback_spec_of
from speccompile.backends.tensorrt import engine as engine_module
from speccompile.backends.tensorrt.specs import tensorrt_spec
from tests.backends.tensorrt.fake_cuda import FakeCuda
from tests.backends.tensorrt.fake_trt import FakeTrt, write_plan

ROWS = 1024


def profiles_of(rows=ROWS, slots=4, nodes=16, chunk=128, vocab=97):
    """A decode and a prefill profile, as builds have them."""
    common = {"kv": (1, rows), "draft_vocab": (1, vocab)}
    decode = {"batch": (1, slots), "nodes": (1, nodes), "scored": (1, nodes), **common}
    prefill = {"batch": (1, 1), "nodes": (1, chunk), "scored": (1, chunk), **common}
    return [prefill, decode]


class Lab:
    """A fake GPU with one variant.

    Args:
        monkeypatch: puts it in place.
        folder: for plans.
        variant: tensorrt or tensorrt_rtx.
        cuda: the device; None: a new one of the sizes `more`.
    """

    def __init__(self, monkeypatch: Any, folder: Any, variant: str = "tensorrt", cuda: Any = None, **more: Any) -> None:
        self.cuda, self.folder, self.num_plans = cuda or FakeCuda(**more), folder, 0
        self.trt = FakeTrt(self.cuda, variant)
        monkeypatch.setenv("SPECCOMPILE_CACHE", str(folder / "cache"))
        self.device = Device(self.cuda)
        monkeypatch.setattr(engine_module, "open_device", lambda ordinal: self.device)
        monkeypatch.setattr(engine_module, "load_tensorrt", lambda variant: self.trt.variant)

    def plan(self, graph: Any, spec: Any, profiles: Any = None, **more: Any) -> Any:
        """Write a plan."""
        self.num_plans += 1
        return write_plan(self.folder / f"{self.num_plans}.plan", graph, spec, profiles or profiles_of(), **more)

    def load(
        self,
        compiled: tuple[Any, Any, Any],
        *,
        rows: int = ROWS,
        slots: int = 3,
        dtype: str = "float32",
        compacts: bool = False,
        max_rows: int | None = None,
        **settings: Any,
    ) -> Any:
        """An engine of (graph, neutral spec, rollback graph), be they lowered for ONNX Runtime or for TensorRT."""
        graph, spec, rollback = compiled
        spec = tensorrt_spec(spec, dtype, rows, compacts=compacts)
        profiles = profiles_of(rows)
        compactor = self.plan(rollback, rollback_spec_of(spec), profiles)
        return engine_module.load_engine(
            LoadJob(
                self.plan(graph, spec, profiles),
                spec,
                max_slots=slots,
                max_rows=max_rows or rows,
                tuning=settings,
                rollback=compactor,
            )
        )
