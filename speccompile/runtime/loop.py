# SPDX-License-Identifier: Apache-2.0
"""One decoding step of a ragged batch: plan, propose, score, commit, emit, learn; and one chunk of a prompt.

The last chunk of a prompt gives the first new token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

import numpy as np

from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine, Outputs, StepTimes
from speccompile.core.specs import LOGITS, NEXT_TOKEN
from speccompile.core.tree import TokenTree, Verdict
from speccompile.drafting.grammars import chains_within
from speccompile.runtime.control import Planner
from speccompile.runtime.grammars import GrammarFault
from speccompile.runtime.host_verify import logprobs_of_step
from speccompile.runtime.logprobs import TokenLogprobs, prompt_logprobs
from speccompile.runtime.requests import FAULTS, NotFinite, StepOutput, trace_of_step
from speccompile.runtime.sequences import SequenceBatch
from speccompile.runtime.verifier import Verifier

_log = logging.getLogger(__name__)
FORCED_LENGTH = 4  # of chains, and depth of trees, where a request forces drafts and the planner gives no length


def run_step(
    verifier: Verifier,
    proposer: Proposer,
    batch: SequenceBatch,
    engines: Sequence[Engine] = (),
    planner: Planner | None = None,
) -> tuple[list[StepOutput], StepTimes]:
    """Runs one step of the active sequences (at least one); between two steps the caches are consistent.

    Args:
        engines: their time is counted apart from the step's own.
        planner: bounds the drafts; None: no bound, and costs stay those recorded in the bundle.

    Returns:
        The step outputs by slot, and the times of the step, planning included.
    """
    start_s, engine_s = perf_counter(), 0.0
    for engine in engines:
        engine_s -= engine.seconds
    # Where drafts are drawn the text depends on them, so a planner, which uses measured times, must not decide.
    planner = None if batch.may_draw else planner
    drafts, reads = _plan(verifier, batch, planner.plan(batch.sequences) if planner else None)
    forced = None
    if batch.processed:
        read_grammars(batch)
        forced = forced_chains(batch)
    drafts = drafts and forced is None
    if reads and not drafts:
        proposer.flush()  # the target is about to run, and its last outputs were not read
    tree = forced or (proposer.propose(batch) if drafts else batch.roots())
    if batch.processed:
        tree = within_grammars(batch, tree)
    proposed_s = perf_counter()
    tree, verdict = verifier.score_finite(tree, batch)
    outputs, logprobs = verifier.outputs, None
    if batch.wants_logprobs:
        logprobs = logprobs_of_step(verdict, tree, batch.sequences, np.asarray(outputs[LOGITS]))
    scored_s = perf_counter()
    verifier.commit(tree, verdict)
    if drafts:
        proposer.commit(batch, tree, verdict, outputs)
    elif reads:
        proposer.skip(batch, verdict, outputs)
    for slot in verdict.spoilt():
        for spoilt in engines or (verifier.engine,):
            spoilt.clear_slot(slot)
    steps = emit(tree, verdict, batch, logprobs)
    for engine in engines:
        engine_s += engine.seconds
    now_s = perf_counter()
    times = StepTimes(proposed_s - start_s, scored_s - proposed_s, now_s - start_s)
    for sequence in batch.sequences:
        stats, stats.end_s = sequence.stats, now_s
        stats.step_s += times.step_s
        stats.engine_s += engine_s
    if planner and planner.observe(batch.sequences, steps, times):
        proposer.observe(tree.batch, tree.nodes, times)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%d sequences: %d drafts, %d accepted, %.2f ms", *_counts(steps), times.step_s * 1e3)
    return steps, times


def _counts(steps: Sequence[StepOutput]) -> tuple[int, int, int]:
    return len(steps), sum(step.num_draft_tokens for step in steps), sum(step.num_accepted for step in steps)


def _plan(verifier: Verifier, batch: SequenceBatch, limit: int | None) -> tuple[bool, bool]:
    """Sets the limits of the step. Returns whether any sequence drafts, and whether the draft reads any of them."""
    is_asked = drafts = reads = False
    for sequence in batch.sequences:
        is_asked = is_asked or sequence.speculation == "on"
    is_forced = is_asked and not limit
    for sequence in batch.sequences:
        is_bounded = is_forced and (limit is None or sequence.speculation == "on")
        sequence.plan(verifier.max_seq_len, FORCED_LENGTH if is_bounded else limit)
        drafts = drafts or sequence.max_drafts > 0
        reads = reads or sequence.has_draft
    batch.is_forced, batch.least_drafts = bool(limit) or is_forced, FORCED_LENGTH if is_asked else 0
    return drafts, reads


def emit(
    tree: TokenTree,
    verdict: Verdict,
    batch: SequenceBatch,
    logprobs: Mapping[int, Sequence[TokenLogprobs]] | None = None,
) -> list[StepOutput]:
    """Gives each sequence the tokens of its path and the next token, with `logprobs` by slot index.

    A sequence ends with an error where its logits are not finite, its grammar or making its text fails.
    """
    accepted, following, nums = verdict.accepted, verdict.following, tree.num_nodes.tolist()
    deepest = []
    if not tree.is_chain:
        deepest = [max(row[:num]) for row, num in zip(tree.depths().tolist(), nums, strict=True)]
    steps = []
    for slot, sequence in enumerate(batch.sequences):
        if following[slot] < 0:
            steps.append(sequence.fail(sequence.fault or NotFinite(len(sequence.tokens))))
            continue
        num, depth = accepted[slot], nums[slot] - 1
        if tree.is_chain:
            new = tree.tokens[slot, 1 : num + 1].tolist() if num else []
            is_bonus = 0 < num == depth
        else:
            path, depth = verdict.path[slot, : num + 1], deepest[slot]
            new = tree.tokens[slot, path[1:]].tolist()
            is_bonus = num > 0 and not tree.children(slot, int(path[-1]))
        new.append(following[slot])
        try:
            step = sequence.emit(new, nums[slot] - 1, depth, is_bonus, logprobs.get(slot, ()) if logprobs else ())
        except FAULTS as fault:
            step = sequence.fail(fault)
        if sequence.wants_trace and step.finish_reason != "error":
            step = step._replace(trace=trace_of_step(sequence.tokenizer, tree, verdict, slot))
        steps.append(step)
    return steps


class Chunk(NamedTuple):
    """What reading a chunk of a prompt gave."""

    num: int
    step: StepOutput | None  # with the first new token, where the prompt's last was read; it may end the sequence
    draft_s: float  # seconds that the draft took
    fault: BaseException | None = None  # of the draft, where there is a step, which comes before it


def read_chunk(
    verifier: Verifier, proposer: Proposer, slot: int, alone: SequenceBatch, reads: bool, most: int | None = None
) -> Chunk:
    """Reads the next chunk of a prompt. Raises NotFinite: a chunk is not; the slot is cleared."""
    sequence, start = alone.sequences[0], int(verifier.lengths[slot])
    if alone.processed:
        read_grammars(alone)
    nodes, outputs, verdict = verifier.read(slot, sequence.tokens, most, sequence.images, alone)
    if NEXT_TOKEN in outputs and outputs[NEXT_TOKEN][0] < 0:
        _clear(verifier, proposer, slot)
        raise NotFinite(start + nodes.shape[1])
    if (num_told := sequence.sampling.prompt_logprobs) is not None:
        after = sequence.tokens[start + 1 : start + 1 + nodes.shape[1]]
        told = prompt_logprobs(np.asarray(outputs[LOGITS])[0], after, num_told)
        sequence.prompt_logprobs[start + 1 :] = told  # of a prompt that is read again, too
    step = None
    if verdict is not None:
        step = _first_step(verifier, alone, outputs, verdict)
    draft_start_s, fault = perf_counter(), None
    if reads and (step is None or step.finish_reason is None):
        try:
            proposer.prefill(slot, sequence, nodes, start, outputs)
        except FAULTS as raised:
            if step is None:
                raise
            fault = raised
    return Chunk(nodes.shape[1], step, perf_counter() - draft_start_s, fault)


def read_prompts(verifier: Verifier, proposer: Proposer, batch: SequenceBatch) -> None:
    """Gives the first slots to `batch.waiting` and reads their prompts whole, for steps without a scheduler."""
    for slot, sequence in enumerate(batch.waiting):
        proposer.start(slot, sequence)
        verifier.lengths[slot], alone = 0, SequenceBatch.alone(sequence)
        while verifier.lengths[slot] < sequence.num_prompt - 1:
            if fault := read_chunk(verifier, proposer, slot, alone, sequence.speculation != "off").fault:
                raise fault
        batch.sequences.append(sequence)
    batch.changed()


def _first_step(verifier: Verifier, alone: SequenceBatch, outputs: Outputs, verdict: Verdict) -> StepOutput:
    [sequence] = alone.sequences
    sequence.plan(verifier.max_seq_len, 0)
    if verdict.following[0] < 0:
        return sequence.fail(sequence.fault or NotFinite(len(sequence.tokens)))
    logprobs: Sequence[TokenLogprobs] = ()
    logits = np.asarray(outputs[LOGITS]) if alone.wants_logprobs else None
    try:
        if logits is not None:
            logprobs = logprobs_of_step(verdict, alone.roots(), alone.sequences, logits)[0]
        root = alone.roots() if sequence.wants_trace else None
        step = sequence.emit([verdict.following[0]], 0, 0, False, logprobs, of_prompt=True)
        return step if root is None else step._replace(trace=trace_of_step(sequence.tokenizer, root, verdict, 0))
    except FAULTS as fault:
        return sequence.fail(fault)


def _clear(verifier: Verifier, proposer: Proposer, slot: int) -> None:
    for cache in (verifier.cache, *proposer.caches):
        cache.engine.clear_slot(slot)


def read_grammars(batch: SequenceBatch) -> None:
    """Makes the grammars follow the texts, before drafts are made; what fails here is reported with the verdict."""
    for sequence in batch.sequences:
        if sequence.grammar is not None:
            with suppress(GrammarFault):
                sequence.grammar.read(sequence.tokens)


def forced_chains(batch: SequenceBatch) -> TokenTree | None:
    """Returns chains of the tokens that the grammars force; None unless every sequence has some.

    They cost no draft, and are verified. There are none where texts depend on drafts, as one sequence's drafts must not
    depend on the others.
    """
    if batch.may_draw or not batch.max_forced:
        return None
    rows = []
    for sequence in batch.sequences:
        if sequence.grammar is None or sequence.speculation == "off" or not sequence.may_draft:
            return None
        num = min(
            sequence.num_prompt + sequence.sampling.max_new_tokens - len(sequence.tokens) - 1,
            sequence.room,
            batch.max_forced,
        )
        forced = sequence.grammar.forced()[: max(num, 0)]
        if not forced:
            return None
        rows.append([sequence.tokens[-1], *forced])
    return TokenTree.ragged(rows)


def within_grammars(batch: SequenceBatch, tree: TokenTree) -> TokenTree:
    """Returns a step's drafts without what the grammars refuse, where they are chains."""
    if not tree.is_chain or tree.nodes == 1:
        return tree
    return chains_within(batch, tree, is_drawn=batch.is_drawn(tree))
