# SPDX-License-Identifier: Apache-2.0
"""Sampled text against the exact joint distribution of its first tokens, computed from the target's own logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from speccompile.certificate.chi_square import ALPHA, POWER, Fit, counts_of, fit
from speccompile.certificate.decoding import (
    Prompts,
    decode_with,
    drafts_nothing,
    gives_logits,
    next_logits,
    plain_proposer,
)
from speccompile.certificate.faults import may_draft_trees
from speccompile.certificate.results import Check, DraftCounts, check_of, not_run
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Batch
from speccompile.core.sampling import draw, warp
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.tree import Floats, TokenTree
from speccompile.drafting.proposer import looks_up
from speccompile.errors import SpecCompileError
from speccompile.runtime.requests import Speculation
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.speculators.none.config import NoneProposer

SAMPLED, PLAIN, METHOD = "sampled", "plain", "the method's drafts"
NUM_TOKENS, PROMPT_TOKENS = 3, 4
MOST_PROMPTS = 3  # among which the one with the broadest distribution is chosen
TEMPERATURE, TOP_K, TOP_P = 1.0, 5, 0.98
NUM_SAMPLES = 1200
STRAY_MASS = 0.1  # of a planted draft distribution, on a token that the target excludes

Text = tuple[int, ...]
Rows = dict[Text, dict[int, float]]  # after each beginning of a text: the probabilities of the next token
Runs = dict[str, tuple[Proposer, Speculation]]  # by name: whose drafts, and whether they are forced, see `make_slots`
Tell = Callable[[int, int], None]  # texts that have ended, of all runs, and how many there are
ProbsAfter = Callable[[Text, Floats], Floats]  # a beginning and the logits after it: the distribution of the next token


def free_probs(text: Text, logits: Floats) -> Floats:
    """Returns the distribution of the next token of a text that may go on as it likes, [vocab] float32."""
    probs: Floats = warp(logits[None], [TEMPERATURE], [TOP_K], [TOP_P])[0]
    return probs


def exact_rows(engine: SpecEngine, prompt: Sequence[int], probs_after: ProbsAfter = free_probs) -> Rows:
    """Returns the target's distributions after every beginning that may come, from steps of one node."""
    rows: Rows = {}
    level: list[Text] = [()]
    for _ in range(NUM_TOKENS):
        following = []
        for text in level:
            probs = probs_after(text, next_logits(engine, [*prompt, *text])).astype(np.float64)
            rows[text] = {int(token): float(probs[token] / probs.sum()) for token in np.flatnonzero(probs)}
            following += [(*text, token) for token in rows[text]]
        level = following
    return rows


