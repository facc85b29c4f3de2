# SPDX-License-Identifier: Apache-2.0
"""Caches shared between engines: the owner's own memory, slot for slot, whatever either engine does to it.

One borrower shares all caches of the target and writes them; the other, a GLIDE drafter, reads the last layer's.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.backends.onnxruntime.cuda_engine import load_cuda_engine
from speccompile.backends.tensorrt import engine as trt_engine
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core import registry, specs
from speccompile.core.jobs import CandidateOptions, CompileOptions, GraphJob, SourceContext
from speccompile.core.specs import BorrowedCache, spec_from_json
from speccompile.errors import BundleError
from speccompile.graph_kinds.borrowed import sharing_spec
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from speccompile.graph_kinds.int8_caches import with_int8_caches
from speccompile.speculators.glide.checkpoint import GlideSource
from tests import store
from tests.backends.fake_ort import FakeOrt
from tests.backends.tensorrt.fake_cuda import FakeCuda
from tests.backends.tensorrt.trt_lab import Lab, profiles_of

ROWS, SLOTS = 512, 3
pytestmark = [pytest.mark.usefixtures("cheap_measurements"), pytest.mark.export]
KINDS = ("reference", "onnxruntime", "cuda", "tensorrt", "reference-int8", "onnxruntime-int8")
DRAFTER = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 16,
    "num_attention_heads": 2, "vocab_size": 97, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
TOKENS = np.random.default_rng(7).integers(0, 97, 400)


@pytest.fixture(scope="module")
def graphs(neutral, tmp_path_factory):
    """By name: (neutral graph, neutral spec)."""
    model, dims = neutral
    folder = tmp_path_factory.mktemp("drafter")
    (folder / "config.json").write_text(json.dumps(DRAFTER))
    job = GraphJob("reader", str(folder), options=CandidateOptions(3, gives_probs=False))
    source = GlideSource(job, SourceContext("random", ROWS - 17, 16, dims))
    sharer = candidate_spec(sharing_spec(decoder_spec("sharer", dims), range(dims.num_layers)), 3, False)
    return {
        "target": (model, verified_spec(decoder_spec("target", dims))),
        "sharer": (model, sharer),
        "reader": (store.export(source)[0], source.spec()),
    }


@pytest.fixture(scope="module")
def files(graphs, tmp_path_factory):
    """(backend, graph) -> file."""
    made = {}

    def find(kind, name):
        backend = "onnxruntime" if kind == "tensorrt" else kind
        if (backend, name) not in made:
            folder = tmp_path_factory.mktemp(f"{backend}-{name}")
            base, _, kv_cache = backend.partition("-")
            maker = registry.backend("onnxruntime", "cuda") if backend == "cuda" else registry.backend(base)
            maker.compile(CompileJob(*graphs[name], folder, options=CompileOptions(kv_cache=kv_cache or "auto")))
            made[backend, name] = folder / "graph.onnx"
        return made[backend, name]

    return find


@pytest.fixture
def open_graph(graphs, files, monkeypatch, tmp_path):
    """(kind, graph, owners) -> engine; the GPU is a fake one."""
    lab = Lab(monkeypatch, tmp_path)
    FakeOrt(monkeypatch, FakeCuda())

    def make(kind, name, owners=None, slots=SLOTS, rows=ROWS):
        file, spec = files(kind, name), graphs[name][1]
        sizes = {"max_slots": slots, "max_rows": rows, "owners": owners or {}}
        if kind == "cuda":
            return load_cuda_engine(LoadJob(file, spec, **sizes))
        if kind == "tensorrt":
            spec = tensorrt_spec(spec, "float32", rows)
            plan = lab.plan(file, spec, profiles_of(rows))
            return trt_engine.load_engine(LoadJob(plan, spec, **sizes))
        spec = with_int8_caches(spec) if kind.endswith("int8") else spec
        return registry.backend(kind.partition("-")[0]).load(LoadJob(file, spec, **sizes, tuning={"threads": 1}))

    return make


def feed(tokens, lengths, **more):
    return {specs.TOKENS: np.atleast_2d(tokens), specs.LENGTHS: np.atleast_1d(lengths), **more}


def first_candidate(outputs):
    """Returns the likeliest token after the last node of each slot."""
    return np.asarray(outputs[specs.CANDIDATES])[:, -1, 0].tolist()


def read(engine, tokens, start, slot=0):
    """Feeds as for a prompt: one node is scored."""
    engine.run(feed(tokens, start, scored_nodes=np.zeros((1, 1), np.int64)), first_slot=slot)


def next_token(engine, tokens, length, slot=0):
    last = np.array([[len(tokens) - 1]])
    return int(engine.run(feed(tokens, length, scored_nodes=last), first_slot=slot)[specs.NEXT_TOKEN][0])


def addresses(kind, engine, names):
    """Returns the address of slot 1 of each of these inputs."""
    if kind.startswith("reference"):
        return [engine.bound[name][1].ctypes.data for name in names]
    if kind.startswith("onnxruntime"):
        by_name = {cache.name: cache for cache in engine.bound}
        return [by_name[name].view(1, 1).ctypes.data for name in names]
    found = engine.runner.bound[0].addresses(1, frozenset(names))
    return [found[name] for name in names]


@pytest.mark.parametrize("kind", KINDS)
def test_borrowed_caches_are_the_owners_own_memory(kind, open_graph):
    target = open_graph(kind, "target")
    for name in ("sharer", "reader"):
        borrower = open_graph(kind, name, {"target": target})
        cache_refs = borrower.spec.borrowed
        ours, theirs = [cache_ref.name for cache_ref in cache_refs], [cache_ref.cache for cache_ref in cache_refs]
        assert addresses(kind, borrower, ours) == addresses(kind, target, theirs)
    caches = ["k_cache.1", "k_cache.1.scale", "v_cache.1", "v_cache.1.scale"]
    assert [cache_ref.cache for cache_ref in cache_refs] == (caches if kind.endswith("int8") else caches[::2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharer_sees_what_the_target_reads_through_growth_moves_and_resets(kind, open_graph):
    """The sharer is a second copy of the target: it predicts the target's next token where it sees the same rows."""
    target, oracle = open_graph(kind, "target"), open_graph(kind, "target")
    sharer = open_graph(kind, "sharer", {"target": target})
    for slot, num in ((0, 90), (1, 5)):
        read(target, TOKENS[:num], 0, slot)
        read(oracle, TOKENS[:num], 0, slot)
    assert first_candidate(sharer.run(feed(TOKENS[5:6], 5), first_slot=1)) == [next_token(oracle, TOKENS[5:6], 5, 1)]
    # Beyond row 128 the view has to grow: here the borrower grows first, and the owner follows.
    chain = sharer.run(feed(TOKENS[90:140], 90))
    assert first_candidate(chain) == [next_token(oracle, TOKENS[90:140], 90)]
    assert next_token(target, TOKENS[140:142], 140) == next_token(oracle, TOKENS[140:142], 140)
    assert next_token(target, TOKENS[6:8], 6, 1) == next_token(oracle, TOKENS[6:8], 6, 1)
    # Then the owner grows, and the borrower follows.
    read(target, TOKENS[142:260], 142)
    read(oracle, TOKENS[142:260], 142)
    assert first_candidate(sharer.run(feed(TOKENS[260:262], 260))) == [next_token(oracle, TOKENS[260:262], 260)]
    for engine in (target, oracle):
        engine.move_slot(0, 2)
    sharer.move_slot(0, 1)  # nothing of its own to move
    assert first_candidate(sharer.run(feed(TOKENS[262:263], 262), first_slot=2)) == [
        next_token(oracle, TOKENS[262:263], 262, 2)
    ]
    assert next_token(target, TOKENS[8:9], 8, 1) == next_token(oracle, TOKENS[8:9], 8, 1)
    for engine in (target, sharer, oracle):
        engine.reset(4)
    read(target, TOKENS[:9], 0)
    assert first_candidate(sharer.run(feed(TOKENS[9:10], 9))) == [next_token(target, TOKENS[9:10], 9)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_sharer_writes_the_target_overwrites(kind, open_graph):
    target, oracle = open_graph(kind, "target"), open_graph(kind, "target")
    sharer = open_graph(kind, "sharer", {"target": target})
    for engine in (target, oracle):
        read(engine, TOKENS[:20], 0)
    sharer.run(feed(TOKENS[50:58], 20))
    got = target.run(feed(TOKENS[20:25], 20))
    want = oracle.run(feed(TOKENS[20:25], 20))
    for name in (specs.PATH, specs.NEXT_TOKEN):
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(want[name]))
    # Without overwriting it would change the result, as the caches are the same memory.
    sharer.run(feed(TOKENS[60:64], 21))
    assert next_token(target, TOKENS[25:26], 25) != next_token(oracle, TOKENS[25:26], 25) or not np.array_equal(
        TOKENS[60:64], TOKENS[21:25]
    )


