# SPDX-License-Identifier: Apache-2.0
"""Steps that fail for good reason, most often for lack of memory, leave those before and after them as they are."""

import numpy as np
import pytest

from speccompile.backends.cuda.device import Device
from speccompile.backends.cuda.steps import Region
from speccompile.core import specs
from speccompile.errors import RuntimeFault
from tests.backends.tensorrt import fake_trt
from tests.backends.tensorrt.fake_cuda import FakeCuda, Status
from tests.backends.tensorrt.test_engine import TOKENS, feed, same

pytestmark = pytest.mark.plan


@pytest.mark.parametrize("function", ["cudaMalloc", "cudaMallocHost"])
def test_a_step_for_which_there_is_no_memory_leaves_the_others(lab, target, open_engine, monkeypatch, function):
    """Their captured graphs still have memory: the fake device refuses what was freed."""
    ours, theirs = lab.load(target), open_engine()
    for _ in range(4):
        same(ours.run(feed(TOKENS[:4], 0)), theirs.run(feed(TOKENS[:4], 0)))
    assert lab.cuda.num_launches > 0
    with monkeypatch.context() as patch:
        patch.setattr(lab.cuda, function, lambda size: (Status.cudaErrorMemoryAllocation, None))
        with pytest.raises(RuntimeFault, match="cudaErrorMemoryAllocation"):
            ours.run(feed(TOKENS[:120], 0))
    for nodes in (4, 120, 4):
        same(ours.run(feed(TOKENS[:nodes], 0)), theirs.run(feed(TOKENS[:nodes], 0)))


def test_a_region_grows_by_doubling_where_there_is_room():
    region = Region(Device(FakeCuda(capacity_bytes=10_000)))
    assert region.fit(2_000, 2_000) and not region.fit(2_000, 1_000)
    assert region.fit(2_100, 0) and region.memory.num_bytes == 4_000
    held = region.memory
    assert region.fit(5_000, 0) and region.memory.num_bytes == 5_000  # 4,000 are held meanwhile
    with pytest.raises(RuntimeFault, match="cudaErrorMemoryAllocation"):
        region.fit(6_000, 0)
    assert region.memory.num_bytes == 5_000 and held is not region.memory


def test_steps_share_a_context_where_there_is_no_memory_for_more(lab, target, open_engine, monkeypatch, caplog):
    ours, theirs = lab.load(target), open_engine()
    create, made = fake_trt.FakeEngine.create_execution_context, []

    def create_few(engine, how):
        made.append(1)
        return create(engine, how) if len(made) <= 2 else None

    monkeypatch.setattr(fake_trt.FakeEngine, "create_execution_context", create_few)
    for engine in (ours, theirs):
        engine.run(feed(TOKENS[:10], 0))  # later steps need no larger regions
    for _ in range(4):
        for nodes in (1, 2, 3):
            same(ours.run(feed(TOKENS[:nodes], 0)), theirs.run(feed(TOKENS[:nodes], 0)))
    assert len(made) == 3 and {step.nodes for step in ours.runner._owners} == {1}
    assert "an execution context" in ours.graph_fault and "no more steps of target get" in caplog.text


def test_inputs_of_a_step_that_failed_are_not_those_of_the_next(lab, target, open_engine):
    class Broken:
        shape = (1, 6, 2)

        def __array__(self, dtype=None, copy=None):
            raise RuntimeFault("a", "b", "c", "d")

    ours, theirs = lab.load(target), open_engine()
    for engine in (ours, theirs):
        engine.run(feed(TOKENS[:60], 0))
        engine.run(feed(TOKENS[60:64], 60))
    with pytest.raises(RuntimeFault, match="a: got b"):
        ours.run(feed(TOKENS[:6], 60, **{specs.UNIFORMS: Broken(), specs.TEMPERATURE: np.ones(1, np.float32)}))
    same(ours.run(feed(TOKENS[60:64], 60)), theirs.run(feed(TOKENS[60:64], 60)))
