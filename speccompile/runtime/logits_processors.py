# SPDX-License-Identifier: Apache-2.0
"""Logits processors, which depend on a sequence's own tokens: grammars, penalties and biases on logits, and min-p.

The order is that of transformers 5 (`GenerationMixin._get_logits_processor`): grammar, logit bias, repetition,
frequency and presence penalty, temperature, top-k, top-p, min-p. vLLM 1 (`v1/sample/sampler.py`) has min-p before top-k
and top-p: it keeps the same tokens, but top-p sums the mass of these alone. Tokens on the path to a node of a draft
tree count as text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from speccompile.core.sampling import warp
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.tree import Floats, Ints
from speccompile.runtime.grammars import GrammarFault, GrammarMatcher
from speccompile.runtime.logprobs import log_softmax


def keep_likely(probs: Floats, min_p: float) -> Floats:
    """Returns `probs` [..., vocab] without tokens less than `min_p` times as probable as the best, normalised."""
    if min_p <= 0:
        return probs
    kept = np.where(probs < np.float32(min_p) * probs.max(axis=-1, keepdims=True), np.float32(0), probs)
    mass = kept.sum(axis=-1, keepdims=True, dtype=np.float64)
    normalised: Floats = (kept / mass).astype(np.float32)
    return normalised


_LARGEST = np.float32(2.0**63)  # of a processed logit: finite even when divided by the lowest temperature
_PENALTIES = (1e-30, 1e30)  # beyond these, float32 would give 0 or infinity


class LogitsProcessor:
    """Computes the distribution of one request at any point of its text. `grammar`: None: the text is free."""

    __slots__ = ("_bias", "_counts", "_grammar", "_num_prompt", "_num_read", "_seen", "params")

    def __init__(
        self, params: SamplingParams, num_prompt: int, vocab_size: int, grammar: GrammarMatcher | None = None
    ) -> None:
        self._grammar = grammar
        self.params, self._num_prompt, self._num_read = params, num_prompt, 0
        self._seen: NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)  # in prompt or text
        self._counts: Floats = np.zeros(vocab_size, dtype=np.float32)  # in the text
        biases = dict(params.logit_bias)
        self._bias = (np.array(list(biases), dtype=np.int64), np.array(list(biases.values()), dtype=np.float32))

    def read(self, tokens: Sequence[int]) -> None:
        """Counts new tokens; `tokens` are all of the sequence, prompt and root included."""
        self._seen[tokens[self._num_read :]] = True
        new = tokens[max(self._num_read, self._num_prompt) :]
        np.add.at(self._counts, new, 1)
        self._num_read = len(tokens)
        if self._grammar is not None:
            self._grammar.read(tokens)

    def logits(self, logits: Floats, path: Sequence[int]) -> Floats:
        """Returns logits with the grammar's mask, biases and penalties, [vocab] float32.

        Args:
            logits: [vocab] float32, after the last token of the path.
            path: drafts that would be text, from the root's child on.

        Raises:
            GrammarFault: no token may follow, or the model itself excludes all that may.
        """
        if self._grammar is not None:
            allowed = self._grammar.allowed(path)
            logits = np.where(False if allowed is None else allowed, logits, np.float32(-np.inf))
            if allowed is not None and np.isneginf(logits.max()):
                raise GrammarFault("no token with a finite logit that continues the text")
        params, processed, seen, counts = self.params, logits.copy(), self._seen, self._counts
        ids, biases = self._bias
        processed[ids] += biases
        if path:
            seen, counts = seen.copy(), counts.copy()
            seen[path] = True
            np.add.at(counts, path, 1)
        if params.repetition_penalty != 1:
            penalty = np.float32(min(max(params.repetition_penalty, _PENALTIES[0]), _PENALTIES[1]))
            with np.errstate(over="ignore"):
                processed[seen] = np.where(processed[seen] > 0, processed[seen] / penalty, processed[seen] * penalty)
        processed -= np.float32(params.frequency_penalty) * counts
        processed -= np.float32(params.presence_penalty) * (counts > 0)
        # A token that the model masks stays masked.
        return np.where(np.isneginf(logits), logits, np.clip(processed, -_LARGEST, _LARGEST))

    def probs(self, logits: Floats, path: Sequence[int]) -> Floats:
        """Returns the distribution of the token after `path`, [vocab] float32; all 0: the grammar excludes the path."""
        params = self.params
        processed = self.logits(logits, path)
        if self._grammar is not None and np.isneginf(processed.max()):
            return np.zeros_like(processed)
        probs = warp(processed[None], [params.temperature], [params.top_k], [params.top_p])[0]
        return probs if params.is_greedy else keep_likely(probs, params.min_p)

    def logprobs(self, logits: Floats, path: Sequence[int]) -> np.ndarray:
        """Returns [vocab] float64, the logarithms of `probs`; of a greedy request, of the processed logits."""
        if self.params.is_greedy:
            return log_softmax(self.logits(logits, path))
        with np.errstate(divide="ignore"):
            logs: np.ndarray = np.log(self.probs(logits, path).astype(np.float64))
        return logs


class TreeProbs:
    """The distributions at the nodes of one tree, computed when they are read; the `target_probs` of `accept_slot`.

    `tokens` and `parents` are [nodes] int64, `logits` [nodes, vocab] float32.
    """

    def __init__(self, logits_processor: LogitsProcessor, tokens: Ints, parents: Ints, logits: Floats) -> None:
        self._logits_processor, self._logits = logits_processor, logits
        self._tokens, self._parents = tokens.tolist(), parents.tolist()
        self._probs: dict[int, Floats] = {}
        # Drafts after which the grammar fails: what would follow does not matter, as the text ends where one is kept.
        self.ends: set[int] = set()

    def __getitem__(self, node: int) -> Floats:
        if node not in self._probs:
            path, above = list[int](), node
            while above > 0:
                path.append(self._tokens[above])
                above = self._parents[above]
            try:
                self._probs[node] = self._logits_processor.probs(self._logits[node], path[::-1])
            except GrammarFault:
                if node == 0:
                    raise
                self.ends.add(node)
                self._probs[node] = np.eye(1, len(self._logits[node]), dtype=np.float32)[0]
        return self._probs[node]
