# SPDX-License-Identifier: Apache-2.0
"""The sequences being decoded, the requests that they are of, their slots, and the limits of each step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from numbers import Integral
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from speccompile.core.sampling import (
    ACCEPT_LANE,
    DRAFT_LANE,
    DRAFT_LANE_STEP,
    RACE_LANE,
    TARGET_LANE,
    uniform_words,
    uniforms,
    warp_inputs,
)
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.specs import ADAPTER, TEMPERATURE, TOP_K, TOP_P
from speccompile.core.tree import Floats, Ints, TokenTree
from speccompile.errors import RuntimeFault
from speccompile.runtime.grammars import GrammarMatcher
from speccompile.runtime.images import ImageData, PromptImages
from speccompile.runtime.logits_processors import LogitsProcessor
from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.requests import FAULTS, Images, Prompt, Speculation, StepOutput, text_from_fault
from speccompile.runtime.stats import SequenceStats
from speccompile.runtime.text import TextSink, Tokenizer

# Positions whose uniforms are made at once: a call of Philox takes 40 us for 100 draws as for one. A short text needs
# few, so a table has 16 at first, then 64, 256, 512 ...
LEAST_BLOCK, BLOCK = 16, 256
NUM_NEIGHBOURS = 8  # lanes that are made with one that is read: a chain reads those of all its depths
LANES = (TARGET_LANE, RACE_LANE)  # of a table, which has two words of the second


class UniformTable:
    """Draws of one seed for all positions from `start` on, made in blocks."""

    __slots__ = ("_lanes", "_start", "_table", "seed")

    def __init__(self, seed: int, start: int) -> None:
        self.seed, self._start = np.array([seed], dtype=np.uint64), start
        self._table = np.empty((3, 0), dtype=np.float32)
        self._lanes: dict[int, Floats] = {}  # the others, [NUM_NEIGHBOURS, num] each; made when one is first read

    def rows(self, start: int, end: int) -> Floats:
        """Returns [3, end - start] float32: target and two race draws of positions start .. end - 1."""
        while (block := self._next_block(self._table, end)) is not None:
            positions = np.broadcast_to(block, (len(LANES), len(block)))
            words = uniform_words(self.seed, positions, np.array(LANES)[:, None])
            self._table = np.concatenate((self._table, np.concatenate((words[0], words[1, 1:]))), axis=1)
        rows: Floats = self._table[:, start - self._start : end - self._start]
        return rows

    def lane(self, lane: int, start: int, end: int) -> Floats:
        """Returns draws of any lane at positions start .. end - 1, [end - start] float32."""
        group, row = divmod(lane, NUM_NEIGHBOURS)
        held = self._lanes.get(group, np.empty((NUM_NEIGHBOURS, 0), dtype=np.float32))
        while (block := self._next_block(held, end)) is not None:
            lanes = np.arange(group * NUM_NEIGHBOURS, (group + 1) * NUM_NEIGHBOURS)[:, None]
            made = uniforms(self.seed, np.broadcast_to(block, (NUM_NEIGHBOURS, len(block))), lanes)
            held = self._lanes[group] = np.concatenate((held, made), axis=1)
        draws: Floats = held[row, start - self._start : end - self._start]
        return draws

    def _next_block(self, table: Floats, end: int) -> Ints | None:
        num = table.shape[1]
        if self._start + num >= end:
            return None
        return self._start + np.arange(num, num + min(max(3 * num, LEAST_BLOCK), BLOCK), dtype=np.int64)


@dataclass(slots=True, eq=False, repr=False)
class TokenSequence:
    """One sequence, see `speccompile.core.protocols.TokenSequence`. `sink` makes text; None where none is needed."""

    index: int
    prompt: InitVar[list[int]]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    sink: TextSink | None
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    table: UniformTable | None = field(init=False)
    adapter: int = 0  # its number, see `specs.ADAPTER`
    draft_state: Any = None  # made by the proposer
    error: str | None = None  # the fault that ended it
    fault: Exception | None = None  # why its latest verdict is void, where its logits were finite
    grammar: GrammarMatcher | None = None  # of its text, if the request has one
    room: int = 0
    max_drafts: int = 0
    may_draft: bool = True  # False: the target would compact its caches by another verdict
    has_draft: bool = True  # see the protocol
    speculation: Speculation = "auto"
    handle: Any = None  # the `RequestHandle` of its request; None: it waits in no queue
    wants_trace: bool = False  # add the tree of every step to its step output
    logits_processor: LogitsProcessor | None = None  # made at its first verdict, if it needs logits
    images: PromptImages | None = None  # of its prompt, if that has some
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its new tokens, if the request asks for them
    prompt_logprobs: list[TokenLogprobs | None] = field(init=False)  # the same of its prompt; the first has none
    stats: SequenceStats = field(default_factory=SequenceStats)

    def __post_init__(self, prompt: list[int]) -> None:
        self.tokens, self.num_prompt, self.prompt_logprobs = list(prompt), len(prompt), [None]
        self.table = None if self.sampling.is_greedy else UniformTable(self.sampling.seed, len(prompt) - 1)

    @property
    def keys(self) -> list[int]:
        keys = self.tokens if self.images is None else self.images.keys(self.tokens)
        return keys if not self.adapter else [keys[0] + (self.adapter << 40), *keys[1:]]  # no cache is another's

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of its text; None where no text is made."""
        return None if self.sink is None else self.sink.tokenizer

    def plan(self, max_seq_len: int, limit: int | None = None) -> None:
        """Sets the limits of the next step, which needs the root's row and one row per draft.

        Args:
            max_seq_len: cache rows a sequence may use.
            limit: most draft tokens on a path; 0 applies only where `speculation` is `auto`; None: no such bound.
        """
        self.room = max_seq_len - len(self.tokens)  # rows left once the root has its own
        num_left = self.num_prompt + self.sampling.max_new_tokens - len(self.tokens)
        is_plain = self.speculation == "off" or not (self.may_draft and self.has_draft)
        self.max_drafts = 0 if is_plain else min(num_left - 1, self.room)
        if limit is not None and (limit > 0 or self.speculation == "auto"):
            self.max_drafts = min(self.max_drafts, limit)

    def emit(
        self,
        new: list[int],
        num_drafts: int,
        depth: int,
        is_bonus: bool,
        logprobs: Sequence[TokenLogprobs] = (),
        of_prompt: bool = False,
    ) -> StepOutput:
        """Appends a step's tokens `new`, the accepted drafts and the next token, up to the end of the text."""
        num_accepted = len(new) - 1
        reason, text = None, ""
        num_left = self.num_prompt + self.sampling.max_new_tokens - len(self.tokens)
        if len(new) >= num_left:
            new, reason = new[:num_left], "length"
        elif len(new) > self.room:
            reason = "cache_full"
        if self.stop_ids:
            for at, token in enumerate(new):
                if token in self.stop_ids:
                    new, reason = new[: at + 1], "stop"
                    break
        stop_string = None
        if self.sink is not None:
            text, used, is_stopped = self.sink.push(new)
            if not is_stopped and reason:
                text += self.sink.finish()
                is_stopped = self.sink.stop_string is not None
            if is_stopped:
                new, reason, stop_string = new[:used], "stop", self.sink.stop_string
        self.tokens += new
        stats = self.stats
        is_first = stats.num_tokens == 0 and self.sampling.prompt_logprobs is not None
        stats.num_tokens += len(new)
        stats.num_draft_tokens += num_drafts
        if of_prompt:
            stats.num_first_tokens += len(new)
        else:
            stats.outcomes[depth, num_accepted] += 1
        self.logprobs += (logprobs := logprobs[: len(new)])
        return StepOutput(
            self.index,
            text,
            new,
            num_drafts,
            num_accepted,
            is_bonus,
            reason,
            logprobs=logprobs,
            stop_string=stop_string,
            prompt_logprobs=self.prompt_logprobs if is_first else (),
        )

    def fail(self, fault: BaseException) -> StepOutput:
        """Returns the last step output of a sequence that a fault ends, with the text that was held back."""
        self.error = text_from_fault(fault)
        return StepOutput(self.index, self.text_left(), [], finish_reason="error", error=self.error)

    def text_left(self) -> str:
        """Returns the text that was held back, for an end between steps; empty where the sink fails."""
        try:
            return self.sink.finish() if self.sink is not None else ""
        except FAULTS:
            return ""


