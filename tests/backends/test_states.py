# SPDX-License-Identifier: Apache-2.0
"""Recurrent states of an engine: in the bits of a fresh prefill whatever is accepted, moved or begun again."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from speccompile.backends import measuring
from speccompile.backends.base import LoadJob
from speccompile.backends.onnxruntime.answers import texts_of
from speccompile.backends.onnxruntime.calibration import Collector
from speccompile.backends.onnxruntime.engine import OrtEngine, StateOrtEngine, open_session
from speccompile.backends.writing import save_rollback
from speccompile.checkpoints.texts import TextSample
from speccompile.core.dims import LayerDims, ModelDims
from speccompile.core.specs import LOGITS, probe_inputs
from speccompile.errors import RuntimeFault
from speccompile.export.checks import check_decoder
from tests.backends.hybrid_lab import DIMS, NUM_DRAFTS, VOCAB, Hybrid, feed
from tests.plugins.cpu_lab import needs_compiler

TOKENS = np.random.default_rng(5).integers(0, VOCAB, (4, 80)).tolist()
FORMS = ["fp32", pytest.param("packed", marks=[needs_compiler, pytest.mark.plan])]


@pytest.fixture(scope="module", params=FORMS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid"), form=request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    """Without kernels of ours."""
    return Hybrid(tmp_path_factory.mktemp("plain"))


def test_steps_have_the_logits_of_one_prefill(hybrid):
    tokens = TOKENS[0][:40]
    whole = hybrid.open(1).run(feed([tokens], [0], [40]))[LOGITS][0].copy()
    for sizes in ([1] * 40, [7, 3, 30], [2] * 20):
        engine, rows, start = hybrid.open(1), [], 0
        for size in sizes:
            rows.append(engine.run(feed([tokens[start : start + size]], [start], [size]))[LOGITS][0].copy())
            start += size
        np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_accepted_drafts_are_applied_and_rejected_ones_are_not(hybrid):
    """All of 0 .. 5 accepted, ragged, and a step after it; the first number is accepted twice running."""
    for first in range(1, NUM_DRAFTS + 2):
        engine, lengths = hybrid.open(4), np.zeros(4, np.int64)
        kept: list[list[int]] = []
        for slot in range(4):
            prompt = TOKENS[slot][: 3 + 5 * slot]
            engine.run(feed([prompt], [0], [len(prompt)]), first_slot=slot)
            kept.append(list(prompt))
        for round_ in range(6):
            lengths = np.array([len(tokens) for tokens in kept])
            drafts = np.array(TOKENS)[:, 30 + round_ : 30 + round_ + NUM_DRAFTS + 1]
            engine.run(feed(drafts, lengths, [0] * 4))
            for slot in range(4):
                num = 1 + (first + round_ * slot) % (NUM_DRAFTS + 1)
                kept[slot] += drafts[slot, :num].tolist()
                hybrid.check(engine, slot, kept[slot])


def test_a_step_can_be_run_again_at_the_same_lengths(hybrid):
    engine = hybrid.open(1)
    engine.run(feed([TOKENS[0][:9]], [0], [9]))
    engine.run(feed([TOKENS[1][:5]], [9], [0]))
    for draft in (2, 3):  # the second one stands
        engine.run(feed([TOKENS[draft][:5]], [12], [0]))
    hybrid.check(engine, 0, TOKENS[0][:9] + TOKENS[1][:3] + TOKENS[3][:4])


def test_prefill_beside_verify_and_idle_slots(hybrid):
    engine = hybrid.open(3)
    for slot in (0, 2):
        engine.run(feed([TOKENS[slot][:6]], [0], [6]), first_slot=slot)
    for start in (0, 4, 8):  # slot 1 reads its prompt while slot 0 decodes and slot 2 idles
        engine.run(feed([TOKENS[1][start : start + 4]], [start], [4]), first_slot=1)
        engine.run(feed([TOKENS[0][6 + start : 11 + start]], [6 + start], [0]))
        hybrid.check(engine, 0, TOKENS[0][: 10 + start])
        hybrid.check(engine, 1, TOKENS[1][: 4 + start])
        hybrid.check(engine, 2, TOKENS[2][:6])


def test_states_move_with_their_slots(hybrid):
    engine = hybrid.open(3)
    for slot in (0, 1):
        engine.run(feed([TOKENS[slot][: 5 + slot]], [0], [3 + slot]), first_slot=slot)
    engine.states.take_snapshot(0)
    engine.move_slot(0, 2, 5)
    engine.swap_slots(0, 1, 6)
    hybrid.check(engine, 0, TOKENS[1][:6])
    hybrid.check(engine, 1, TOKENS[0][:5])
    hybrid.check(engine, 2, TOKENS[0][:5])
    assert [s is not None for s in engine.states.snapshots] == [False, True, True]
    engine.move_slot(0, 2, 2)  # fewer rows than the states hold
    assert engine.states.reusable(2, 2) == 0
    engine.clear_slot(1)
    assert not any(array[1].any() for array in engine.states.arrays.values())
    assert engine.states.reusable(1, 5) == 0
    engine.reset()
    assert engine.states.reusable(0, 6) == 0


def test_a_state_begins_again_only_where_it_or_its_snapshot_holds_no_more(hybrid):
    engine, states = hybrid.open(2), None
    engine.run(feed([TOKENS[0][:10]], [0], [8]))
    states = engine.states
    states.take_snapshot(0)
    engine.run(feed([TOKENS[0][10:15]], [10], [0]))
    engine.run(feed([TOKENS[0][12:17]], [12], [0]))
    assert [states.reusable(0, rows) for rows in (7, 8, 9, 10, 11, 12, 14, 17)] == [0, 8, 9, 10, 10, 12, 14, 17]
    states.resume(0, 14)
    hybrid.check(engine, 0, TOKENS[0][:14])
    states.resume(0, 9)
    hybrid.check(engine, 0, TOKENS[0][:9])
    assert states.reusable(0, 10) == 9, "a pending row of other tokens"
    engine.run(feed([TOKENS[1][:3]], [9], [3]))
    hybrid.check(engine, 0, TOKENS[0][:9] + TOKENS[1][:3])
    states.resume(0, 0)
    assert states.snapshots[0] is None and states.reusable(0, 12) == 0
    engine.run(feed([TOKENS[2][:3]], [0], [3]))
    hybrid.check(engine, 0, TOKENS[2][:3])


def test_a_step_that_the_states_cannot_take_is_refused(plain):
    engine = plain.open(2)
    engine.run(feed([TOKENS[0][:6]], [0], [4]))
    for length in (3, 7):
        with pytest.raises(RuntimeFault, match=f"slot 0 after {length} tokens; expected 4 to 6 tokens"):
            engine.run(feed([[1]], [length], [0]))
    with pytest.raises(RuntimeFault, match="6 nodes, of which \\[0\\] are sure; expected at most 5"):
        engine.run(feed([[1] * 6], [6], [0]))
    with pytest.raises(RuntimeFault, match="slot 1 after 2 tokens; expected 0 to 0 tokens"):
        engine.run(feed([[1], [1]], [6, 2], [1, 1]))
    engine.run(feed([[1]], [6], [1]))  # nothing was lost by these


def test_a_step_that_fails_leaves_no_state_to_go_on_from(plain, monkeypatch):
    engine = plain.open(1)
    engine.run(feed([TOKENS[0][:6]], [0], [6]))

    def fail(*given: Any) -> Any:
        raise RuntimeFault("engine", "a fault", "none", "")

    with monkeypatch.context() as patch:
        patch.setattr(OrtEngine, "run_graph", fail)
        with pytest.raises(RuntimeFault, match="a fault"):
            engine.run(feed([[1]], [6], [1]))
    with pytest.raises(RuntimeFault, match="expected 0 to 0 tokens"):
        engine.run(feed([[1]], [6], [1]))
    engine.run(feed([TOKENS[0][:6]], [0], [6]))


def test_states_stay_at_their_addresses_and_have_the_predicted_bytes(hybrid):
    engine = hybrid.open(3)
    addresses = [array.ctypes.data for array in engine.states.arrays.values()]
    for length in range(0, 60, 5):
        engine.run(feed([TOKENS[0][length : length + 5]], [length], [5]), first_slot=1)
    assert [array.ctypes.data for array in engine.states.arrays.values()] == addresses
    assert engine.states.num_bytes == 2 * 3 * DIMS.state_bytes(NUM_DRAFTS + 1)
    assert engine.caches.num_bytes == 3 * engine.max_rows * DIMS.cache_row_bytes


def test_the_oracle_keeps_the_same_states(plain, tmp_path):
    engines = [plain.open(2), Hybrid(tmp_path, "reference").open(2)]
    for engine in engines:
        engine.run(feed([TOKENS[1][:7]], [0], [7]), first_slot=1)
        engine.run(feed([TOKENS[0][:4]], [0], [4]))
        engine.run(feed([TOKENS[2][:3], TOKENS[3][:3]], [4, 7], [0, 0]))
        engine.run(feed([TOKENS[2][5:7], TOKENS[3][5:7]], [5, 10], [0, 0]))
        engine.swap_slots(0, 1, 12)
    for slot, tokens in ((0, [0] * 12), (1, [0] * 6)):
        for ours, oracle in zip(*(plain.parts(engine, slot, tokens) for engine in engines), strict=True):
            np.testing.assert_allclose(ours, oracle, atol=2e-6)
    assert engines[0].states.lengths.tolist() == engines[1].states.lengths.tolist() == [10, 5]
    step = feed([[1], [2]], [12, 6], [1, 1])
    ours, oracle = (engine.run(step)[LOGITS].copy() for engine in engines)
    np.testing.assert_allclose(ours, oracle, atol=2e-5)


def test_a_probe_needs_no_sequence(plain):
    engine = plain.open(1)
    for nodes in (1, 4, 8, 4):
        feeds = probe_inputs(engine.spec, num_nodes=nodes, length=30)
        assert np.isfinite(engine.run(feeds)[LOGITS]).all()


def test_the_check_of_a_build_reads_its_prompt_again(plain):
    assert check_decoder(plain.open(1), NUM_DRAFTS + 1) == {"num_tokens": NUM_DRAFTS, "num_equal": NUM_DRAFTS}


def test_steps_are_timed_and_texts_drawn(plain, monkeypatch):
    monkeypatch.setattr(measuring, "SECONDS_PER_SETTING", 0.0)
    slots, rows = measuring.measured_sizes(plain.spec)
    tuning = {"threads": 1, "spinning": "off"}
    engine = plain.backend.load(LoadJob(plain.path, plain.spec, max_slots=slots, max_rows=rows, tuning=tuning))
    assert {"1", "4", "16"} <= set(measuring.measure_steps(engine))
    texts = texts_of(plain.path, plain.spec, TextSample(), 9, measures=True)
    fresh = plain.open(1)
    [tokens] = {text.tokens[:9] for text in texts}
    assert np.isfinite(fresh.run(feed([list(tokens)], [0], [9]))[LOGITS][0]).all()


def test_calibration_reads_pieces_of_any_length(plain):
    collector = Collector(plain.path, plain.spec)
    sources = list(dict.fromkeys(linear.source for linear in collector.linears))
    with ThreadPoolExecutor(1) as pool:
        sums = collector.sums(sources, [np.array(TOKENS[0][:3]), np.array(TOKENS[1][:40])], pool)
    assert sums and all(np.isfinite(total).all() for total in sums.values())


def test_caches_of_several_sizes_grow_and_compact(tmp_path):
    dims = ModelDims("m", 9, 8, 2, 2, 1, 4, 64, layer_dims=(LayerDims(1, 4), LayerDims(3, 8)))
    path = tmp_path / "rollback.onnx"
    spec = save_rollback(dims, path)
    engine = OrtEngine(LoadJob(path, spec, 2, 200), *(open_session(path, {"threads": 1}) for _ in range(2)))
    engine.caches.use(2)
    views = [engine.caches.view(index) for index in range(4)]
    for view in views:
        view[...] = np.random.default_rng(view.size).standard_normal(view.shape)
    before = [view.copy() for view in views]
    engine.caches.grow(150)
    engine.compact(np.array([5, 7]), np.array([[0, 2, 3], [0, 1, -1]]))
    for index, old in enumerate(before):
        view = engine.caches.view(index)
        assert view.shape[1:] == ((1, 200, 4) if index < 2 else (3, 200, 8))
        np.testing.assert_array_equal(view[0, :, 5:8], old[0, :, [5, 7, 8]].swapaxes(0, 1))
        np.testing.assert_array_equal(view[1, :, :128], old[1])


def test_only_a_graph_with_states_has_the_steps_that_keep_them(plain, open_engine):
    assert type(open_engine()) is OrtEngine and open_engine().states is None
    assert type(plain.open(1)) is StateOrtEngine
