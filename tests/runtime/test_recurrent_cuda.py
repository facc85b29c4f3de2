# SPDX-License-Identifier: Apache-2.0
"""Continuous batching on a target whose recurrent states are in device memory, over the fakes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.backends.onnxruntime.cuda_engine import load_cuda_engine
from speccompile.core import registry
from tests.backends.fake_ort import FakeOrt
from tests.backends.hybrid_lab import MAX_ROWS, NUM_DRAFTS, Hybrid, hybrid_model
from tests.backends.tensorrt.fake_cuda import FakeCuda
from tests.runtime.test_recurrent import run_rounds

pytestmark = pytest.mark.distribution


class OnCuda(Hybrid):
    """The target lowered for CUDA over a fake device; plain decoding stays on the CPU.

    Args:
        hybrid: on the CPU.
        folder: of the graph; made here.
    """

    def __init__(self, hybrid: Hybrid, folder: Path) -> None:
        self.hybrid, self.path = hybrid, folder / "graph.onnx"
        registry.backend("onnxruntime", "cuda").compile(CompileJob(hybrid_model(), hybrid.spec, folder))

    def open(self, max_slots: int) -> Any:
        """Returns an engine on the fake device, of one slot on the CPU."""
        if max_slots == 1:
            return self.hybrid.open(1)
        return load_cuda_engine(LoadJob(self.path, self.hybrid.spec, max_slots=max_slots, max_rows=MAX_ROWS))

    def check(self, engine: Any, slot: int, tokens: Sequence[int]) -> None:
        """Checks that the states of a slot hold so many tokens."""
        states = engine.states
        assert not tokens or 0 <= len(tokens) - states.lengths[slot] <= states.num_pending[slot]


def test_rounds_on_cuda_give_the_texts_of_plain_decoding_on_the_cpu(tmp_path, monkeypatch):
    """Over the fakes, which run a step three times where they capture it: prefixes, swaps, snapshots, host verdicts."""
    FakeOrt(monkeypatch, FakeCuda())
    bench = run_rounds(OnCuda(Hybrid(tmp_path / "cpu"), tmp_path / "cuda"), 0, 40)
    assert bench.target.runner.plan.num_graphs > 3 and bench.scheduler.counters.num_reused_tokens > 50
    assert set(bench.script.num_accepted) == set(range(NUM_DRAFTS + 1))
