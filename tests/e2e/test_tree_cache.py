# SPDX-License-Identifier: Apache-2.0
"""The target's cache after 200 tree steps is that of a fresh prefill of the same tokens."""

import functools
import json

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import LENGTHS, SCORED_NODES, TOKENS
from speccompile.core.tree import TokenTree
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from tests import store
from tests.backends.conftest import CONFIG
from tests.lab.graphs import compile_graph

NUM_STEPS, SLOTS, ROWS = 200, 2, 1000
# Sums of 64 float32 terms in another order; a wrong row differs by about the values themselves, see the last test.
TOLERANCE = 1e-4
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7]]


@pytest.fixture(scope="module")
def open_engine(tmp_path_factory):
    pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("tree_cache")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model, dims = store.export_decoder(folder, weights="random", max_seq_len=1024)
    spec = verified_spec(decoder_spec("target", dims))

    built = functools.cache(lambda backend: compile_graph(model, spec, folder / backend, backend, dims))

    def make(backend="onnxruntime", *, max_rows):
        return built(backend).open(SLOTS, max_rows=max_rows)

    return make


class Fork:
    """Drafts around a known text: at each depth a wrong sibling before or after the right one, with a child."""

    def __init__(self, texts, vocab):
        self.texts, self.vocab, self.rng = texts, vocab, np.random.default_rng(4)

    def tree(self, slots):
        tokens = np.zeros((len(slots), 9), np.int64)
        parents = np.full(tokens.shape, -1)
        for slot, sequence in enumerate(slots):
            right, num = 0, 1
            tokens[slot, 0] = sequence.tokens[-1]
            following = self.texts[slot][len(sequence.tokens) :][: self.rng.integers(1, 4)]
            for token in following:
                wrong = (token + 1 + self.rng.integers(self.vocab - 1)) % self.vocab
                pair = [wrong, token] if self.rng.random() < 0.6 else [token, wrong]
                tokens[slot, num : num + 2], parents[slot, num : num + 2] = pair, right
                right, num = num + pair.index(token), num + 2
            if num < 9:  # a child of a refused node
                tokens[slot, num], parents[slot, num] = 1, num - 1
        return TokenTree.tree(tokens, parents)


def caches_of(engine):
    """Returns a copy of the caches, [caches, slots, kv_heads, rows, head_dim]."""
    held = engine.caches
    if isinstance(held, dict):
        return np.stack(list(held.values()))
    return np.stack([held.view(index) for index in range(len(held.names))])


def texts_of(engine, num):
    """Returns the greedy texts by single steps."""
    engine.reset()
    lengths, tokens = np.zeros(SLOTS, np.int64), [list(p) for p in PROMPTS]
    for slot, prompt in enumerate(PROMPTS):
        start = {TOKENS: np.array([prompt[:-1]]), LENGTHS: np.zeros(1, np.int64), SCORED_NODES: np.zeros((1, 1), int)}
        engine.run(start, first_slot=slot)
        lengths[slot] = len(prompt) - 1
    for _ in range(num):
        out = engine.run({TOKENS: np.array([[text[-1]] for text in tokens]), LENGTHS: lengths})
        lengths += 1
        for text, token in zip(tokens, out["next_token"].tolist(), strict=True):
            text.append(token)
    return tokens


def run_steps(engine, num_steps, texts):
    """Decode with trees; returns the slots and the number of drafts that were kept after a gap."""
    engine.reset()
    verifier = Verifier(engine, ROWS)
    batch = SequenceBatch([], SLOTS)
    batch.sequences = [
        TokenSequence(i, p, SamplingParams(max_new_tokens=900), frozenset(), None) for i, p in enumerate(PROMPTS)
    ]
    batch.changed()
    for slot, sequence in enumerate(batch.sequences):
        for _ in verifier.prefill(slot, sequence.tokens):
            pass
    fork, num_moved = Fork(texts, engine.spec.vocab_size), 0
    for _ in range(num_steps):
        tree = fork.tree(batch.sequences)
        verdict = verifier.score(tree, batch)
        path = verdict.path.copy()
        verifier.commit(tree, verdict)
        num_moved += int((path > np.arange(path.shape[1])).sum())
        for slot, sequence in enumerate(batch.sequences):
            kept = path[slot, 1 : int(verdict.num_accepted[slot]) + 1]
            sequence.tokens += [*tree.tokens[slot, kept].tolist(), int(verdict.next_token[slot])]
    return batch.sequences, num_moved


def difference(engine, slots, held):
    """Largest absolute difference to the cache of a fresh prefill, and the largest value."""
    engine.reset()
    worst = largest = 0.0
    for slot, sequence in enumerate(slots):
        tokens = np.array([sequence.tokens[:-1]])
        for start in range(0, tokens.shape[1], 128):
            part = tokens[:, start : start + 128]
            feeds = {TOKENS: part, LENGTHS: np.array([start]), SCORED_NODES: np.zeros((1, 1), np.int64)}
            engine.run(feeds, first_slot=slot)
        num = tokens.shape[1]
        fresh = caches_of(engine)[:, slot, :, :num]
        worst = max(worst, float(np.abs(fresh - held[:, slot, :, :num]).max()))
        largest = max(largest, float(np.abs(fresh).max()))
    return worst, largest


@pytest.mark.parametrize("backend", ["onnxruntime", "reference"])
def test_the_cache_after_200_tree_steps_is_that_of_a_fresh_prefill(open_engine, backend):
    fast = open_engine(max_rows=ROWS + 24)
    # The reference evaluator recomputes its whole cache in every step: fewer steps, in fewer rows.
    num_steps = NUM_STEPS if backend == "onnxruntime" else 20
    texts = texts_of(fast, 4 * num_steps)
    engine = fast if backend == "onnxruntime" else open_engine(backend, max_rows=128)
    slots, num_moved = run_steps(engine, num_steps, texts)
    assert [sequence.tokens for sequence in slots] == [
        text[: len(sequence.tokens)] for text, sequence in zip(texts, slots, strict=True)
    ]
    assert num_moved > num_steps  # rows that compaction had to move
    held = caches_of(engine)
    worst, largest = difference(engine, slots, held)
    said = f"{backend}: {num_steps} tree steps, {num_moved} rows moved, max abs difference {worst:.3g} of {largest:.3g}"
    print(said)
    assert worst < TOLERANCE, said


def test_a_row_left_where_it_was_is_noticed(open_engine, monkeypatch):
    engine = open_engine(max_rows=ROWS + 24)
    texts = texts_of(engine, 60)
    monkeypatch.setattr(engine, "compact", lambda lengths, path: None)
    slots, _ = run_steps(engine, 8, texts)
    held = caches_of(engine)
    worst, _ = difference(engine, slots, held)
    assert worst > 100 * TOLERANCE, f"max abs difference {worst:.3g} though nothing was moved"