class RequestHandle:
    """Requests that were submitted as one, at most `timeout_s` seconds before their last token; to cancel them by."""

    def __init__(
        self,
        number: int,
        submitted_s: float,
        timeout_s: float | None = None,
        on_output: Callable[[StepOutput], None] = lambda step_output: None,
    ) -> None:
        self.number, self.submitted_s, self.on_output = number, submitted_s, on_output
        self.deadline_s = None if timeout_s is None else submitted_s + timeout_s
        self.open: list[TokenSequence] = []  # that have not ended
        self.is_waiting = True  # none of them has a slot yet

    def add(self, sequence: TokenSequence) -> None:
        """Adds a sequence, before the handle is added to a scheduler."""
        sequence.handle = self
        self.open.append(sequence)


class SequenceBatch:
    """The active sequences in slots 0 .. batch - 1. See `speccompile.core.protocols.Batch`.

    Args:
        is_invariant: texts do not depend on drafts or their number: drafts are deterministic, and sampled text is plain
            decoding's with the same seed. Then draft lengths may depend on measured times and other sequences.
    """

    def __init__(
        self, waiting: Iterable[TokenSequence], max_slots: int, is_invariant: bool = False, max_forced: int = 0
    ) -> None:
        self.max_forced = max_forced
        self.sequences: list[TokenSequence] = []
        self.waiting = tuple(waiting)
        self.max_slots = max_slots
        self.is_invariant = is_invariant
        self.is_greedy = True  # every sequence has temperature 0
        self.is_forced, self.least_drafts = False, 0  # see `Batch`
        self.processed: list[int] = []  # slot indices of sequences that need logits processors
        self.wants_logprobs = False
        self.adapter_feeds: dict[str, NDArray[Any]] = {}  # of the target; empty where no sequence has an adapter
        self._warp: dict[str, NDArray[Any]] = {}
        self._roots: TokenTree | None = None

    @classmethod
    def alone(cls, sequence: TokenSequence) -> SequenceBatch:
        (batch := cls((), 1)).sequences.append(sequence)
        batch.changed()
        return batch

    def changed(self) -> None:
        """Recomputes what depends on the sequences and their slots. Called after every change of `sequences`."""
        params, adapters = list[SamplingParams](), list[int]()
        self.processed, self.wants_logprobs = [], False
        for slot, sequence in enumerate(self.sequences):
            params.append(sequence.sampling)
            adapters.append(sequence.adapter)
            if sequence.sampling.needs_logits:
                self.processed.append(slot)
            self.wants_logprobs |= sequence.sampling.logprobs is not None
        self.is_greedy = all(p.is_greedy for p in params)
        self.adapter_feeds = {ADAPTER: np.array(adapters, dtype=np.int64)} if any(adapters) else {}
        self._warp, self._roots = {}, None
        if not self.is_greedy:
            temperature, top_k, top_p = warp_inputs(params)
            self._warp = {TEMPERATURE: temperature}
            if top_k.any():
                self._warp[TOP_K] = top_k
            if (top_p < 1).any():
                self._warp[TOP_P] = top_p

    def roots(self) -> TokenTree:
        """Returns the tree of the roots alone; its arrays are valid until the next call."""
        if self._roots is None or self._roots.batch != len(self.sequences):
            self._roots = TokenTree.chain(np.zeros((len(self.sequences), 1), dtype=np.int64))
        for slot, sequence in enumerate(self.sequences):
            self._roots.tokens[slot, 0] = sequence.tokens[-1]
        return self._roots

    @property
    def may_draw(self) -> bool:
        return not (self.is_greedy or self.is_invariant)

    def is_drawn(self, tree: TokenTree) -> bool:
        return tree.draft_probs is not None and not self.is_invariant

    def race_draws(self, depth: int) -> Floats:
        """See `Batch.race_draws`. The child of the root has position len(tokens)."""
        draws = np.zeros((len(self.sequences), 2), dtype=np.float32)
        for slot, sequence in enumerate(self.sequences):
            if sequence.table is not None:
                at = len(sequence.tokens) + depth - 1
                draws[slot] = sequence.table.rows(at, at + 1)[1:, 0]
        return draws

    def warp_feeds(self) -> dict[str, NDArray[Any]]:
        return self._warp

    def draft_uniforms(self, depth: int, num: int = 1) -> Floats:
        """See `Batch.draft_uniforms`. The child of the root has position len(tokens)."""
        draws = np.zeros((len(self.sequences), num), dtype=np.float32)
        for slot, sequence in enumerate(self.sequences):
            if sequence.table is not None:
                at = len(sequence.tokens) + depth - 1
                for index in range(num):
                    lane = DRAFT_LANE + index * DRAFT_LANE_STEP + depth
                    draws[slot, index] = sequence.table.lane(lane, at, at + 1)[0]
        return draws

    def tree_uniforms(self, tree: TokenTree) -> Floats:
        """Returns the draws that acceptance reads (`sampling.tree_uniforms`), [batch, nodes, 2] float32."""
        draws = np.zeros((tree.batch, tree.nodes, 2), dtype=np.float32)
        if self.is_greedy:
            return draws
        num_nodes, is_drawn = tree.num_nodes.tolist(), self.is_drawn(tree)
        for slot, (sequence, depths) in enumerate(zip(self.sequences, tree.depths(), strict=True)):
            if (table := sequence.table) is None:
                continue
            root, last = len(sequence.tokens) - 1, int(depths.max())
            rows = table.rows(root + 1, root + last + 2)
            if is_drawn and num_nodes[slot] > 1:
                accepts = [table.lane(ACCEPT_LANE + at, root + at, root + at + 1)[0] for at in range(1, last + 1)]
                draws[slot, :, 0], draws[slot, :, 1] = np.array([0, *accepts])[depths], rows[0, depths]
            else:
                draws[slot] = rows[1:, depths].T
        return draws

    def root_positions(self) -> Ints:
        """Returns the index of each root in its sequence, [batch] int64."""
        return np.array([len(sequence.tokens) - 1 for sequence in self.sequences], dtype=np.int64)


