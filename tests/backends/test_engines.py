# SPDX-License-Identifier: Apache-2.0
"""Engines keep their contract: caches in place, rows that do not depend on their neighbours, roll back, refusals."""

from typing import Any

import numpy as np
import pytest

from speccompile.core import specs
from speccompile.core.tree import TokenTree
from speccompile.errors import RuntimeFault
from tests.cpu import least_rows
from tests.plugins.cpu_lab import needs_compiler

pytestmark = pytest.mark.export

FORMS = [
    *(("none", "fp32", "auto"), ("none", "packed", "auto")),
    *(("int8", "rowq8", "auto"), ("int8", "blocks32", "auto"), ("int8", "packed", "auto")),
    *(("int4", "blocks32", "auto"), ("int4", "packed", "auto")),
    *(("none", "fp32", "int8"), ("none", "packed", "int8"), ("int8", "packed", "int8")),
]
TOKENS = np.random.default_rng(7).integers(0, 97, 400)


def feed(tokens: np.ndarray, length: int, **more: Any) -> dict[str, np.ndarray]:
    return {specs.TOKENS: np.atleast_2d(tokens), specs.LENGTHS: np.array([length]), **more}


def logits_in_chunks(engine: Any, tokens: np.ndarray, chunks: list[int], slot: int = 0) -> np.ndarray:
    """Logits of all tokens [len, vocab] when they come in chunks of these sizes."""
    rows, start = [], 0
    for size in chunks:
        out = engine.run(feed(tokens[start : start + size], start), first_slot=slot)
        rows.append(out[specs.LOGITS][0].copy())
        start += size
    return np.concatenate(rows)


