# SPDX-License-Identifier: Apache-2.0
"""One decoding step of a ragged batch: plan, propose, score, commit, emit, learn."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np

from speccompile.core.acceptance import Verdict
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine, StepTimes
from speccompile.core.specs import LOGITS
from speccompile.core.tree import TokenTree
from speccompile.runtime.control import Planner
from speccompile.runtime.faults import FAULTS, NotFinite
from speccompile.runtime.grammar_drafts import forced_chains, read_grammars, within_grammars
from speccompile.runtime.host_verify import logprobs_of_step
from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.requests import StepOutput, trace_of_step
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
    if planner:
        proposer.observe(tree.batch, tree.nodes, times)
        planner.observe(batch.sequences, steps, times)
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
