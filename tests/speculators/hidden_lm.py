# SPDX-License-Identifier: Apache-2.0
"""The mock target with hidden states, and heads that read them.

A state is the number of a context, so heads that are given a wrong, stale or misplaced one continue another
text, which the tests detect: the context and the root must be a prefix of a known text.
"""

import numpy as np

from speccompile.core.sampling import draw, warp
from speccompile.core.specs import (
    CANDIDATE_PROBS,
    CANDIDATES,
    CHAIN_PROBS,
    CONFIDENCES,
    DRAFT_PARENTS,
    HIDDEN,
    LENGTHS,
    SAMPLED_TOKENS,
    START_NODES,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    TOP_P,
    TREE_MASK,
    UNIFORMS,
)
from speccompile.core.tree import chain_mask
from speccompile.graph_kinds.heads import DraftForm, candidate_heads_spec, heads_spec
from tests.mock_lm import VOCAB, FakeEngine, MockEngine, MockLM

WIDTH = 2


class OnDevice:
    """An output as an engine on a GPU gives it: `shape`, and a host copy on demand, which is counted."""

    num_copies = 0

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        OnDevice.num_copies += 1
        return np.array(self.array, dtype=dtype)


class MockTarget(MockEngine):
    """Gives `hidden` [batch, nodes, WIDTH] as well, on a device; valid until its next run."""

    def __init__(self, model: MockLM, max_slots: int, max_seq_len: int, headroom: int) -> None:
        super().__init__(model, "target", max_slots, max_seq_len, headroom)
        self.contexts: list[np.ndarray] = []

    def run(self, feeds, first_slot=0):
        outputs = super().run(feeds, first_slot)  # overwrites its former outputs with stale values
        tokens, lengths = feeds[TOKENS], feeds[LENGTHS]
        mask = feeds.get(TREE_MASK, chain_mask(*tokens.shape))
        hidden = np.zeros((*tokens.shape, WIDTH), dtype=np.float32)
        for b, node in np.ndindex(*tokens.shape):
            row = self.cache[first_slot + b]
            self.contexts.append(np.concatenate((row[: lengths[b]], tokens[b][mask[b, node]])))
            hidden[b, node] = len(self.contexts) - 1
        self._outputs = {**outputs, HIDDEN: hidden}
        return {**outputs, HIDDEN: OnDevice(hidden)}


class MockHeads(FakeEngine):
    """Heads that draft `num_drafts` tokens with a language model of their own, from the states of `target`."""

    def __init__(self, model: MockLM, target: MockTarget, num_drafts: int, max_slots: int) -> None:
        self.model, self.target, self.num_drafts, self.max_slots = model, target, num_drafts, max_slots
        self.spec = heads_spec("heads", WIDTH, VOCAB, num_drafts)
        self.max_rows = self.num_runs = 0
        self.read: list[list[int]] = []  # text that each row of the last run continued

    def run(self, feeds, first_slot=0):
        self.num_runs += 1
        hidden, start, tokens = feeds[HIDDEN], feeds[START_NODES], feeds[TOKENS]
        hidden = hidden.array if isinstance(hidden, OnDevice) else hidden
        batch = len(tokens)
        assert hidden.shape[0] == batch and tokens.shape == (batch, 1) and start.shape == (batch,)
        heat = feeds.get(TEMPERATURE, np.zeros(batch, np.float32))
        warping = (heat, feeds.get(TOP_K, np.zeros(batch, np.int64)), feeds.get(TOP_P, np.ones(batch)))
        draws = feeds.get(UNIFORMS, np.zeros((batch, self.num_drafts), np.float32))
        drafted = np.zeros((batch, self.num_drafts), np.int64)
        sure, dists = drafted.astype(np.float32), np.zeros((batch, self.num_drafts + 1, VOCAB), np.float32)
        texts = [self._text(hidden[b, start[b], 0], tokens[b, 0]) for b in range(batch)]
        self.read = [list(map(int, text)) for text in texts]
        for i in range(self.num_drafts):
            logits = np.stack([self.model.logits(text) for text in texts])
            dist = warp(logits[:, None], *warping)[:, 0]
            drafted[:, i], dists[:, i + 1] = draw(dist, draws[:, i]), dist
            plain = np.exp(logits - logits.max(axis=-1, keepdims=True))
            plain /= plain.sum(axis=-1, keepdims=True)
            sure[:, i] = plain[np.arange(batch), drafted[:, i]]
            texts = [np.append(text, token) for text, token in zip(texts, drafted[:, i], strict=True)]
        return {SAMPLED_TOKENS: drafted, CONFIDENCES: sure, CHAIN_PROBS: dists if heat.any() else dists[:, :, :1]}

    def _text(self, number: float, root: int) -> np.ndarray:
        # Rows of slots that have no state yet hold zeros; what they draft is not used.
        return np.append(self.target.contexts[int(number)], root)

    def reset(self, rows=1): ...

    def clear_slot(self, slot): ...

    def move_slot(self, source, dest): ...


