# SPDX-License-Identifier: Apache-2.0
"""Recurrent states of engines on CUDA, over the fakes: those of the engine on the CPU, whatever becomes of a slot.

The fake of ONNX Runtime runs a graph three times where it captures it, so states must not be written where they are
read.
"""

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from speccompile.backends.base import LoadJob
from speccompile.backends.cuda.device import Device
from speccompile.backends.cuda.states import DeviceStates
from speccompile.backends.onnxruntime.cuda_engine import GrowingCaches, load_cuda_engine
from speccompile.core import registry
from speccompile.core.dims import LayerDims, ModelDims
from speccompile.core.specs import LOGITS, GraphSpec
from speccompile.errors import BundleError, RuntimeFault
from speccompile.graph_kinds.decoder import rollback_spec
from speccompile.passes.rollback import build_rollback, cache_groups
from tests.backends.fake_ort import FakeOrt
from tests.backends.hybrid_lab import DIMS, MAX_ROWS, NUM_DRAFTS, VOCAB, Hybrid, feed, hybrid_model, hybrid_spec
from tests.backends.tensorrt.fake_cuda import FakeCuda
from tests.backends.tensorrt.trt_lab import Lab
from tests.lab.graphs import compile_graph

pytestmark = pytest.mark.export

SLOTS, ROWS = 3, 104
Lowered = tuple[Path, GraphSpec, Path]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """(graph, spec, rollback graph) as `engine.device: cuda` lowers the same decoder."""
    folder, spec = tmp_path_factory.mktemp("cuda"), hybrid_spec()
    built = compile_graph(hybrid_model(), spec, folder, registry.backend("onnxruntime", "cuda"), DIMS)
    assert built.rollback is not None
    return built.path, spec, built.rollback


