# SPDX-License-Identifier: Apache-2.0
"""Runs one target forward over a batch of trees, and owns the lengths of the target's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.proposer import CacheRows
from speccompile.core.protocols import Engine, Outputs
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.specs import (
    DRAFT_PROBS,
    LENGTHS,
    LOGITS,
    NEXT_TOKEN,
    NUM_ACCEPTED,
    PARENTS,
    PATH,
    SCORED_NODES,
    SURE_NODES,
    TOKENS,
    TREE_MASK,
    UNIFORMS,
)
from speccompile.core.tree import Ints, TokenTree, Verdict, chain_parents
from speccompile.errors import RuntimeFault
from speccompile.runtime.host_verify import verify_on_host
from speccompile.runtime.images import PromptImages
from speccompile.runtime.sequences import SequenceBatch

SCORED_CHUNK = 32  # tokens of a prompt whose logits are held at once, where they are asked for
END_ROWS = 2  # rows of a prompt's end that stay pending: the same prompt again, and a draft, begin that much earlier


class Verifier:
    """Scores trees and commits paths; a sequence may use `max_seq_len` of the engine's cache rows.

    A target with recurrent states gets the number of nodes that stay whatever is decided (`sure_nodes`): those of a
    prompt, and the one node of a plain step. With drafts it is 0, so that the step can be run once more.
    """

    rates: Sequence[float] = ()  # see `SyntheticVerifier`

    def __init__(self, engine: Engine, max_seq_len: int, chunk: int = 128) -> None:
        self.engine, self.max_seq_len, self.chunk = engine, max_seq_len, chunk
        self.lengths: Ints = np.zeros(engine.max_slots, dtype=np.int64)
        self.cache = CacheRows(engine, self.lengths)
        self.outputs: Outputs = {}
        self._compacts = not engine.compacts_in_step
        self._has_states = engine.states is not None
        self._end_rows = min(END_ROWS, engine.spec.max_pending)
        self.may_read_last = chunk > 1 and (not self._has_states or engine.spec.max_pending > END_ROWS)
        self._lengths_of: dict[int, Ints] = {}  # by batch size: a view of `lengths`, made once

    def may_draft(self, where: str, params: SamplingParams) -> bool:
        """Returns whether drafts may be scored for a request, whose verdicts may be computed on the host.

        Raises:
            RuntimeFault: it needs logits that the target does not give, or has a bias for a token out of the
                vocabulary.
        """
        if not params.needs_logits and params.logprobs is None and params.prompt_logprobs is None:
            return True
        spec = self.engine.spec
        if all(tensor.name != LOGITS for tensor in spec.outputs):
            got = "min_p, a penalty, a logit_bias, a grammar or logprobs, with a target that keeps its logits to itself"
            todo = "Build the bundle with engine.logits: true, or leave these out."
            raise RuntimeFault(where, got, "temperature, top_k and top_p alone", todo)
        wrong = [token for token in dict(params.logit_bias) if spec.vocab_size and token >= spec.vocab_size]
        if wrong:
            expected = f"ids below {spec.vocab_size}"
            raise RuntimeFault(f"{where} (logit_bias)", f"token {wrong[0]}", expected, "Use the bundle's own ids.")
        return self._compacts or not params.needs_logits

    def prefill(
        self, slot: int, tokens: Sequence[int], images: PromptImages | None = None
    ) -> Iterator[tuple[Ints, int, Outputs]]:
        """Reads all prompt tokens but the last; yields each chunk's tokens [1, nodes], its start, and the outputs."""
        self.lengths[slot] = 0
        while (start := int(self.lengths[slot])) < len(tokens) - 1:
            nodes, outputs, _ = self.read(slot, tokens, images=images)
            yield nodes, start, outputs

    def read(
        self,
        slot: int,
        tokens: Sequence[int],
        most: int | None = None,
        images: PromptImages | None = None,
        alone: SequenceBatch | None = None,
    ) -> tuple[Ints, Outputs, Verdict | None]:
        """Reads the next chunk of a prompt, which is not read whole but for its last token.

        With `alone` the last chunk includes the prompt's last token, so that reading gives the first new token, bit for
        bit that of a plain step. Not so where that token alone is left, where a chunk has one token, where recurrent
        states could not return to where the same prompt begins, and where all logits of the prompt are requested: then
        every node of the chunk is scored.

        Args:
            slot: slot index of the sequence; its cache holds the first `lengths[slot]` tokens.
            most: most tokens to read, the prompt's last not counted; None: no bound but `chunk`. An image is read
                whole.
            images: of the prompt; None: it has none.
            alone: the sequence, as a batch of its own; None: the last token is left to a step.

        Returns:
            The tokens of the chunk [1, nodes], the target's outputs, and the verdict on the prompt's last token or
            None.
        """
        row = self.lengths[slot : slot + 1]
        start = int(row[0])
        most = self.chunk if most is None else min(self.chunk, most)
        chosen = {} if alone is None else alone.adapter_feeds
        if scores_all := alone is not None and alone.sequences[0].sampling.prompt_logprobs is not None:
            alone, most = None, min(most, SCORED_CHUNK, self.engine.max_scored or most)
        reads_last = alone is not None and self.may_read_last
        num, num_sure = self._split(len(tokens) - 1 - start, most, int(reads_last))
        if images is not None:
            num = images.chunk(start, num)
        nodes = np.array([tokens[start : start + num]], dtype=np.int64)
        # One scored node, so that the LM head is computed for one row. The last node attends to all others.
        first = 0 if scores_all else nodes.shape[1] - 1
        feeds = {TOKENS: nodes, LENGTHS: row, SCORED_NODES: np.arange(first, nodes.shape[1])[None], **chosen}
        if self._has_states:
            feeds[SURE_NODES] = np.array([num_sure], dtype=np.int64)
        if images is not None:
            feeds |= images.feeds(start, num)
        if alone is None or start + num < len(tokens):
            outputs, verdict = self.engine.run(feeds, first_slot=slot), None
        else:
            tree = alone.roots()
            feeds |= self._draw_feeds(tree, alone)
            outputs = self.engine.run(feeds, first_slot=slot)
            verdict = self._verdict(tree, alone, feeds, outputs)
        row += nodes.shape[1]
        return nodes, outputs, verdict

    def _split(self, left: int, most: int, num_last: int) -> tuple[int, int]:
        """Returns how many tokens a prompt's next chunk has, and how many are sure: all but the prompt's last rows."""
        end_rows = self._end_rows if self._has_states else 0
        if left <= most and left + num_last <= self.chunk:
            num = left + num_last
            return num, max(num - num_last - end_rows, 0)
        # So that the last chunk has all of the last rows, and a token before the prompt's last.
        num = max(min(most, left - max(end_rows, num_last)), 1)
        return num, num

    def _check_trees(self) -> None:
        if self.engine.states is not None and not self.engine.states.scores_trees:
            where, expected = f"engine {self.engine.spec.name}", "chains: its recurrent states follow one path"
            raise RuntimeFault(where, "a tree to score", expected, "Write speculator.tree: chain.")

    def score(self, tree: TokenTree, batch: SequenceBatch) -> Verdict:
        """Scores a tree with one forward; the verdict's arrays are valid until the next one."""
        num_slots, nodes = tree.tokens.shape
        lengths = self._lengths_of.get(num_slots)
        if lengths is None:
            lengths = self._lengths_of[num_slots] = self.lengths[:num_slots]
        feeds: dict[str, NDArray[Any]] = {TOKENS: tree.tokens, LENGTHS: lengths, **batch.adapter_feeds}
        if self._has_states:
            feeds[SURE_NODES] = np.full(num_slots, nodes if nodes == 1 else 0, dtype=np.int64)
        if not tree.is_chain:
            self._check_trees()
            feeds[TREE_MASK], feeds[PARENTS] = tree.mask(), tree.parents
        elif tree.parents is not chain_parents(num_slots, nodes):
            feeds[PARENTS] = tree.parents
            if int(self.lengths[:num_slots].max()) + nodes > self.max_seq_len:
                # Padding at the end of the cache must not have positions beyond the model's last.
                feeds[TREE_MASK] = tree.mask() & (np.arange(nodes) < tree.num_nodes[:, None])[:, :, None]
                feeds[TREE_MASK] |= np.eye(nodes, dtype=np.bool_)
        if not batch.is_greedy:
            feeds.update(self._draw_feeds(tree, batch))
        self.outputs = self.engine.run(feeds)
        return self._verdict(tree, batch, feeds, self.outputs)

    def _draw_feeds(self, tree: TokenTree, batch: SequenceBatch) -> dict[str, NDArray[Any]]:
        if batch.is_greedy:
            return {}
        feeds = {**batch.warp_feeds(), UNIFORMS: batch.tree_uniforms(tree)}
        if tree.draft_probs is not None and batch.is_drawn(tree):
            feeds[DRAFT_PROBS] = tree.draft_probs
        return feeds

    def _verdict(
        self, tree: TokenTree, batch: SequenceBatch, feeds: Mapping[str, NDArray[Any]], outputs: Outputs
    ) -> Verdict:
        verdict = Verdict(outputs[PATH], outputs[NUM_ACCEPTED], outputs[NEXT_TOKEN])
        if not batch.processed:
            return verdict
        probs = feeds.get(DRAFT_PROBS)
        draft_probs = None if probs is None else np.asarray(probs)
        logits = np.asarray(outputs[LOGITS])
        return verify_on_host(verdict, tree, batch.sequences, batch.processed, logits, feeds.get(UNIFORMS), draft_probs)

    def score_finite(self, tree: TokenTree, batch: SequenceBatch) -> tuple[TokenTree, Verdict]:
        """Scores a tree, and once more without the drafts of slots whose logits were not finite; returns the last.

        A row of NaN spoils all rows of its slot, as masked rows enter attention as 0 x NaN = NaN. So only the root's
        logits decide whether a sequence ends with an error (its verdict is spoilt). Drafts that are no tokens of the
        vocabulary are not scored at all.
        """
        if tree.nodes > 1 and (wrong := self._without_tokens(tree)):
            tree = tree.without_drafts(wrong)
        verdict = self.score(tree, batch)
        if (spoilt := verdict.spoilt()) and tree.nodes > 1:
            tree = tree.without_drafts(spoilt)
            verdict = self.score(tree, batch)
        return tree, verdict

    def _without_tokens(self, tree: TokenTree) -> list[int]:
        size = self.engine.spec.vocab_size
        rows = tree.tokens.tolist()  # a reduction of the array would take longer, see `Verdict`
        return [slot for slot, row in enumerate(rows) if size and not (min(row) >= 0 and max(row) < size)]

    def commit(self, tree: TokenTree, verdict: Verdict) -> None:
        """Keeps the rows of the accepted paths. A chain needs no copy: it is rolled back by its length."""
        lengths = self.lengths
        if self._compacts and not tree.is_chain and (verdict.path > np.arange(tree.nodes)).any():
            self.engine.compact(lengths[: tree.batch], verdict.path)
        for slot, num_accepted in enumerate(verdict.accepted):
            lengths[slot] = lengths.item(slot) + num_accepted + 1