def reader_run(engine, nodes, slots=SLOTS, lengths=0, target_length=12):
    tokens = TOKENS[: slots * nodes].reshape(slots, nodes)
    told = np.full(slots, target_length)
    outputs = engine.run(feed(tokens, np.full(slots, lengths), target_lengths=told))
    return np.array(outputs[specs.CANDIDATE_PROBS])


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_sees_every_write_and_move_of_the_target(kind, open_graph):
    """Its numbers change with the target's rows and are those of the reference engine."""
    pairs, tolerance = [], 2e-3 if kind.endswith("int8") else 2e-5  # the last bit of a number may change its level
    for name in (kind, "reference-int8" if kind.endswith("int8") else "reference"):
        target = open_graph(name, "target")
        pairs.append((target, open_graph(name, "reader", {"target": target})))
    seen = []

    def compare(**more):
        ours, theirs = (reader_run(reader, 14, **more) for _, reader in pairs)
        np.testing.assert_allclose(ours, theirs, atol=tolerance)
        seen.append(ours)

    for slot in range(SLOTS):
        for target, _ in pairs:
            read(target, TOKENS[30 * slot : 30 * slot + 12], 0, slot)
    compare()
    for target, _ in pairs:
        read(target, TOKENS[200:204], 4, 1)  # other rows 4 to 7 of slot 1
    compare()
    assert np.array_equal(seen[0][[0, 2]], seen[1][[0, 2]]) and not np.allclose(seen[0][1], seen[1][1])
    assert np.allclose(seen[0][1, :5], seen[1][1, :5])  # a node sees only the rows before it
    for target, _ in pairs:
        target.move_slot(2, 0)
    compare()
    assert not np.allclose(seen[1][0], seen[2][0])
    for target, _ in pairs:
        read(target, TOKENS[100:220], 12)  # the owner's view grows, the reader's own does not
    compare()
    for _, reader in pairs:  # and now the reader's own
        last = np.zeros((1, 1), np.int64)
        reader.run(feed(TOKENS[:120], 0, target_lengths=np.array([132]), scored_nodes=last))
    compare(slots=1, lengths=120, target_length=132)