@pytest.mark.parametrize(("quantization", "form", "kv_cache"), FORMS)
def test_chain_gives_every_token_the_bits_of_a_single_step(open_engine, quantization, form, kv_cache):
    tokens, least = TOKENS[:48], least_rows(quantization, form)
    kind = {"quantization": quantization, "form": form, "kv_cache": kv_cache}
    single = logits_in_chunks(open_engine(**kind), tokens, [least] * (48 // least))
    for chunks in ([16, 16, 16], [5, 8, 3, *([2, 1] if least == 1 else [3]), 4, 7, 12, 6], [48]):
        chain = logits_in_chunks(open_engine(**kind), tokens, chunks)
        np.testing.assert_array_equal(chain, single)


@pytest.mark.parametrize(("quantization", "form", "kv_cache"), FORMS)
def test_a_slot_has_the_same_bits_in_any_batch_and_bucket(open_engine, quantization, form, kv_cache):
    engine = open_engine(quantization=quantization, form=form, kv_cache=kv_cache)
    alone = open_engine(quantization=quantization, form=form, kv_cache=kv_cache)
    prompts = [TOKENS[:20], TOKENS[50:190], TOKENS[30:33]]
    for slot, prompt in enumerate(prompts):
        engine.run(feed(prompt, 0), first_slot=slot)  # slot 1 makes the view grow
    tokens, lengths = TOKENS[300:312].reshape(3, 4), np.array([len(p) for p in prompts])
    together = engine.run({specs.TOKENS: tokens, specs.LENGTHS: lengths})[specs.LOGITS].copy()
    for slot, prompt in enumerate(prompts):
        alone.reset()
        alone.run(feed(prompt, 0))
        np.testing.assert_array_equal(alone.run(feed(tokens[slot], lengths[slot]))[specs.LOGITS][0], together[slot])


@needs_compiler
@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_path_of_a_tree_has_the_bits_of_a_chain_in_our_kernels(open_engine, quantization, kv_cache):
    engine = open_engine(quantization=quantization, form="packed", kv_cache=kv_cache)
    parents, path = [-1, 0, 0, 2, 1, 2, 3, 3, 4, 7], [0, 2, 3, 7, 9]
    mask = TokenTree.tree(TOKENS[None, :10], [parents]).mask()
    for length in (0, 5, 130):
        if length:
            engine.run(feed(TOKENS[100 : 100 + length], 0))
        chain = engine.run(feed(TOKENS[path], length))[specs.LOGITS].copy()
        tree = {specs.TREE_MASK: mask, specs.PARENTS: np.array([parents])}
        got = engine.run(feed(TOKENS[:10], length, **tree))[specs.LOGITS]
        np.testing.assert_array_equal(got[0, path], chain[0])


def addresses_of(engine: Any) -> list[int]:
    return [engine.caches.view(index).ctypes.data for index in range(len(engine.caches.names))]


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_caches_are_never_copied(open_engine, capfd, kv_cache):
    """ONNX Runtime warns whenever a TensorScatter copies; the warning is on, and provoked once to prove it."""
    engine = open_engine(kv_cache=kv_cache)
    addresses = addresses_of(engine)
    logits_in_chunks(engine, TOKENS, [100, 1, 1, 4, 16, 150, 1, 8])
    draft = open_engine(role="draft")
    draft.run(feed(TOKENS[:9], 0, scored_nodes=np.array([[8]])))
    engine.compact(np.array([30]), np.array([[0, 2, 3]]))
    assert addresses_of(engine) == addresses
    assert "in-place optimization not activated" not in capfd.readouterr().err
    spec, session = engine.spec, engine.session
    feeds = {specs.TOKENS: TOKENS[None, :1], specs.LENGTHS: np.zeros(1, np.int64)}
    from speccompile.backends.feeds import neutral_value, shape_from_dims

    sizes = {"batch": 1, "nodes": 1, "scored": 1, "draft_vocab": 1, "max_seq": 128}
    for tensor in spec.inputs:
        feeds.setdefault(tensor.name, neutral_value(tensor.name, shape_from_dims(tensor, sizes), tensor.dtype))
    session.run(None, feeds)
    assert "in-place optimization not activated" in capfd.readouterr().err


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
def test_a_rolled_back_tree_leaves_the_cache_of_its_path(open_engine, backend, kv_cache):
    """Cache and logits after tree + compaction against a prefill of the same tokens. Trees add in another order."""
    engine, fresh = (open_engine(backend, max_rows=64, kv_cache=kv_cache) for _ in range(2))
    prompt, tree = TOKENS[:10], TOKENS[20:26]
    parents = np.array([[-1, 0, 0, 2, 2, 4]])
    mask = np.eye(6, dtype=bool)
    for node in range(1, 6):
        mask[node] |= mask[parents[0, node]]
    path = np.array([[0, 2, 4, 5]])
    engine.run(feed(prompt, 0))
    scored = engine.run(feed(tree, 10, tree_mask=mask[None], parents=parents))[specs.LOGITS][0].copy()
    engine.compact(np.array([10]), path)
    tokens = np.concatenate([prompt, tree[path[0]]])
    wanted = fresh.run(feed(tokens, 0))[specs.LOGITS][0][10:].copy()
    assert np.abs(scored[path[0]] - wanted).max() < 2e-5
    after, wanted = (e.run(feed(TOKENS[40:43], 14))[specs.LOGITS].copy() for e in (engine, fresh))
    assert np.abs(after - wanted).max() < 2e-5


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_onnxruntime_and_the_oracle_agree(open_engine, kv_cache):
    ours, oracle = (open_engine(backend, max_rows=64, kv_cache=kv_cache) for backend in ("onnxruntime", "reference"))
    rng = np.random.default_rng(3)
    for engine in (ours, oracle):
        for slot in range(3):
            engine.run(feed(TOKENS[slot * 9 : slot * 9 + 7 + slot], 0, scored_nodes=np.array([[0]])), first_slot=slot)
    step = {
        specs.TOKENS: rng.integers(0, 97, (3, 4)),
        specs.LENGTHS: np.array([7, 8, 9]),
        specs.UNIFORMS: rng.random((3, 4, 2), np.float32),
        specs.TEMPERATURE: np.array([0.8, 0, 1.3], np.float32),
        specs.TOP_K: np.array([0, 0, 12]),
        specs.TOP_P: np.array([0.9, 1, 1], np.float32),
    }
    got, wanted = ours.run(step), oracle.run(step)
    scale = np.abs(wanted[specs.LOGITS]).max()  # about 12: the oracle sums in another order
    assert np.abs(got[specs.LOGITS] - wanted[specs.LOGITS]).max() < 5e-6 * scale
    for name in (specs.PATH, specs.NUM_ACCEPTED, specs.NEXT_TOKEN):
        np.testing.assert_array_equal(got[name], wanted[name])


def test_inputs_left_out_become_neutral_again(open_engine):
    engine = open_engine()
    engine.run(feed(TOKENS[:8], 0))
    plain = engine.run(feed(TOKENS[8:12], 8))[specs.LOGITS].copy()
    warped = {
        specs.TEMPERATURE: np.ones(1, np.float32),
        specs.UNIFORMS: np.full((1, 4, 2), 0.9, np.float32),
        specs.TREE_MASK: np.eye(4, dtype=bool)[None],
        specs.PARENTS: np.array([[-1, 0, 0, 0]]),
    }
    other = engine.run(feed(TOKENS[8:12], 8, **warped))[specs.LOGITS].copy()
    assert np.abs(other - plain).max() > 1e-2
    again = engine.run(feed(TOKENS[8:12], 8))
    np.testing.assert_array_equal(again[specs.LOGITS], plain)
    assert again[specs.NEXT_TOKEN][0] == plain[0, again[specs.NUM_ACCEPTED][0]].argmax()


def test_draft_engine_gives_its_argmax_and_its_probability(open_engine):
    target, draft = open_engine(), open_engine(role="draft")
    logits = target.run(feed(TOKENS[:9], 0))[specs.LOGITS][0].astype(np.float64)
    for row in (8, 3):  # a slot of a ragged batch may have its last token before the padding
        out = draft.run(feed(TOKENS[:9], 0, scored_nodes=np.array([[row]])))
        probs = np.exp(logits[row] - logits[row].max())
        probs /= probs.sum()
        assert out[specs.CANDIDATES][0, 0, 0] == probs.argmax()
        np.testing.assert_allclose(out[specs.CANDIDATE_PROBS][0, 0, 0], probs.max(), rtol=1e-4)


def test_a_step_like_the_one_before_is_checked_again(open_engine):
    """Steps of the same inputs and shapes reuse a binding; what else it depends on may have changed."""
    engine, other = open_engine(max_slots=2, max_rows=300), open_engine(max_slots=2, max_rows=300)
    text = TOKENS[:140]
    for start in range(0, 140, 4):  # the view grows after 128 rows
        grown = engine.run(feed(text[start : start + 4], start))[specs.LOGITS].copy()
    other.run(feed(text[:136], 0))
    np.testing.assert_array_equal(grown, other.run(feed(text[136:], 136))[specs.LOGITS])
    for wrong in (300, 1 << 40):
        with pytest.raises(RuntimeFault, match=r"cache rows.*at most 300"):
            engine.run(feed(text[136:], wrong))
    np.testing.assert_array_equal(engine.run(feed(text[136:], 136))[specs.LOGITS], grown)
    one = engine.run(feed(text[136:], 136, scored_nodes=np.array([[2]])))[specs.LOGITS].copy()
    np.testing.assert_array_equal(one[0, 0], grown[0, 2])
    assert engine.run(feed(text[136:], 136))[specs.LOGITS].shape == grown.shape
    engine.run(feed(TOKENS[200:204], 0), first_slot=1)
    np.testing.assert_array_equal(engine.run(feed(text[136:], 136))[specs.LOGITS], grown)
    engine.shrink(100)
    engine.run(feed(text[:100], 0))
    np.testing.assert_array_equal(
        engine.run(feed(text[100:104], 100))[specs.LOGITS], other.run(feed(text[100:104], 100))[specs.LOGITS]
    )


@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
def test_too_many_rows_or_slots_are_refused(open_engine, backend):
    engine = open_engine(backend, max_slots=2, max_rows=32)
    with pytest.raises(RuntimeFault, match=r"33 cache rows.*at most 32.*engine\.max_seq_len"):
        engine.run(feed(TOKENS[:4], 29))
    with pytest.raises(RuntimeFault, match=r"slots.*engine\.max_batch_size"):
        engine.run({specs.TOKENS: TOKENS[:6].reshape(3, 2), specs.LENGTHS: np.zeros(3, np.int64)})


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
def test_sequences_go_on_where_their_rows_were_moved_to(open_engine, backend, kv_cache):
    engine = open_engine(backend, max_rows=300, kv_cache=kv_cache)
    texts = [TOKENS[:9], TOKENS[20:34], TOKENS[60:65]]
    for slot, text in enumerate(texts):
        engine.run(feed(text, 0), first_slot=slot)
    wanted = [engine.run(feed(TOKENS[90:92], len(t)), first_slot=i)[specs.LOGITS].copy() for i, t in enumerate(texts)]
    engine.swap_slots(0, 1, 14)
    engine.run(feed(TOKENS[100:250], 0, scored_nodes=np.array([[0]])), first_slot=2)  # the view grows, and shrinks
    engine.shrink(40)
    engine.move_slot(0, 2, 14)
    for slot, text in ((0, 1), (1, 0), (2, 1)):
        got = engine.run(feed(TOKENS[90:92], len(texts[text])), first_slot=slot)[specs.LOGITS]
        np.testing.assert_array_equal(got, wanted[text])


def test_a_step_that_fails_says_so_and_the_next_one_runs(open_engine):
    engine = open_engine()
    wanted = engine.run(feed(TOKENS[:4], 0))[specs.LOGITS].copy()
    with pytest.raises(RuntimeFault, match=r"engine target: got .*; expected a step that runs"):
        engine.run(feed(np.array([10**6, 1, 2, 3]), 0))
    np.testing.assert_array_equal(engine.run(feed(TOKENS[:4], 0))[specs.LOGITS], wanted)


def test_a_session_leaves_the_callers_floats_as_they_were(open_engine):
    """A subnormal number of the caller's own is not zero after a step."""
    engine = open_engine(quantization="none", form="packed", kv_cache="auto")
    engine.run(feed(TOKENS[:4], 0))
    assert np.array([1e-39], np.float32) * np.float32(0.5) > 0
