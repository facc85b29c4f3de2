# SPDX-License-Identifier: Apache-2.0
"""The decoding loop: propose, verify, commit, emit, for a ragged batch; and its single-sequence oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from speccompile.core.acceptance import Verdict, accept
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import StepTimes
from speccompile.core.sampling import tree_uniforms, warp
from speccompile.core.specs import LENGTHS, LOGITS, TOKENS, TREE_MASK
from speccompile.core.tree import TokenTree
from speccompile.runtime.comparison import PLAIN
from speccompile.runtime.control import Planner
from speccompile.runtime.faults import FAULTS, NotFinite
from speccompile.runtime.grammar_drafts import forced_chains, read_grammars, within_grammars
from speccompile.runtime.host_verify import logprobs_of_step, verify_on_host
from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.prompts import read_chunk
from speccompile.runtime.sequences import SequenceBatch, Step, TokenSequence
from speccompile.runtime.stats import TimedEngine
from speccompile.runtime.verifier import Verifier


def decode(
    verifier: Verifier,
    proposer: Proposer,
    batch: SequenceBatch,
    engines: tuple[TimedEngine, ...] = (),
    planner: Planner | None = None,
) -> Iterator[list[Step]]:
    """Decodes every sequence of `batch` to its end.

    Between two yields the caches are consistent. A caller may stop iterating at any time without cleaning up: the next
    run starts with empty lengths.

    Args:
        engines: their time is counted apart from the loop's own.
        planner: bounds the drafts of steps whose text does not depend on them; None: no bound, and costs stay those
            recorded in the bundle.

    Yields:
        One step for each active sequence, by slot; and before those the first steps of sequences whose prompts were
        read, where that gave their first tokens.
    """
    if first := admit(verifier, proposer, batch, planner):
        yield first
    limit, num_rests, num_rested, rested_s = None, 0, 0, 0.0  # see `Planner.num_rests`
    told_s = 0.0  # that the planner took to learn from the last step
    while batch.sequences:
        start_s = perf_counter()
        # Where drafts are drawn the text depends on them, so a planner, which uses measured times, must not decide.
        asked, active = None if batch.may_draw else planner, batch.sequences
        if num_rested == 0:
            limit = asked.plan(active) if asked else None
            num_rests = asked.num_rests if asked else 0
        round_ = run_step(verifier, proposer, batch, engines, limit)
        steps = round_.steps
        is_end = bool([step for step in steps if step.finish_reason is not None])
        if asked and num_rests:
            num_rested, rested_s = num_rested + 1, rested_s + round_.times.step_s
            if is_end or num_rested == num_rests:
                asked.rested(active, num_rested, rested_s)
                num_rested, rested_s = 0, 0.0
        elif asked:
            proposer.observe(round_.tree.batch, round_.tree.nodes, round_.times)
            # Steps with drafts are planned and learnt from one by one, plain ones in rests are not: it is a part of
            # what drafts cost, with several drafters 28 us.
            end_s = perf_counter()
            step_s = round_.times.step_s if limit == PLAIN else told_s + end_s - start_s
            asked.observe(active, steps, round_.times._replace(step_s=step_s))
            told_s = perf_counter() - end_s
        yield steps
        if is_end:
            first = retire(verifier, proposer, batch, steps, planner)
            if first := first + admit(verifier, proposer, batch, planner):
                yield first


FORCED_LENGTH = 4  # of chains, and depth of trees, where a request forces drafts and the planner gives no length


class Round(NamedTuple):
    """One step of a batch.

    Args:
        verdict: on the tree; its arrays are valid until the target runs again.
    """

    tree: TokenTree
    verdict: Verdict
    steps: list[Step]
    times: StepTimes


def run_step(
    verifier: Verifier,
    proposer: Proposer,
    batch: SequenceBatch,
    engines: tuple[TimedEngine, ...] = (),
    limit: int | None = None,
) -> Round:
    """Runs one step of the active sequences: propose, score, commit, emit.

    Args:
        batch: at least one is active.
        engines: their time is counted apart from the loop's own.
    """
    start_s, engine_s = perf_counter(), _seconds(engines)
    # A method's budget may draft nothing; sequences with `on` get drafts nevertheless.
    is_asked, is_plain = "on" in [sequence.speculation for sequence in batch.sequences], True
    is_forced = is_asked and not limit
    has_draft = False
    for sequence in batch.sequences:
        bound = FORCED_LENGTH if is_forced and (limit is None or sequence.speculation == "on") else limit
        sequence.plan(verifier.max_seq_len, bound)
        is_plain = is_plain and not sequence.max_drafts
        has_draft = has_draft or sequence.has_draft
    batch.is_forced, batch.least_drafts = bool(limit) or is_forced, FORCED_LENGTH if is_asked else 0
    if batch.processed:
        read_grammars(batch)
    forced = forced_chains(batch) if batch.processed else None
    is_plain = is_plain or forced is not None
    if is_plain and has_draft:
        proposer.flush()  # the target is about to run, and its last outputs were not read
    tree = forced or (batch.roots() if is_plain else proposer.propose(batch))
    if batch.processed:
        tree = within_grammars(batch, tree)
    proposed_s = perf_counter()
    tree, verdict = verifier.score_finite(tree, batch)
    logprobs = None
    if batch.wants_logprobs:
        logprobs = logprobs_of_step(verdict, tree, batch.sequences, np.asarray(verifier.outputs[LOGITS]))
    scored_s = perf_counter()
    verifier.commit(tree, verdict)
    if not is_plain:
        proposer.commit(batch, tree, verdict, verifier.outputs)
    elif has_draft:
        proposer.skip(batch, verdict, verifier.outputs)
    for slot in verdict.spoilt():
        for engine in engines or (verifier.engine,):
            engine.clear_slot(slot)
    steps = emit(tree, verdict, batch, logprobs)
    engine_s = _seconds(engines) - engine_s
    now_s = perf_counter()
    for sequence in batch.sequences:
        sequence.stats.add_times(now_s, now_s - start_s, engine_s)
    return Round(tree, verdict, steps, StepTimes(proposed_s - start_s, scored_s - proposed_s, now_s - start_s))


def _seconds(engines: tuple[TimedEngine, ...]) -> float:
    total = 0.0
    for engine in engines:
        total += engine.seconds
    return total


def emit(
    tree: TokenTree,
    verdict: Verdict,
    batch: SequenceBatch,
    logprobs: Mapping[int, Sequence[TokenLogprobs]] | None = None,
) -> list[Step]:
    """Gives each sequence the tokens of its path and the next token.

    A sequence ends with an error where its logits are not finite, its grammar or making its text fails.

    Args:
        logprobs: of the new tokens, by slot index, of the sequences that ask for them.
    """
    accepted, following, drafts = verdict.accepted, verdict.following, tree.num_nodes.tolist()
    steps, deepest = [], []
    if not tree.is_chain:
        deepest = [max(row[:num]) for row, num in zip(tree.depths().tolist(), drafts, strict=True)]
    for slot, sequence in enumerate(batch.sequences):
        if following[slot] < 0:
            steps.append(sequence.fail(sequence.fault or NotFinite(len(sequence.tokens))))
            continue
        num, num_drafts = accepted[slot], drafts[slot] - 1
        if tree.is_chain:
            new, depth = tree.tokens[slot, 1 : num + 1].tolist() if num else [], num_drafts
            is_bonus = 0 < num == num_drafts
        else:
            path = verdict.path[slot, : num + 1]
            new, depth = tree.tokens[slot, path[1:]].tolist(), deepest[slot]
            is_bonus = num > 0 and not tree.children(slot, int(path[-1]))
        new.append(following[slot])
        try:
            told = logprobs.get(slot, ()) if logprobs else ()
            steps.append(sequence.emit(new, num_drafts, depth, is_bonus, told))
        except FAULTS as fault:
            steps.append(sequence.fail(fault))
    return steps


def admit(verifier: Verifier, proposer: Proposer, batch: SequenceBatch, planner: Planner | None = None) -> list[Step]:
    """Gives free slots to waiting sequences and reads their prompts.

    Returns:
        The first steps of those whose first tokens came with their prompts; one that has ended has no slot.
    """
    if not batch.waiting or len(batch.sequences) == batch.max_slots:
        return []
    first: list[Step] = []
    while batch.waiting and len(batch.sequences) < batch.max_slots:
        _start_sequence(verifier, proposer, batch, len(batch.sequences), first, planner)
    batch.changed()
    return first


def retire(
    verifier: Verifier, proposer: Proposer, batch: SequenceBatch, steps: list[Step], planner: Planner | None = None
) -> list[Step]:
    """Frees the slots of finished sequences: the next waiting one, or else the last active one, takes each.

    Returns:
        See `admit`.
    """
    first: list[Step] = []
    for slot in reversed(range(len(steps))):
        if steps[slot].finish_reason is None:
            continue
        while batch.waiting:
            if _start_sequence(verifier, proposer, batch, slot, first, planner):
                break
        else:
            last = len(batch.sequences) - 1
            if slot < last:
                for cache in (verifier.cache, *proposer.caches):
                    cache.move(last, slot)
                batch.sequences[slot] = batch.sequences[last]
            batch.sequences.pop()
    batch.changed()
    return first


def needs_draft(proposer: Proposer, planner: Planner | None, batch: SequenceBatch, sequence: TokenSequence) -> bool:
    """Returns whether the draft reads the prompt of a new sequence, and sets `has_draft`.

    A draft that cannot read a prompt later has no part in a sequence for which no drafts are expected: neither its
    prompt nor its steps cost more than plain decoding's.

    Args:
        planner: of the batch; None: drafts are expected.
    """
    is_drawn = not (
        batch.is_invariant or sequence.sampling.is_greedy
    )  # its text depends on drafts: no clock may decide
    is_free = sequence.speculation == "auto" and not is_drawn
    is_expected = planner is None or not is_free or planner.expects_drafts(len(batch.sequences) + 1)
    is_expected = is_expected and sequence.may_draft and sequence.speculation != "off"
    sequence.has_draft = is_expected or proposer.catches_up
    return is_expected


def _start_sequence(
    verifier: Verifier,
    proposer: Proposer,
    batch: SequenceBatch,
    slot: int,
    first: list[Step],
    planner: Planner | None = None,
) -> bool:
    """Reads the prompt of the next waiting sequence into a slot; returns whether the sequence goes on from there.

    Args:
        first: its first step is added, where reading the prompt gives one.
    """
    sequence = batch.waiting.popleft()
    stats, draft_s, end = sequence.stats, 0.0, None
    stats.start_s = perf_counter()
    reads = needs_draft(proposer, planner, batch, sequence)
    proposer.start(slot, sequence)
    verifier.lengths[slot], alone = 0, SequenceBatch.alone(sequence)
    while verifier.lengths[slot] < sequence.num_prompt - 1:
        chunk = read_chunk(verifier, proposer, slot, alone, reads)
        draft_s += chunk.draft_s
        if chunk.step is not None:
            first.append(chunk.step)
            end = chunk.step.finish_reason
    if planner:
        planner.read(sequence.num_prompt - 1, draft_s if reads else None)
    stats.end_s = perf_counter()
    stats.prefill_s = stats.end_s - stats.start_s
    if end is not None:
        return False
    batch.sequences[slot : slot + 1] = [sequence]
    return True


def decode_one(verifier: Verifier, proposer: Proposer, sequence: TokenSequence) -> Iterator[list[int]]:
    """Decodes one sequence, with acceptance in numpy on the target's logits: the oracle of `decode`.

    Yields:
        The new tokens of each step.
    """
    engine, params, batch = verifier.engine, sequence.sampling, SequenceBatch.alone(sequence)
    proposer.start(0, sequence)
    for nodes, start, outputs in verifier.prefill(0, sequence.tokens, sequence.images):
        proposer.prefill(0, sequence, nodes, start, outputs)
    reason, is_first = None, sequence.num_prompt > 1 and verifier.may_read_last  # the first token comes without drafts
    while reason is None:
        sequence.plan(verifier.max_seq_len)
        tree = batch.roots() if is_first else proposer.propose(batch)  # node 0 is the root
        lengths = verifier.lengths[:1]
        outputs = engine.run({TOKENS: tree.tokens, LENGTHS: lengths, TREE_MASK: tree.mask()})
        probs = warp(outputs[LOGITS], [params.temperature], [params.top_k], [params.top_p])
        seeds = np.array([params.seed], dtype=np.uint64)
        draws = tree_uniforms(seeds, batch.root_positions(), tree)
        verdict = accept(tree, probs, draws)
        if params.needs_logits:
            verdict = verify_on_host(verdict, tree, batch.sequences, [0], outputs[LOGITS], draws, tree.draft_probs)
        verifier.commit(tree, verdict)
        if is_first:
            proposer.skip(batch, verdict, outputs)
        else:
            proposer.commit(batch, tree, verdict, outputs)
        [step] = emit(tree, verdict, batch)
        reason, is_first = step.finish_reason, False
        yield step.tokens
