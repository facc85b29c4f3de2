# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's CUDA engine with its memory in a fake device and its sessions on the CPU: the same numbers.

The device's memory is host memory here, so the bindings to device addresses can be given to the CPU provider.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.backends.cuda.arrays import DeviceArray
from speccompile.backends.cuda.device import Device
from speccompile.backends.onnxruntime import cuda_engine, cuda_session
from speccompile.backends.onnxruntime.cuda_backend import OrtCudaBackend
from speccompile.backends.onnxruntime.cuda_engine import GrowingCaches, load_cuda_engine
from speccompile.backends.onnxruntime.cuda_session import NO_GRAPH
from speccompile.core import registry, specs
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import SamplingParams
from speccompile.errors import BundleError, RecipeError, RuntimeFault
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.speculators.draft_model.config import DraftModelConfig, DraftModelMethod
from tests.backends.fake_ort import REFUSAL, FakeOrt
from tests.backends.tensorrt.fake_cuda import FakeCuda
from tests.lab.graphs import compile_graph

pytestmark = pytest.mark.export

TOKENS = np.random.default_rng(7).integers(0, 97, 400)


def feed(tokens, length, **more):
    return {specs.TOKENS: np.atleast_2d(tokens), specs.LENGTHS: np.array([length]), **more}


@pytest.fixture(scope="session")
def for_cuda(neutral, tmp_path_factory):
    """role -> (graph, spec, rollback graph) as `engine.device: cuda` lowers them."""
    model, dims = neutral
    made = {}
    backend = registry.backend("onnxruntime", "cuda")
    for role in ("target", "draft"):
        decoder = decoder_spec(role, dims)
        spec = candidate_spec(decoder, 1, dists=True) if role == "draft" else verified_spec(decoder, keep_logits=True)
        folder = tmp_path_factory.mktemp(f"cuda-{role}")
        built = compile_graph(model, spec, folder, backend, dims)
        made[role] = (built.path, spec, built.rollback)
    return made


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def fake_ort(monkeypatch, cuda):
    """ONNX Runtime on that GPU; its sessions are the CPU provider's."""
    return FakeOrt(monkeypatch, cuda)


@pytest.fixture
def load(fake_ort, for_cuda):
    def make(role="target", max_slots=3, max_rows=1024, **settings):
        graph, spec, rollback = for_cuda[role]
        sizes = {"max_slots": max_slots, "max_rows": max_rows}
        return load_cuda_engine(LoadJob(graph, spec, tuning=settings, rollback=rollback, **sizes))

    return make


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(np.asarray(ours[name]), value, err_msg=name)


def test_engines_are_loaded_on_the_device_that_was_asked_for(load, cuda):
    load()
    cuda.num_devices = 2
    Device(cuda, 1)
    assert cuda.current == 1
    load()
    assert cuda.current == 0


def test_steps_equal_those_of_the_cpu_engine(load, open_engine):
    """Growing, shrinking, slots, trees and compaction; verdicts decided by branch-free bodies."""
    ours, theirs = load(), open_engine()
    lengths = np.zeros(3, np.int64)
    for slot, num in enumerate((100, 3, 250)):
        for start in range(0, num, 90):
            chunk = feed(TOKENS[start : min(start + 90, num)], start, scored_nodes=np.zeros((1, 1), np.int64))
            same(ours.run(chunk, slot), theirs.run(chunk, slot))
        lengths[slot] = num
    assert ours.caches.rows == 256
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    tree = {specs.TREE_MASK: np.broadcast_to(mask, (3, 4, 4)), specs.PARENTS: np.array([[-1, 0, 0, 2]] * 3)}
    for step in range(12):
        nodes = (1, 4, 4)[step % 3]
        feeds = {specs.TOKENS: TOKENS[step : step + 3 * nodes].reshape(3, nodes), specs.LENGTHS: lengths}
        feeds |= tree if step % 3 == 2 else {}
        same(ours.run(feeds), theirs.run(feeds))
        if step % 3 == 2:
            path = np.array([[0, 2, 3], [0, 1, -1], [0, 2, -1]])
            for engine in (ours, theirs):
                engine.compact(lengths, path)
            lengths = lengths + (path >= 0).sum(1)
        else:
            lengths = lengths + nodes
    for engine in (ours, theirs):
        engine.move_slot(0, 1)
    feeds = {specs.TOKENS: TOKENS[:2].reshape(2, 1), specs.LENGTHS: np.array([lengths[0], lengths[0]])}
    same(ours.run(feeds), theirs.run(feeds))
    ours.reset(5)
    assert ours.caches.rows == 128
    fresh = open_engine()
    same(ours.run(feed(TOKENS[:9], 0)), fresh.run(feed(TOKENS[:9], 0)))