def likeliest(model: MockLM, text: np.ndarray, num: int) -> tuple[list[int], list[float]]:
    """Returns the best next tokens and their probabilities."""
    logits = model.logits(text).astype(np.float64)
    plain = np.exp(logits - logits.max())
    best = np.argsort(-plain, kind="stable")[:num]
    return best.tolist(), (plain[best] / plain.sum()).tolist()


class MockTreeHeads(MockHeads):
    """Heads that draft a tree in one run, of a fixed shape or grown; see `DraftForm`."""

    def __init__(self, model: MockLM, target: MockTarget, form: DraftForm, max_slots: int) -> None:
        super().__init__(model, target, form.num_drafts, max_slots)
        self.form, self.spec = form, form.spec("heads", WIDTH, VOCAB)

    def run(self, feeds, first_slot=0):
        self.num_runs += 1
        hidden, start, tokens = feeds[HIDDEN], feeds[START_NODES], feeds[TOKENS]
        hidden = hidden.array if isinstance(hidden, OnDevice) else hidden
        assert set(feeds) == {HIDDEN, START_NODES, TOKENS} and tokens.shape == (len(tokens), 1)
        trees = [self._tree(self._text(hidden[b, start[b], 0], tokens[b, 0])) for b in range(len(tokens))]
        drafted, sure, parents = (np.array(column) for column in zip(*trees, strict=True))
        outputs = {SAMPLED_TOKENS: drafted, CONFIDENCES: sure.astype(np.float32), DRAFT_PARENTS: parents}
        return {t.name: outputs[t.name] for t in self.spec.outputs}

    def _tree(self, text):
        if self.form.choices:
            made = {(): (text, 1.0)}
            for path in self.form.choices:
                above = made[path[:-1]][0]
                best, probs = likeliest(self.model, above, path[-1] + 1)
                made[path] = (np.append(above, best[-1]), probs[-1])
            rows = [made[path] for path in self.form.choices]
            return [int(t[-1]) for t, _ in rows], [p for _, p in rows], [0] * len(rows)
        level, made = [(text, 1.0, 0)], []
        for _ in range(self.form.depth):
            fresh = []
            for above, path, number in level:
                for token, prob in zip(*likeliest(self.model, above, self.form.num_candidates), strict=True):
                    made.append((token, prob, number))
                    fresh.append((np.append(above, token), path * prob, len(made)))
            level = sorted(fresh, key=lambda row: -row[1])[: self.form.width]
        return tuple(list(column) for column in zip(*made, strict=True))


class MockCandidateHeads(MockHeads):
    """Heads that give candidates of one depth each: after the likeliest text, as they do not read drafts."""

    def __init__(self, model: MockLM, target: MockTarget, num_heads: int, num_candidates: int, max_slots: int) -> None:
        super().__init__(model, target, num_heads, max_slots)
        self.num_candidates = num_candidates
        self.spec = candidate_heads_spec("heads", WIDTH, VOCAB, num_heads, num_candidates)

    def run(self, feeds, first_slot=0):
        self.num_runs += 1
        hidden, start = feeds[HIDDEN], feeds[START_NODES]
        hidden = hidden.array if isinstance(hidden, OnDevice) else hidden
        assert set(feeds) == {HIDDEN, START_NODES}
        shape = (len(start), self.num_drafts, self.num_candidates)
        candidates, probs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        for slot in range(len(start)):
            text = self.target.contexts[int(hidden[slot, start[slot], 0])]
            text = np.append(text, self.model.logits(text).argmax())  # the likeliest root, as heads cannot read it
            for head in range(self.num_drafts):
                candidates[slot, head], probs[slot, head] = likeliest(self.model, text, self.num_candidates)
                text = np.append(text, candidates[slot, head, 0])
        return {CANDIDATES: candidates, CANDIDATE_PROBS: probs}