def match_arguments(
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    images: Images | None,
    defaults: SamplingParams,
) -> tuple[Sequence[Prompt], Sequence[SamplingParams], Sequence[Sequence[ImageData]]]:
    """Returns prompts, sampling parameters and images, as many of each; see `SpecEngine.generate`.

    Raises:
        RuntimeFault: their numbers differ, or `sampling` is something else.
    """
    are_many = isinstance(prompts, Sequence | np.ndarray) and not isinstance(prompts, str | bytes)
    are_many = are_many and not (len(prompts) > 0 and isinstance(prompts[0], Integral))
    given = cast("Sequence[Prompt]", prompts if are_many else [prompts])
    is_list = isinstance(sampling, Sequence)
    asked: Sequence[Any] = cast("Sequence[Any]", sampling) if is_list else [sampling or defaults] * len(given)
    if len(asked) != len(given):
        raise RuntimeFault("sampling", f"{len(asked)} entries", f"{len(given)}, as many as prompts", "Match them.")
    for params in asked:
        if not isinstance(params, SamplingParams):
            got, expected = f"a {type(params).__name__}", "SamplingParams, or one for each prompt"
            raise RuntimeFault("sampling", got, expected, "Write SamplingParams(temperature=0.8).")
    rows = cast("Sequence[Sequence[ImageData]]", [()] * len(given))
    if images is not None and len(images):
        rows = cast("Sequence[Sequence[ImageData]]", images if are_many else [images])
    if len(rows) != len(given):
        got, expected = f"{len(rows)} lists", f"{len(given)}, one for each prompt"
        raise RuntimeFault("images", got, expected, "Give an empty list where a prompt has none.")
    return given, asked, rows


def token_ids(index: int, prompt: Any) -> list[int]:
    """Returns the token ids of a prompt that is not a text. Raises RuntimeFault: it is not a list of whole numbers."""
    try:
        if isinstance(prompt, bytes | Mapping):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError as fault:
        got, todo = f"a {type(prompt).__name__}", "Give each prompt as a text, or as a list of whole numbers."
        raise RuntimeFault(f"prompt {index}", got, "a text, or token ids", todo) from fault