def test_large_outputs_stay_and_one_copy_goes_each_way(cuda, load):
    engine = load()
    engine.run(feed(TOKENS[:9], 0))
    for _ in range(4):
        cuda.copies.clear()
        out = engine.run(feed(TOKENS[9:13], 9))
        assert [way for way, _ in cuda.copies] == ["in", "out"]
        assert isinstance(out[specs.LOGITS], DeviceArray) and isinstance(out[specs.PATH], np.ndarray)
    assert cuda.num_launches == 0  # ONNX Runtime captures by itself


def test_only_kept_bindings_get_a_graph_of_their_own(load, fake_ort):
    engine = load()
    engine.run(feed(TOKENS[:100], 0))
    for _ in range(3):
        engine.run(feed(TOKENS[:4], 100))
        engine.run(feed(TOKENS[:1], 100))
    assert fake_ort.opened[0].ids == [NO_GRAPH, NO_GRAPH, NO_GRAPH, 1, 2, 1, 2]
    plain = load(cuda_graphs=False)
    for _ in range(3):
        plain.run(feed(TOKENS[:4], 0))
    assert set(fake_ort.opened[2].ids) == {NO_GRAPH} and not fake_ort.opened[2].has_graphs


def test_a_tree_is_compacted_once_at_every_run(load, open_engine, fake_ort):
    """The path moves rows that it reads, so running its graph several times would move them further."""
    ours, theirs = load(), open_engine()
    path = np.array([[0, 2, 3]])
    for engine in (ours, theirs):
        engine.run(feed(TOKENS[:9], 0))
        for length in (2, 2, 3, 3, 2):
            engine.compact(np.array([length]), path)
    assert set(fake_ort.opened[1].ids) == {NO_GRAPH} and not ours.rollback.plan.has_graphs
    for index in range(len(theirs.caches.names)):
        shape, theirs_view = ours.caches.shape(index, 3), theirs.caches.view(index)
        view = fake_ort.device.api.view(ours.caches.address(index, 0), shape, np.float32)
        np.testing.assert_array_equal(view[0, :, :9], theirs_view[0, :, :9])


def test_a_graph_that_cannot_be_captured_runs_without(load, fake_ort, for_cuda):
    fake_ort.refused.add(for_cuda["target"][0].parent)
    engine = load()
    assert [session.has_graphs for session in fake_ort.opened] == [False, False]
    assert not engine.plan.has_graphs and engine.plan.graph_fault == REFUSAL
    other = load("draft")
    assert other.plan.has_graphs and other.plan.graph_fault is None


def warm(engine, num_tokens=4):
    """Runs until the next one of these sizes captures."""
    engine.run(feed(TOKENS[:100], 0))
    engine.run(feed(TOKENS[100 : 100 + num_tokens], 100))


def test_a_capture_that_fails_is_run_again_without_graphs(load, open_engine, fake_ort):
    ours, theirs = load(), open_engine()
    for engine in (ours, theirs):
        warm(engine)
    fake_ort.faults[:] = ["CUDA failure 900: operation not permitted when stream is capturing"]
    same(ours.run(feed(TOKENS[100:104], 100)), theirs.run(feed(TOKENS[100:104], 100)))
    first, _, second = fake_ort.opened
    assert first.ids[-1] == 1 and second.ids == [NO_GRAPH] and not second.has_graphs
    assert fake_ort.were_gone == [True, False]  # otherwise the weights would be held twice
    assert not ours.plan.has_graphs and "failure 900" in ours.plan.graph_fault
    for length in (104, 104, 200, 200, 200):  # the view grows: 128 rows no longer suffice
        same(ours.run(feed(TOKENS[:4], length)), theirs.run(feed(TOKENS[:4], length)))
    assert set(second.ids) == {NO_GRAPH} and len(fake_ort.opened) == 3


def test_a_second_fault_is_the_error(load, fake_ort):
    engine = load()
    warm(engine)
    fake_ort.faults[:] = ["no capture", "out of memory"]
    with pytest.raises(RuntimeFault, match=r"engine target: got .*out of memory.*; expected a step that runs"):
        engine.run(feed(TOKENS[100:104], 100))
    assert "no capture" in engine.plan.graph_fault


