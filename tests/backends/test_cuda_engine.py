# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's CUDA engine with its memory in a fake device and its sessions on the CPU: the same numbers.

The device's memory is host memory here, so the bindings to device addresses can be given to the CPU provider.
"""

import numpy as np
import pytest

from speccompile.backends.onnxruntime import cuda_engine
from speccompile.backends.onnxruntime.cuda_backend import OrtCudaBackend
from speccompile.backends.onnxruntime.cuda_engine import GrowingCaches, SessionPlan, load_cuda_engine
from speccompile.backends.tensorrt.arrays import DeviceArray
from speccompile.backends.tensorrt.device import Device
from speccompile.core import registry, specs
from speccompile.core.devices import backend_on
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import decoder_spec, sampled_spec, verified_spec
from speccompile.errors import BundleError, RecipeError, RuntimeFault
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.runtime.stats import TimedEngine
from speccompile.speculators.draft_model.config import Config as DraftConfig
from speccompile.speculators.draft_model.method import DraftModelMethod
from tests.backends.tensorrt.fake_cuda import FakeCuda

TOKENS = np.random.default_rng(7).integers(0, 97, 400)


def feed(tokens, length, **more):
    return {specs.TOKENS: np.atleast_2d(tokens), specs.LENGTHS: np.array([length]), **more}


@pytest.fixture(scope="session")
def for_cuda(neutral, tmp_path_factory):
    """role -> (graph, spec, rollback graph) as `engine.device: cuda` lowers them."""
    model, dims = neutral
    made = {}
    backend = backend_on("onnxruntime", "cuda")
    for role in ("target", "draft"):
        decoder = decoder_spec(role, dims)
        spec = sampled_spec(decoder) if role == "draft" else verified_spec(decoder, keep_logits=True)
        folder = tmp_path_factory.mktemp(f"cuda-{role}")
        backend.compile(model, spec, folder)
        backend.compile_rollback(dims, folder / "rollback")
        made[role] = (folder / "graph.onnx", spec, folder / "rollback" / "graph.onnx")
    return made


@pytest.fixture
def cuda(monkeypatch):
    """A fake GPU whose sessions are the CPU provider's."""
    fake = FakeCuda()
    device = Device(fake)
    monkeypatch.setattr(cuda_engine, "open_device", lambda ordinal: device)
    monkeypatch.setattr(cuda_engine, "_providers", lambda device, has_graphs: ["CPUExecutionProvider"])
    monkeypatch.setattr(SessionPlan, "place", "cpu")
    return fake


@pytest.fixture
def load(cuda, for_cuda):
    def make(role="target", max_slots=3, max_rows=1024, **settings):
        graph, spec, rollback = for_cuda[role]
        sizes = {"max_slots": max_slots, "max_rows": max_rows}
        return load_cuda_engine(graph, spec, settings=settings, rollback=rollback, **sizes)

    return make


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(np.asarray(ours[name]), value, err_msg=name)


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


def test_only_kept_bindings_get_a_graph_of_their_own(load, monkeypatch):
    seen = []

    class Recorded(cuda_engine.SessionContext):
        def __init__(self, plan, graph_id):
            super().__init__(plan, graph_id)
            seen.append(graph_id)

    monkeypatch.setattr(cuda_engine, "SessionContext", Recorded)
    engine = load()
    engine.run(feed(TOKENS[:100], 0))
    for _ in range(3):
        engine.run(feed(TOKENS[:4], 100))
        engine.run(feed(TOKENS[:1], 100))
    assert seen == [cuda_engine.NO_GRAPH, 1, 2]
    seen.clear()
    plain = load(cuda_graphs=False)
    for _ in range(3):
        plain.run(feed(TOKENS[:4], 0))
    assert set(seen) == {cuda_engine.NO_GRAPH}


def test_a_graph_that_cannot_be_captured_runs_without(monkeypatch, load):
    monkeypatch.setattr(cuda_engine, "_providers", lambda device, has_graphs: [("CUDA", has_graphs)])
    asked = []

    def open_session(path, settings, providers):
        asked.append(providers)
        if len(asked) == 1:
            got = "This session cannot use the graph capture feature as requested by the user"
            raise BundleError(str(path), got, "a", "b")
        return real(path, settings, ["CPUExecutionProvider"])

    real = cuda_engine.open_session
    monkeypatch.setattr(cuda_engine, "open_session", open_session)
    engine = load()
    assert asked[:2] == [[("CUDA", True)], [("CUDA", False)]]
    assert not engine.plan.has_graphs and engine.rollback.plan.has_graphs


def test_the_session_is_asked_for_exact_float32():
    [(name, options), last] = cuda_engine._providers(Device(FakeCuda()), True)
    assert (name, last) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options == {"device_id": "0", "use_tf32": "0", "enable_cuda_graph": "1"}


@pytest.mark.parametrize("heat", [0.0, 0.4])
def test_the_whole_loop_gives_the_cpu_engines_tokens(load, open_engine, heat):
    context = MethodContext(3, 120, 7)
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1] * 30, [8], [9, 9, 3]]
    params = [SamplingParams(max_new_tokens=14, temperature=heat, seed=i) for i in range(4)]
    tokens = []
    for target, draft in ((load(), load("draft")), (open_engine(), open_engine(role="draft"))):
        engines = TimedEngine(target), {"draft": TimedEngine(draft)}
        proposer = DraftModelMethod().make_proposer(DraftConfig("d", num_draft_tokens=3), engines[1], context)
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
    view = cuda.view(caches.address(spec.caches.index("k_cache.0"), 0), (3, *caches.dims), np.float32)
    view[...] = np.random.default_rng(0).standard_normal(view.shape)
    before, address = view.copy(), view.ctypes.data
    for rows, kept in ((300, 128), (700, 128), (10, 128)):
        assert caches.resize(rows)
        view = cuda.view(address, (3, *caches.dims), np.float32)
        np.testing.assert_array_equal(view[:, :, :kept], before[:, :, :kept])
    assert not caches.resize(100) and caches.rows == 128
    caches.move_slot(2, 0)
    device.synchronize()
    wanted = before[[2, 1, 2]]
    np.testing.assert_array_equal(cuda.view(address, (3, *caches.dims), np.float32), wanted)


def test_some_rows_are_copied_and_exchanged_on_the_device(cuda, load):
    device = Device(cuda)
    spec = load().spec
    caches = GrowingCaches(device, spec, 3, 700)
    device.synchronize()
    view = cuda.view(caches.address(0, 0), (3, *caches.dims), np.float32)
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
    if "CUDAExecutionProvider" in cuda_engine.ort.get_available_providers():
        pytest.skip("this wheel has CUDA")
    with pytest.raises(BundleError, match=r"CUDAExecutionProvider.*onnxruntime-gpu"):
        load_cuda_engine(graph, spec, max_slots=1, max_rows=64, settings={})


def test_the_backend_of_a_device_is_chosen_by_name():
    assert isinstance(backend_on("onnxruntime", "cuda"), OrtCudaBackend)
    assert type(backend_on("onnxruntime", "cpu")) is type(registry.backend("onnxruntime"))
    assert backend_on("reference", "cuda").name == "reference"
    with pytest.raises(RecipeError, match=r"int8/rowq8.*engine\.device: cuda"):
        OrtCudaBackend().compile(None, None, None, quantization="int8", form="rowq8")
