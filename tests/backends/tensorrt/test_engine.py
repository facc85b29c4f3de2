# SPDX-License-Identifier: Apache-2.0
"""TrtEngine over the fakes gives what ONNX Runtime gives, bit for bit: binding, aliasing, buckets, slots, graphs."""

import gc
import math

import numpy as np
import pytest

from speccompile.backends.base import LoadJob
from speccompile.backends.cuda.arrays import DeviceArray
from speccompile.backends.cuda.device import Device
from speccompile.backends.cuda.kv_caches import rollback_spec_of
from speccompile.backends.tensorrt.engine import load_engine
from speccompile.backends.tensorrt.loading import Plan
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core import specs
from speccompile.errors import BundleError, RuntimeFault
from speccompile.graph_kinds.decoder import candidate_spec
from tests.backends.tensorrt.trt_lab import Lab, profiles_of

pytestmark = pytest.mark.plan

TOKENS = np.random.default_rng(7).integers(0, 97, 400)


def feed(tokens, length, **more):
    return {specs.TOKENS: np.atleast_2d(tokens), specs.LENGTHS: np.array([length]), **more}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(np.asarray(ours[name]), value, err_msg=name)


@pytest.mark.parametrize("variant", ["tensorrt", "tensorrt_rtx"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_long_run_equals_onnxruntime_step_by_step(monkeypatch, tmp_path, target, open_engine, variant, graphs):
    """Chunks, single tokens, chains, trees with compaction, sampled steps, two slots, across several buckets."""
    lab = Lab(monkeypatch, tmp_path, variant)
    ours, theirs = lab.load(target, cuda_graphs=graphs), open_engine()
    rng = np.random.default_rng(1)
    lengths = np.zeros(3, np.int64)
    for slot, num in enumerate((100, 3, 250)):
        for start in range(0, num, 90):
            chunk = TOKENS[start : min(start + 90, num)]
            more = {specs.SCORED_NODES: np.zeros((1, 1), np.int64)}
            outputs = [e.run(feed(chunk, start, **more), first_slot=slot) for e in (ours, theirs)]
            same(*outputs)
        lengths[slot] = num
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    for step in range(24):
        nodes = (1, 4, 1, 4, 4, 2)[step % 6]
        feeds = {specs.TOKENS: rng.integers(0, 97, (3, nodes)), specs.LENGTHS: lengths}
        if step % 6 in (3, 4):
            feeds[specs.TREE_MASK] = np.broadcast_to(mask, (3, 4, 4))
            feeds[specs.PARENTS] = np.array([[-1, 0, 0, 2]] * 3)
        if step % 4 == 1:
            feeds[specs.TEMPERATURE] = np.array([0.7, 0, 1.2], np.float32)
            feeds[specs.UNIFORMS] = rng.random((3, nodes, 2), np.float32)
        if step % 8 == 5:
            dists = rng.random((3, nodes, 97), np.float32)
            feeds[specs.DRAFT_PROBS] = dists / dists.sum(-1, keepdims=True)
        same(ours.run(feeds), theirs.run(feeds))
        if step % 6 in (3, 4):
            path = np.array([[0, 2, 3, -1], [0, 1, -1, -1], [0, 2, -1, -1]])
            for engine in (ours, theirs):
                engine.compact(lengths, path)
            lengths = lengths + (path >= 0).sum(1)
        else:
            lengths = lengths + nodes
        if step == 11:
            for engine in (ours, theirs):
                engine.move_slot(2, 0, int(lengths[2]))
                engine.swap_slots(1, 2, int(lengths.max()))
            lengths = lengths[[2, 2, 1]]
    strategy = getattr(ours.plan.engine.config, "cuda_graph_strategy", None)
    if variant == "tensorrt":
        assert (lab.cuda.num_launches > 3) == (ours.runner.num_graphs > 0) == graphs and strategy is None
    else:
        assert lab.cuda.num_launches == 0 and (strategy.name == "WHOLE_GRAPH_CAPTURE") == graphs
        assert ours.rollback.plan.engine.config.cuda_graph_strategy.name == "DISABLED"  # TensorRT might run it twice


def test_a_step_is_one_copy_in_and_one_small_copy_out(lab, target):
    engine = lab.load(target)
    engine.run(feed(TOKENS[:40], 0))
    for step in range(6):
        lab.cuda.copies.clear()
        out = engine.run(feed(TOKENS[step : step + 4], 40))
        assert [way for way, _ in lab.cuda.copies] == ["in", "out"]
        assert dict(lab.cuda.copies)["out"] <= 3 * 256
        assert isinstance(out[specs.LOGITS], DeviceArray) and isinstance(out[specs.PATH], np.ndarray)
    assert lab.cuda.num_launches == 4  # the first is bound anew, the second warms up a context of its own


def test_graphs_are_kept_by_shape_and_bucket_and_given_up_where_capture_fails(
    lab, target, open_engine, monkeypatch, caplog
):
    monkeypatch.setattr(Plan, "idle_runs", 0)
    ours, theirs = lab.load(target, max_contexts=2), open_engine()
    for engine in (ours, theirs):
        engine.run(feed(TOKENS[:120], 0))
    for length in range(120, 140):  # one bucket of rows ends at 128
        same(ours.run(feed(TOKENS[length], length)), theirs.run(feed(TOKENS[length], length)))
    assert lab.cuda.num_launches == (8 - 2) + (12 - 2)
    for nodes in (2, 3, 4, 2, 3, 4, 2, 3, 4, 1, 1, 1):  # more shapes than contexts
        step = feed(TOKENS[:nodes], 140)
        same(ours.run(step), theirs.run(step))
    lab.cuda.can_capture = False
    for _ in range(5):
        same(ours.run(feed(TOKENS[:6], 140)), theirs.run(feed(TOKENS[:6], 140)))
    assert "cudaErrorStreamCaptureUnsupported" in ours.graph_fault and not ours.runner.uses_graphs
    assert "run without CUDA graphs from now on: " in caplog.text and theirs.graph_fault is None


@pytest.mark.parametrize("variant", ["tensorrt", "tensorrt_rtx"])
def test_contexts_are_not_made_for_shapes_that_take_turns(tmp_path, target, open_engine, monkeypatch, variant):
    """Two contexts, four shapes: the first two keep them until they were unused for a while."""
    lab = Lab(monkeypatch, tmp_path, variant)
    monkeypatch.setattr(Plan, "idle_runs", 6)
    ours, theirs = lab.load(target, max_contexts=2), open_engine()
    for engine in (ours, theirs):
        engine.run(feed(TOKENS[:10], 0))  # later steps need no larger regions
    for _ in range(10):
        for nodes in (1, 2, 3, 4):
            same(ours.run(feed(TOKENS[:nodes], 10)), theirs.run(feed(TOKENS[:nodes], 10)))
    num_made = len(lab.trt.contexts)
    assert {step.nodes for step in ours.runner._owners} == {1, 2}
    assert lab.cuda.num_launches == (2 * (10 - 2) if variant == "tensorrt" else 0)
    for _ in range(10):
        for nodes in (1, 4):  # 2 is not used any more
            same(ours.run(feed(TOKENS[:nodes], 10)), theirs.run(feed(TOKENS[:nodes], 10)))
    assert {step.nodes for step in ours.runner._owners} == {1, 4}
    assert len(lab.trt.contexts) == num_made + 1


def test_prompt_chunks_have_no_context_of_their_own(lab, target):
    engine = lab.load(target)
    for _ in range(4):
        engine.run(feed(TOKENS[:100], 0))
    assert lab.cuda.num_launches == 0 and len(lab.trt.contexts) == 1


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("variant", ["tensorrt", "tensorrt_rtx"])
def test_a_dropped_engine_frees_its_memory_at_once(monkeypatch, tmp_path, target, no_gc, variant):
    """Graphs, contexts, regions that grew, a tree: what is loaded next needs the room."""
    lab = Lab(monkeypatch, tmp_path, variant)
    engine = lab.load(target)
    for nodes in (1, 1, 1, 4, 4, 4, 100):
        engine.run(feed(TOKENS[:nodes], 0))
    engine.compact(np.array([3]), np.array([[0, 2, -1]]))
    assert lab.cuda.device and lab.cuda.pinned
    lab.trt.contexts.clear()
    del engine
    assert not lab.cuda.device and not lab.cuda.pinned


def test_results_outlive_the_buffer_and_the_engine_that_made_them(lab, target, no_gc):
    engine = lab.load(target)
    path = engine.run(feed(TOKENS[:2], 0))[specs.PATH]
    engine.run(feed(TOKENS[:120], 2))  # more than the buffer of the first holds
    assert lab.cuda.place_of(path.ctypes.data, path.nbytes) == "pinned" and len(lab.cuda.pinned) == 5
    lab.trt.contexts.clear()
    del engine
    assert lab.cuda.place_of(path.ctypes.data, path.nbytes) == "pinned" and len(lab.cuda.pinned) == 1
    assert path[0, 0] == 0
    del path
    assert not lab.cuda.pinned


def test_a_target_that_compacts_in_its_step_needs_no_second_one(lab, target, open_engine):
    """The path that its own verification accepts is what KVRollback moves; the verifier does not ask again."""
    ours, theirs = lab.load(target, compacts=True), open_engine()
    assert ours.compacts_in_step and not lab.load(target).compacts_in_step
    for engine in (ours, theirs):
        engine.run(feed(TOKENS[:30], 0))
    wanted = theirs.run(feed(TOKENS[30], 30))[specs.NEXT_TOKEN][0]
    tree = feed(
        [TOKENS[30], (wanted + 1) % 97, wanted],
        30,
        tree_mask=np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool),
        parents=np.array([[-1, 0, 0]]),
    )
    got, known = ours.run(tree), theirs.run(tree)
    same(got, known)
    assert known[specs.PATH].tolist() == [[0, 2, -1]]
    theirs.compact(np.array([30]), known[specs.PATH])
    same(ours.run(feed(TOKENS[50:52], 32)), theirs.run(feed(TOKENS[50:52], 32)))


def test_a_device_array_is_fed_without_a_copy_and_opened_on_demand(lab, target, open_engine):
    ours, theirs = lab.load(target), open_engine()
    dist = lab.load(target, slots=1)
    for engine in (ours, theirs):
        engine.run(feed(TOKENS[:9], 0))
    dist.run(feed(TOKENS[:9], 0))
    dists = dist.run(feed(TOKENS[9:13], 9))[specs.LOGITS]
    assert (dists.shape, dists.dtype, dists.ndim, len(dists), dists.nbytes) == ((1, 4, 97), "float32", 3, 1, 1552)
    host = np.asarray(dists)
    np.testing.assert_array_equal(dists[0, 1], host[0, 1])
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(dists, copy=False)
    sampled = {specs.TEMPERATURE: np.ones(1, np.float32), specs.UNIFORMS: np.full((1, 4, 2), 0.4, np.float32)}
    for _ in range(4):
        lab.cuda.copies.clear()
        got = ours.run(feed(TOKENS[9:13], 9, draft_probs=dists, **sampled))
        assert max(size for way, size in lab.cuda.copies if way == "in") < 256 * 10
        same(got, theirs.run(feed(TOKENS[9:13], 9, draft_probs=host, **sampled)))
    own = np.asarray(got[specs.LOGITS])
    again = ours.run(feed(TOKENS[9:13], 9, draft_probs=got[specs.LOGITS], **sampled))  # its own output as input
    same(again, theirs.run(feed(TOKENS[9:13], 9, draft_probs=own, **sampled)))


@pytest.mark.parametrize(("dtype", "error"), [("float16", 0.05), ("bfloat16", 0.5)])
def test_half_caches_are_bound_as_they_are(lab, target, open_engine, dtype, error):
    ours, theirs = lab.load(target, dtype=dtype), open_engine()
    assert ours.num_bytes == 4 * 3 * 2 * 1024 * 16 * 2
    for engine in (ours, theirs):
        engine.run(feed(TOKENS[:30], 0), first_slot=2)
    got, wanted = (e.run(feed(TOKENS[30:34], 30), first_slot=2)[specs.LOGITS] for e in (ours, theirs))
    difference = np.abs(np.asarray(got) - wanted).max()
    assert 0 < difference < error


def test_kernels_of_a_shape_are_compiled_before_its_first_step(monkeypatch, tmp_path, target):
    engine = Lab(monkeypatch, tmp_path, "tensorrt_rtx").load(target)
    for plan in (engine.plan, engine.rollback.plan):
        assert plan.engine.config.dynamic_shapes_kernel_specialization_strategy.name == "EAGER"


def test_a_plan_that_has_no_room_is_not_to_be_built_again(lab, target):
    _, spec, _ = target
    spec = tensorrt_spec(spec, "float32", 64)
    (lab.folder / "huge.plan").write_bytes(b"huge")
    with pytest.raises(RuntimeFault, match=r"a plan without room: error: .*OutOfMemory.*Lower engine\.max_batch_size"):
        load_engine(LoadJob(lab.folder / "huge.plan", spec, max_rows=64))


def test_swaps_of_slots_allocate_once(lab, target):
    engine = lab.load(target, rows=64)
    engine.run(feed(TOKENS[:30], 0))
    engine.run(feed(TOKENS[5:25], 0), first_slot=1)
    engine.swap_slots(0, 1, 30)
    held = dict(lab.cuda.device)
    for _ in range(3):
        engine.swap_slots(1, 0, 30)
    assert lab.cuda.device.keys() == held.keys()


def test_kernels_compiled_at_load_are_kept(monkeypatch, tmp_path, target):
    lab = Lab(monkeypatch, tmp_path, "tensorrt_rtx")
    for _ in range(2):
        engine = lab.load(target)
        held = engine.plan.engine.config.cache.held
        del engine
    assert held == b"kernels"
    assert lab.load(target, runtime_cache=False).plan.engine.config.cache is None
    properties = lab.device.properties()
    monkeypatch.setattr(lab.device, "properties", lambda: {**properties, "name": "Other GPU"})
    assert lab.load(target).plan.engine.config.cache.held == b""  # the others stay


def test_weights_stream_where_the_plan_was_built_for_it(lab, target):
    graph, spec, rollback = target
    spec = tensorrt_spec(spec, "float32", 64)
    cache_bytes = sum(4 * math.prod(spec.input(name).dims[1:]) for name in spec.caches)  # of one slot
    plan = lab.plan(graph, spec, profiles_of(64), streamable_bytes=2 * cache_bytes + 1000)
    rollback = lab.plan(rollback, rollback_spec_of(spec), profiles_of(64))
    engine = load_engine(LoadJob(plan, spec, max_rows=64, rollback=rollback))
    assert engine.plan.engine.weight_streaming_budget_v2 == 500  # half of the weights, but for the caches' room
    other = load_engine(LoadJob(plan, spec, max_rows=64, tuning={"others_bytes": 120}))
    assert other.plan.engine.weight_streaming_budget_v2 == 380  # and that of plans which are loaded later
    assert engine.caches.num_bytes == cache_bytes
    assert engine.rollback.plan.engine.weight_streaming_budget_v2 == 0  # it has no weights
    engine.run(feed(TOKENS[:3], 0))
    engine = load_engine(LoadJob(plan, spec, max_slots=2, max_rows=64))
    assert engine.plan.engine.weight_streaming_budget_v2 == 0
    lab.cuda.capacity_bytes = 4 << 30  # all has room: streaming would only take time
    engine = load_engine(LoadJob(plan, spec, max_slots=2, max_rows=64))
    assert engine.plan.engine.weight_streaming_budget_v2 == engine.plan.engine.streamable_weights_size


def test_too_many_rows_or_slots_are_refused(lab, target):
    engine = lab.load(target, rows=64, slots=2, max_rows=32)
    with pytest.raises(RuntimeFault, match=r"33 cache rows.*at most 32.*engine\.max_seq_len"):
        engine.run(feed(TOKENS[:4], 29))
    with pytest.raises(RuntimeFault, match=r"slots 0 to 2.*slots below 2.*engine\.max_batch_size"):
        engine.run({specs.TOKENS: TOKENS[:6].reshape(3, 2), specs.LENGTHS: np.zeros(3, np.int64)})


@pytest.mark.parametrize("slots", [4, 256])
def test_steps_run_on_their_own_profile_whatever_the_number_of_slots(lab, target, slots):
    graph, spec, _ = target
    spec = tensorrt_spec(spec, "float32", 64)
    engine = load_engine(LoadJob(lab.plan(graph, spec, profiles_of(64, slots)), spec, max_rows=64))
    for nodes, index in ((1, 1), (16, 1), (17, 0)):
        engine.run(feed(TOKENS[:nodes], 0))
        assert engine.runner.last_step.profile.index == index


def test_plans_are_loaded_on_the_device_that_was_asked_for(monkeypatch, tmp_path, target):
    lab = Lab(monkeypatch, tmp_path, num_devices=2)
    Device(lab.cuda, 1)
    assert lab.cuda.current == 1
    lab.load(target)
    assert lab.trt.devices == [0, 0]


def test_shapes_outside_all_profiles_are_named(lab, target):
    engine = lab.load(target)
    with pytest.raises(RuntimeFault, match=r"tokens \[1, 129\] \(profile 0 takes \[1, 1\] to \[1, 128\]\); tokens"):
        engine.run(feed(TOKENS[:129], 0))


def test_a_tree_without_a_rollback_plan_is_refused(lab, target):
    engine = lab.load(target)
    engine.rollback = None
    with pytest.raises(RuntimeFault, match=r"a tree to roll back.*Build the bundle again"):
        engine.compact(np.zeros(1, np.int64), np.zeros((1, 2), np.int64))


def test_a_plan_that_is_not_that_of_the_spec_is_refused(lab, target):
    graph, spec, _ = target
    right = tensorrt_spec(spec, "float32", 64)

    def load(told, **more):
        plan = lab.plan(graph, right, profiles_of(64), told=told.json_from_spec(), **more)
        return load_engine(LoadJob(plan, right, max_rows=64))

    with pytest.raises(BundleError, match=r"tensors \['candidate_probs', 'candidates', 'logits', 'node_probs'\]"):
        load(candidate_spec(right, 1, dists=True))
    with pytest.raises(BundleError, match=r"k_cache\.0\): got float16\[-1, 2, 64, 16\]; expected float32"):
        load(tensorrt_spec(spec, "float16", 64))
    with pytest.raises(BundleError, match=r"k_cache\.0\): got float32\[-1, 2, 72, 16\]; expected float32"):
        load(tensorrt_spec(spec, "float32", 72))
    with pytest.raises(BundleError, match=r"caches of 64 rows; expected at least 65.*engine\.max_draft_nodes"):
        load_engine(LoadJob(lab.plan(graph, right), right, max_rows=65))
    (lab.folder / "garbage.plan").write_bytes(b"garbage")
    with pytest.raises(BundleError, match=r"cannot be loaded: error: the magic tag does not match"):
        load_engine(LoadJob(lab.folder / "garbage.plan", right, max_rows=64))


def test_an_invalid_plan_is_refused_before_it_is_deserialised(monkeypatch, tmp_path, target):
    lab = Lab(monkeypatch, tmp_path, "tensorrt_rtx")
    graph, spec, _ = target
    spec = tensorrt_spec(spec, "float32", 64)
    plan = lab.plan(graph, spec, validity="INVALID")
    with pytest.raises(BundleError, match="an invalid plan: UNSUPPORTED_CC"):
        load_engine(LoadJob(plan, spec, max_rows=64))
    assert lab.trt.deserialized == []


def test_slots_that_cannot_be_aligned_are_refused(lab, compiled):
    with pytest.raises(BundleError, match=r"4224 bytes a slot.*multiple of 256.*divisible by 8"):
        lab.load(compiled("onnxruntime", "none", "fp32", "target"), rows=33)


def test_too_little_memory_names_what_to_lower(monkeypatch, tmp_path, target):
    with pytest.raises(RuntimeFault, match=r"cudaMalloc: got cudaErrorMemoryAllocation.*Lower engine\.max_batch_size"):
        Lab(monkeypatch, tmp_path, capacity_bytes=1 << 18).load(target)