def test_faults_of_other_runs_leave_the_graphs(load, fake_ort):
    """Of a run without a graph, and of a graph that was replayed before."""
    engine = load()
    fake_ort.faults[:] = ["first"]
    with pytest.raises(RuntimeFault, match="first"):
        engine.run(feed(TOKENS[:100], 0))
    warm(engine)
    for _ in range(2):
        engine.run(feed(TOKENS[100:104], 100))
    fake_ort.faults[:] = ["replayed"]
    with pytest.raises(RuntimeFault, match="replayed"):
        engine.run(feed(TOKENS[100:104], 100))
    assert engine.plan.has_graphs and engine.plan.graph_fault is None and len(fake_ort.opened) == 2


@pytest.mark.parametrize(("settings", "num_plain"), [({}, 4), ({"max_contexts": 3}, 4 + 6)])
def test_graphs_are_captured_once_while_views_change(load, open_engine, fake_ort, settings, num_plain):
    """Long and short prompts alternate: bindings are used again, some after they were evicted."""
    ours, theirs = load(**settings), open_engine()
    ids = fake_ort.opened[0].ids
    for turn in range(5):
        ids.clear()
        for num in (300, 70):
            for engine in (ours, theirs):
                engine.reset()
            for start in range(0, num, 100):
                chunk = feed(TOKENS[turn + start : turn + min(start + 100, num)], start)
                same(ours.run(chunk), theirs.run(chunk))
            for length, nodes in ((num, 1), (num, 2), (num, 4)) * 4:
                step = feed(TOKENS[turn : turn + nodes], length)
                same(ours.run(step), theirs.run(step))
        assert set(ids) == {NO_GRAPH, 1, 2, 3, 4, 5, 6}
        if turn:  # chunks of prompts; and an evicted context is made again at the second run
            assert ids.count(NO_GRAPH) == num_plain


def test_a_session_captures_so_many_graphs_and_no_more(load, open_engine, fake_ort, monkeypatch):
    monkeypatch.setattr(cuda_session, "MAX_GRAPHS", 3)
    ours, theirs = load(), open_engine()
    for engine in (ours, theirs):
        engine.run(feed(TOKENS[:20], 0))
    for nodes in (1, 2, 3, 4, 5) * 4:
        step = feed(TOKENS[:nodes], 20)
        same(ours.run(step), theirs.run(step))
    assert fake_ort.opened[0].ids[-5:] == [1, 2, 3, NO_GRAPH, NO_GRAPH]