def joint_of(rows: Rows) -> dict[Text, float]:
    joint: dict[Text, float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        joint = {(*text, token): mass * p for text, mass in joint.items() for token, p in rows[text].items()}
    return joint


class DrawnDrafts(NoneProposer):
    """Drafts drawn from distributions far from the target's: chains of three, or trees with two siblings a level.

    Where the likeliest and the least likely token change places and a tenth of the mass is on an excluded token, a
    wrong residual or acceptance changes the text's joint distribution. Beyond `exact_rows` nothing is drafted.
    """

    may_draw = True

    def __init__(self, rows: Rows, vocab_size: int, is_tree: bool) -> None:
        self.vocab_size, self.is_tree = vocab_size, is_tree
        self.dists = {text: _reversed(row, vocab_size) for text, row in rows.items()}

    def propose(self, batch: Batch) -> TokenTree:
        drafts = [self._drafts(batch, slot, sequence) for slot, sequence in enumerate(batch.sequences)]
        width = 1 + max(len(tokens) for tokens, _, _ in drafts)
        if width == 1:
            return super().propose(batch)
        tokens = np.zeros((len(drafts), width), np.int64)
        parents = np.full(tokens.shape, -1, np.int64)
        probs = np.zeros((*tokens.shape, self.vocab_size), np.float32)
        for slot, (drafted, above, dists) in enumerate(drafts):
            tokens[slot] = batch.sequences[slot].tokens[-1]
            for node, (token, parent, dist) in enumerate(zip(drafted, above, dists, strict=True), start=1):
                tokens[slot, node], parents[slot, node], probs[slot, node] = token, parent, dist
        num_nodes = np.array([1 + len(drafted) for drafted, _, _ in drafts], np.int64)
        if self.is_tree:
            return TokenTree.tree(tokens, parents, num_nodes, probs)
        return TokenTree.chain(tokens, num_nodes, probs)

    def _drafts(self, batch: Batch, slot: int, sequence: Any) -> tuple[list[int], list[int], list[Floats]]:
        """Returns the tokens of one sequence, their parents and the distributions that they are drawn from."""
        text = tuple(sequence.tokens[sequence.num_prompt :])
        tokens: list[int] = []
        parents: list[int] = []
        dists: list[Floats] = []
        level: list[tuple[Text, int]] = [(text, 0)]
        for depth in range(1, min(sequence.max_drafts, NUM_TOKENS - len(text)) + 1):
            num = 2 if self.is_tree and depth < NUM_TOKENS else 1
            draws = batch.draft_uniforms(depth, num * len(level))[slot].tolist()
            following = []
            for (begun, parent), _ in itertools.product(level, range(num)):
                if (dist := self.dists.get(begun)) is not None:
                    token = int(draw(dist, draws.pop()))
                    tokens.append(token)
                    parents.append(parent)
                    dists.append(dist)
                    following.append(((*begun, token), len(tokens)))
            level = following
        return tokens, parents, dists


def _reversed(row: Mapping[int, float], vocab_size: int) -> Floats:
    dist = np.zeros(vocab_size, np.float32)
    tokens = sorted(row, key=lambda token: row[token])
    for token, mass in zip(tokens, sorted(row.values(), reverse=True), strict=True):
        dist[token] = 0.5 * mass + 0.5 / len(row)
    stray = next(token for token in range(vocab_size) if token not in row)
    dist *= 1 - STRAY_MASS
    dist[stray] = STRAY_MASS
    normed: Floats = dist / dist.sum()
    return normed


def choose_prompt(
    engine: SpecEngine, prompts: Prompts, length: int, probs_after: ProbsAfter = free_probs, *, repeats: bool = False
) -> tuple[list[int], Rows]:
    """Returns the beginning of a prompt after which the likeliest text is least likely, and its distributions.

    With `repeats` a likely text and the beginning again follow, so that a lookup finds drafts.
    """
    begun = [list(prompt[:length]) for prompt in prompts[:MOST_PROMPTS]]
    found = [(prompt, exact_rows(engine, prompt, probs_after)) for prompt in begun]
    prompt, rows = min(found, key=lambda pair: max(joint_of(pair[1]).values()))
    if not repeats:
        return prompt, rows
    joint, again = joint_of(rows), prompt if looks_up(engine.proposer) else []
    texts = sorted(joint, key=joint.__getitem__, reverse=True)[:MOST_PROMPTS]
    made = [[*prompt, *text, *again] for text in texts]
    return min(
        ((longer, exact_rows(engine, longer, probs_after)) for longer in made),
        key=lambda pair: max(joint_of(pair[1]).values()),
    )


def make_runs(engine: SpecEngine, rows: Rows, depth: int) -> Runs:
    """Returns the proposers whose texts are tested, and how they are asked to draft."""
    size, most = engine.verifier.engine.spec.vocab_size, engine.context.max_draft_nodes
    runs: Runs = {PLAIN: (plain_proposer(), "auto")}
    if not drafts_nothing(engine):
        runs[METHOD] = (engine.proposer, "on")
    if size > TOP_K and most >= depth:
        runs["planted chains"] = (DrawnDrafts(rows, size, is_tree=False), "auto")
    if may_draft_trees(engine) and size > TOP_K and most >= sum((2, 4, 4)[:depth]):
        runs["planted trees"] = (DrawnDrafts(rows, size, is_tree=True), "auto")
    return runs


def fit_runs(
    engine: SpecEngine,
    prompt: Sequence[int],
    rows: Rows,
    runs: Runs,
    asked: Sequence[SamplingParams],
    tell: Tell = lambda done, total: None,
) -> tuple[dict[str, Fit], list[dict[str, Any]]]:
    """Returns by run the test of its texts, and what was seen of it, JSON-ready; a run that fails does not pass."""
    joint, fits, found = joint_of(rows), dict[str, Fit](), []
    batch_size = min(engine.context.max_slots, len(asked))
    shortest = [replace(params, max_new_tokens=NUM_TOKENS) for params in asked]  # later tokens are for drafts alone
    for at, (name, (proposer, speculation)) in enumerate(runs.items()):
        params, prompts = shortest if name == PLAIN else asked, [prompt] * len(asked)
        told = _tell_run(tell, at * len(asked), len(runs) * len(asked))
        try:
            decoded = decode_with(
                engine, proposer, prompts, params, batch_size=batch_size, speculation=speculation, tell=told
            )
        except SpecCompileError as fault:
            fits[name] = Fit(num_samples=0, num_cells=0, statistic=0.0, p_value=0.0, noticed_effect=0.0)
            found.append({"run": name, "fault_raised": str(fault)})
            continue
        fits[name] = fit(counts_of(decoded.texts, NUM_TOKENS), joint)
        found.append({"run": name, **fits[name].json_from_fit(), **decoded.facts()})
        if decoded.errors:
            found[-1]["first_error"] = decoded.errors[0]
    return fits, found


def _tell_run(tell: Tell, before: int, total: int) -> Callable[[int], None]:
    return lambda num_ended: tell(before + num_ended, total)


def check_sampled(
    engine: SpecEngine, prompts: Prompts, num_samples: int = NUM_SAMPLES, tell: Tell = lambda done, total: None
) -> Check:
    """Draws texts with many seeds, plain and with drafts, and tests their first tokens by chi-square."""
    if not gives_logits(engine):
        return not_run(SAMPLED, "the target keeps its logits to itself (engine.logits: false)")
    prompt, rows = choose_prompt(engine, prompts, PROMPT_TOKENS, repeats=looks_up(engine.proposer))
    asked = [
        SamplingParams(NUM_TOKENS + 1, temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, seed=seed, ignore_eos=True)
        for seed in range(num_samples)
    ]
    fits, found = fit_runs(engine, prompt, rows, make_runs(engine, rows, NUM_TOKENS), asked, tell)
    facts = {
        "prompt": prompt,
        "num_tokens": NUM_TOKENS,
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "top_p": TOP_P,
        "alpha": ALPHA,
        "power": POWER,
        "runs": found,
    }
    return check_of(SAMPLED, are_right(fits), text_from_fits(num_samples, fits), facts, counts_of_runs(found))


def counts_of_runs(found: Iterable[Mapping[str, Any]]) -> DraftCounts | None:
    """Returns what the runs with drafts scored, of the rows of `fit_runs`; None where there is plain decoding alone."""
    drafting = [row for row in found if row["run"] != PLAIN]
    counts = {row["run"]: (row.get("num_draft_tokens", 0), row.get("num_steps", 0)) for row in drafting}
    return DraftCounts(counts) if counts else None


def are_right(fits: Mapping[str, Fit]) -> bool:
    return all(test.is_right for test in fits.values())


def text_from_fits(num_samples: int, fits: Mapping[str, Fit], dist: str = "the target's distribution") -> str:
    """Returns one sentence about tests of texts, and what they would have noticed."""
    wrong = [name for name, test in fits.items() if not test.is_right]
    least = min(test.p_value for test in fits.values())
    distance = max(test.noticed_distance for test in fits.values())
    told = f"not {dist}: {', '.join(wrong)}" if wrong else f"all as {dist}"
    return (
        f"first {NUM_TOKENS} tokens of {num_samples} texts each, {', '.join(fits)}: {told}, least p {least:.2g}; "
        f"a total variation of {distance:.3f} is noticed with probability {POWER:.0%}"
    )