def test_rows_beyond_the_targets_length_are_not_seen(open_graph):
    target = open_graph("onnxruntime", "target")
    reader = open_graph("onnxruntime", "reader", {"target": target})
    read(target, TOKENS[:40], 0)
    short = reader_run(reader, 20, 1, 0, 6)
    read(target, TOKENS[300:310], 6)
    assert np.array_equal(reader_run(reader, 20, 1, 0, 6), short)
    assert not np.allclose(reader_run(reader, 20, 1, 0, 12), short)


@pytest.mark.parametrize("kind", KINDS)
def test_a_borrower_runs_alone_for_checks_and_measurements(kind, open_graph):
    for name in ("sharer", "reader"):
        outputs = open_graph(kind, name).run(feed(TOKENS[:5], 0))
        assert np.isfinite(np.asarray(outputs[specs.CANDIDATE_PROBS])).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_ref_that_does_not_fit_is_refused(kind, open_graph, graphs, monkeypatch):
    target = open_graph(kind, "target", slots=2)
    with pytest.raises(BundleError, match=r"engine sharer \(k_cache\.0\): got 2 slots to borrow; expected at least 3"):
        open_graph(kind, "sharer", {"target": target})
    model, spec = graphs["reader"]
    wrong = tuple(BorrowedCache(cache_ref.name, "k_cache.9") for cache_ref in spec.borrowed)
    monkeypatch.setitem(graphs, "reader", (model, replace(spec, borrowed=wrong)))
    with pytest.raises(BundleError, match=r"got no cache 'k_cache\.9' of target; expected one of k_cache\.0"):
        open_graph(kind, "reader", {"target": target}, slots=2)


def test_static_rows_must_be_the_owners(open_graph):
    target = open_graph("tensorrt", "target", rows=256)
    with pytest.raises(BundleError, match="got float32 with 256 rows; expected float32 with 512 rows"):
        open_graph("tensorrt", "sharer", {"target": target})


def test_a_spec_writes_its_cache_refs_to_the_manifest(graphs):
    for name, own in (("sharer", ()), ("reader", ("k_cache.0", "v_cache.0"))):
        spec = graphs[name][1]
        assert spec_from_json(json.loads(json.dumps(spec.json_from_spec()))) == spec
        assert spec.own_caches == own
        assert {t.name for t in spec.plain_inputs}.isdisjoint(spec.cache_inputs)
    built = tensorrt_spec(graphs["reader"][1], "float16", 520)
    assert [built.input(n).dims[2] for n in built.cache_inputs] == [520] * 4
    assert {built.input(n).dtype for n in built.cache_inputs} == {"float16"}