@pytest.mark.parametrize("has_wheels", [True, False])
def test_libraries_are_looked_for_in_the_wheels(has_wheels, tmp_path, monkeypatch):
    """NVIDIA's package may lie in several folders, of which each has some of the libraries."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one / "cu13/lib", one / "cudnn/lib", other / "cu13/lib") if has_wheels else ():
        folder.mkdir(parents=True)
    found, calls = SimpleNamespace(submodule_search_locations=[str(one), str(other)]), []
    monkeypatch.setattr(cuda_session, "find_spec", {"nvidia": found}.get)
    monkeypatch.setattr(cuda_session.ort, "preload_dlls", lambda **given: calls.append(given), raising=False)
    cuda_session._preload_libraries()
    cuda, cudnn = {"cuda": True, "cudnn": False}, {"cuda": False, "cudnn": True}
    if has_wheels:
        calls_of_cuda = [{**cuda, "directory": f"{f}/cu13/lib"} for f in (one, other)]
        assert calls == [*calls_of_cuda, {**cudnn, "directory": f"{one}/cudnn/lib"}]
    else:
        assert calls == [{**cuda, "directory": None}, {**cudnn, "directory": None}]


def test_the_session_is_asked_for_exact_float32():
    [(name, options), last] = cuda_session._providers(Device(FakeCuda()), True)
    assert (name, last) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    exact = {"device_id": "0", "use_tf32": "0", "enable_cuda_graph": "1"}
    assert options == {**exact, "arena_extend_strategy": "kSameAsRequested"}


@pytest.mark.parametrize("heat", [0.0, 0.4])
def test_the_whole_loop_gives_the_cpu_engines_tokens(load, open_engine, heat):
    context = MethodContext(3, 120, 7)
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1] * 30, [8], [9, 9, 3]]
    params = [SamplingParams(max_new_tokens=14, temperature=heat, seed=i) for i in range(4)]
    tokens = []
    for target, draft in ((load(), load("draft")), (open_engine(), open_engine(role="draft"))):
        engines = target, {"draft": draft}
        proposer = DraftModelMethod().make_proposer(DraftModelConfig("d", num_draft_tokens=3), engines[1], context)
        engine = SpecEngine(*engines, proposer, None, context, chunk=50)
        results = [engine.generate(prompts, params, batch_size=n) for n in (1, 3)]
        assert sum(r.stats["num_accepted"] for r in results[1]) > 20  # the draft is the target
        tokens.append([[r.tokens for r in result] for result in results])
    assert tokens[0] == tokens[1]


def test_rows_move_with_the_view(cuda, load):
    device = Device(cuda)
    spec = load().spec
    caches = GrowingCaches(device, spec, 3, 700)
    device.synchronize()
    view = cuda.view(caches.address(spec.caches.index("k_cache.0"), 0), caches.shape(0, 3), np.float32)
    view[...] = np.random.default_rng(0).standard_normal(view.shape)
    before, address = view.copy(), view.ctypes.data
    for rows, kept in ((300, 128), (700, 128), (10, 128)):
        assert caches.resize(rows)
        view = cuda.view(address, caches.shape(0, 3), np.float32)
        np.testing.assert_array_equal(view[:, :, :kept], before[:, :, :kept])
    assert not caches.resize(100) and caches.rows == 128
    caches.move_slot(2, 0)
    device.synchronize()
    wanted = before[[2, 1, 2]]
    np.testing.assert_array_equal(cuda.view(address, caches.shape(0, 3), np.float32), wanted)


def test_nan_in_a_slot_is_cleared_and_does_not_spread_where_the_view_grows(cuda, load):
    device = Device(cuda)
    spec = load().spec
    caches = GrowingCaches(device, spec, 3, 700)
    device.synchronize()
    address = caches.address(0, 0)
    view = cuda.view(address, caches.shape(0, 3), np.float32)
    view[...] = np.random.default_rng(0).standard_normal(view.shape)
    view[1, :, 20:] = np.nan
    assert caches.resize(300)
    grown = cuda.view(address, caches.shape(0, 3), np.float32)
    assert np.isfinite(grown[[0, 2]]).all() and not grown[:, :, 128:].any()
    before = grown.copy()
    caches.clear_slot(1)
    device.synchronize()
    assert not grown[1].any()
    np.testing.assert_array_equal(grown[[0, 2]], before[[0, 2]])


def test_some_rows_are_copied_and_exchanged_on_the_device(cuda, load):
    device = Device(cuda)
    spec = load().spec
    caches = GrowingCaches(device, spec, 3, 700)
    device.synchronize()
    view = cuda.view(caches.address(0, 0), caches.shape(0, 3), np.float32)
    view[...] = np.random.default_rng(0).standard_normal(view.shape)
    wanted = view.copy()
    caches.move_slot(2, 0, 50)
    wanted[0, :, :50] = wanted[2, :, :50]
    caches.swap_slots(1, 2, 70)
    wanted[[1, 2], :, :70] = wanted[[2, 1], :, :70]
    caches.swap_slots(0, 1, caches.rows)
    wanted[[0, 1]] = wanted[[1, 0]]
    caches.move_slot(0, 2, 0)
    device.synchronize()
    np.testing.assert_array_equal(view, wanted)


def test_too_many_rows_or_slots_and_trees_without_a_graph_are_refused(load):
    engine = load(max_slots=2, max_rows=32)
    with pytest.raises(RuntimeFault, match=r"33 cache rows.*at most 32.*engine\.max_seq_len"):
        engine.run(feed(TOKENS[:4], 29))
    with pytest.raises(RuntimeFault, match=r"slots.*engine\.max_batch_size"):
        engine.run({specs.TOKENS: TOKENS[:6].reshape(3, 2), specs.LENGTHS: np.zeros(3, np.int64)})
    engine.rollback = None
    with pytest.raises(RuntimeFault, match="a tree to roll back"):
        engine.compact(np.zeros(1, np.int64), np.zeros((1, 2), np.int64))


def test_a_wheel_without_cuda_is_named(monkeypatch, for_cuda):
    device = Device(FakeCuda())
    monkeypatch.setattr(cuda_engine, "open_device", lambda ordinal: device)
    graph, spec, _ = for_cuda["target"]
    if "CUDAExecutionProvider" in cuda_session.ort.get_available_providers():
        pytest.skip("this wheel has CUDA")
    with pytest.raises(BundleError, match=r"CUDAExecutionProvider.*onnxruntime-gpu"):
        load_cuda_engine(LoadJob(graph, spec, max_rows=64))


def test_the_backend_of_a_device_is_chosen_by_name():
    assert isinstance(registry.backend("onnxruntime", "cuda"), OrtCudaBackend)
    assert type(registry.backend("onnxruntime", "cpu")) is type(registry.backend("onnxruntime"))
    assert registry.backend("reference", "cuda").name == "reference"
    with pytest.raises(RecipeError, match=r"int8/rowq8.*engine\.device: cuda"):
        OrtCudaBackend().compile(CompileJob(None, None, None, quantization="int8", form="rowq8"))