@pytest.fixture(params=["onnxruntime", "tensorrt", "tensorrt_rtx"])
def engine(request: pytest.FixtureRequest, lowered: Lowered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    if request.param != "onnxruntime":
        return Lab(monkeypatch, tmp_path, request.param).load(lowered, rows=ROWS)
    FakeOrt(monkeypatch, FakeCuda())
    graph, spec, rollback = lowered
    return load_cuda_engine(LoadJob(graph, spec, max_slots=SLOTS, max_rows=MAX_ROWS, rollback=rollback))


def test_the_lowered_graph_has_no_branches_and_no_bodies(lowered):
    """ONNX Runtime captures no CUDA graph of others."""
    model = onnx.load(lowered[0], load_external_data=False)
    assert not model.functions
    assert {node.op_type for node in model.graph.node}.isdisjoint({"If", "Loop", "Scan", "GatedDelta", "ConvRows"})


class Pair:
    """Both engines, run in step; each output and each count is compared."""

    def __init__(self, ours: Any, theirs: Any) -> None:
        self.engines = (ours, theirs)
        self.kept: list[list[int]] = [[] for _ in range(SLOTS)]

    def step(self, tokens: Any, sure: Sequence[int], accepted: Sequence[int], first_slot: int = 0) -> None:
        """Runs a step after what the slots keep, of which they then keep `accepted` nodes more."""
        batch = len(tokens)
        slots = range(first_slot, first_slot + batch)
        feeds = feed(tokens, [len(self.kept[sequence]) for sequence in slots], sure)
        ours, theirs = (np.array(engine.run(feeds, first_slot)[LOGITS]) for engine in self.engines)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
        for sequence, row, num in zip(slots, tokens, accepted, strict=True):
            self.kept[sequence] += [int(token) for token in row[:num]]
        self.check()

    def check(self) -> None:
        """Compares the counts."""
        ours, theirs = (engine.states for engine in self.engines)
        assert (ours.lengths.tolist(), ours.num_pending.tolist()) == (
            theirs.lengths.tolist(),
            theirs.num_pending.tolist(),
        )
        held = [[(s.length, s.num_pending) if s else None for s in states.snapshots] for states in (ours, theirs)]
        assert held[0] == held[1]

    def each(self, work: Callable[[Any], Any]) -> Any:
        """Does the same with both engines; returns what both return."""
        ours, theirs = map(work, self.engines)
        assert ours == theirs
        self.check()
        return ours


def run_rounds(pair: Pair, seed: int, num_rounds: int = 60) -> None:
    """Prompts, plain steps, drafts, moves, snapshots and rollbacks in any order."""
    rng = np.random.default_rng(seed)
    for _ in range(num_rounds):
        kind, (slot, other) = int(rng.integers(7)), (int(n) for n in rng.permutation(SLOTS)[:2])
        if max(map(len, pair.kept)) > 80:
            kind, slot = 0, int(np.argmax([len(tokens) for tokens in pair.kept]))
        if kind == 0:
            prompt = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
            pair.each(lambda engine, slot=slot: engine.states.resume(slot, 0))
            pair.kept[slot] = []
            pair.step([prompt], [max(len(prompt) - 2, 0)], [len(prompt)], slot)
            pair.each(lambda engine, slot=slot: engine.states.take_snapshot(slot))
        elif kind == 1:
            pair.step(rng.integers(0, VOCAB, (SLOTS, 1)), [1] * SLOTS, [1] * SLOTS)
        elif kind <= 3:
            batch, first = (SLOTS, 0) if kind == 2 else (1, slot)
            drafts = rng.integers(0, VOCAB, (batch, NUM_DRAFTS + 1))
            pair.step(drafts, [0] * batch, rng.integers(1, NUM_DRAFTS + 2, batch).tolist(), first)
        elif kind == 4:
            rows = len(pair.kept[slot])
            pair.each(lambda engine, slot=slot, other=other, rows=rows: engine.move_slot(slot, other, rows))
            pair.kept[other] = list(pair.kept[slot])
        elif kind == 5:
            rows = max(len(pair.kept[slot]), len(pair.kept[other]))
            pair.each(lambda engine, slot=slot, other=other, rows=rows: engine.swap_slots(slot, other, rows))
            pair.kept[slot], pair.kept[other] = pair.kept[other], pair.kept[slot]
        else:
            snapshot = pair.engines[1].states.snapshots[slot]
            rows = snapshot.length if snapshot and rng.integers(2) else int(rng.integers(0, len(pair.kept[slot]) + 1))
            rows = pair.each(lambda engine, slot=slot, rows=rows: engine.states.reusable(slot, rows))
            pair.each(lambda engine, slot=slot, rows=rows: engine.states.resume(slot, rows))
            pair.kept[slot] = pair.kept[slot][:rows]


def test_any_rounds_equal_those_of_the_engine_on_the_cpu(engine, plain):
    run_rounds(Pair(engine, plain.open(SLOTS)), 1)


def _without_copies(states: DeviceStates, source: int, source_side: int, dest: int, dest_side: int) -> None:
    pass


def _without_exchange(states: DeviceStates, step: Any) -> None:
    sides = list(states.sides)
    END(states, step)
    states.sides = sides


def _in_place(states: DeviceStates, first_slot: int, names: frozenset[str]) -> dict[str, int]:
    found = ADDRESSES(states, first_slot, names)
    return {name: found[name.removesuffix(".updated")] for name in found}


def _first_room(states: DeviceStates, slot: int) -> Any:
    states.snapshots, held = [None] * SLOTS, states.snapshots
    try:
        return SAVE(states, slot)
    finally:
        states.snapshots = held


END, ADDRESSES, SAVE = DeviceStates.end, DeviceStates.addresses, DeviceStates.save_arrays
MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "slots are moved without their states": ("_copy", _without_copies),
    "the buffers do not change places": ("end", _without_exchange),
    "states are written where they are read": ("addresses", _in_place),
    "one memory has all snapshots": ("save_arrays", _first_room),
}


@pytest.mark.mutant
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name, plain, lowered, monkeypatch, tmp_path):
    method, wrong = MUTANTS[name]
    monkeypatch.setattr(DeviceStates, method, wrong)
    FakeOrt(monkeypatch, FakeCuda())
    graph, spec, _ = lowered
    engine = load_cuda_engine(LoadJob(graph, spec, max_slots=SLOTS, max_rows=MAX_ROWS))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_rounds(Pair(engine, plain.open(SLOTS)), 0, 400)


def test_faults_are_those_of_the_cpu(engine):
    engine.run(feed([[1, 2, 3, 4, 5, 6]], [0], [4]))
    for length in (3, 7):
        with pytest.raises(RuntimeFault, match=f"slot 0 after {length} tokens; expected 4 to 6 tokens"):
            engine.run(feed([[1]], [length], [0]))
    engine.clear_slot(0)
    assert engine.states.reusable(0, 6) == 0
    engine.reset()
    engine.run(feed([[1, 2]], [0], [2]))


def test_two_buffers_and_a_snapshot_of_each_slot_are_all_that_is_allocated(engine):
    states, of_slot = engine.states, DIMS.state_bytes(engine.spec.max_pending)
    assert states.num_bytes == 3 * SLOTS * of_slot
    for turn in range(4):
        for slot in range(SLOTS):
            engine.run(feed([[turn + 1, 2]], [0], [2]), first_slot=slot)
            states.take_snapshot(slot)
        states.move(0, 2)
    assert len(states._rooms) == SLOTS and {snapshot.length for snapshot in states.snapshots} == {2}


def test_states_that_follow_others_hold_the_same_and_leave_them(engine):
    """Whatever buffers of the two hold them."""
    owner, rng = engine.states, np.random.default_rng(3)
    follower = DeviceStates(engine.device, engine.spec, SLOTS, engine.alignment)
    follower.owner, follower.sides = owner, [0, 1, 0]
    for slot in range(SLOTS):
        for turn in range(slot + 1):  # so that the owner's sides differ, too
            engine.run(feed([rng.integers(0, VOCAB, 3)], [3 * turn], [3]), first_slot=slot)

    def held(states, slot):
        engine.device.synchronize()
        return [
            ctypes.string_at(states.address(index, states.sides[slot], slot), size)
            for index, size in enumerate(states._sizes)
        ]

    before = [held(owner, slot) for slot in range(SLOTS)]
    follower.follow(2)
    assert [held(follower, slot) == before[slot] for slot in range(SLOTS)] == [True, True, False]
    assert [held(owner, slot) for slot in range(SLOTS)] == before and any(map(any, before[0]))
    assert follower.lengths.tolist() == [3, 6, 0] and owner.lengths.tolist() == [3, 6, 9]


def test_slots_that_cannot_be_aligned_are_refused(lowered, monkeypatch, tmp_path):
    """Five pending rows of 52 columns: TensorRT's own spec has sixteen."""
    spec = hybrid_spec()
    device = Lab(monkeypatch, tmp_path).device
    assert spec.max_pending == 5
    with pytest.raises(BundleError, match=r"1040 bytes a slot of pending\.0; expected a multiple of 256"):
        DeviceStates(device, spec, 2)
    assert DeviceStates(device, spec, 1).shapes(1)["pending.0"] == (1, 5, 52)


MIXED = ModelDims("m", 9, 8, 3, 2, 1, 4, 64, layer_dims=(LayerDims(1, 8), LayerDims(3, 16), LayerDims(1, 8)))


def test_caches_of_several_sizes_are_laid_out_each_on_its_own():
    cuda = FakeCuda()
    caches = GrowingCaches(Device(cuda), rollback_spec(MIXED), 2, 300)
    assert caches.sizes == [(1, 8)] * 2 + [(3, 16)] * 2 + [(1, 8)] * 2
    caches.device.synchronize()

    def views() -> list[np.ndarray]:
        caches.device.synchronize()
        return [cuda.view(caches.address(i, 0), caches.shape(i, 2), np.float32) for i in range(6)]

    before = []
    for view in views():
        view[...] = np.random.default_rng(view.size).standard_normal(view.shape)
        before.append(view.copy())
    assert caches.resize(250) and caches.rows == 256
    caches.swap_slots(0, 1, 100)
    caches.move_slot(0, 1, 50)
    for view, old in zip(views(), before, strict=True):
        np.testing.assert_array_equal(view[0, :, :100], old[1, :, :100])
        np.testing.assert_array_equal(view[1, :, :50], old[1, :, :50])
        np.testing.assert_array_equal(view[1, :, 50:100], old[0, :, 50:100])
        assert not view[:, :, 128:].any()


def test_each_size_has_one_compaction():
    spec = rollback_spec(MIXED)
    assert [len(names) for names in cache_groups(spec)] == [4, 2]
    model = build_rollback(spec, joined=True)
    assert [node.attributes["num_caches"].as_int() for node in model.graph] == [4, 2]
    assert [value.name for value in model.graph.outputs] == [tensor.name for tensor in spec.outputs]
