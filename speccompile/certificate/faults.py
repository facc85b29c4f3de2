# SPDX-License-Identifier: Apache-2.0
"""Drafts with faults change how many steps a text takes, and never the text: greedy, or sampled with a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from speccompile.certificate.decoding import Prompts, decode_with, drafts_nothing, plain_proposer
from speccompile.certificate.planted_drafts import (
    FullChains,
    FullTrees,
    Known,
    NoDrafts,
    NoTokens,
    RandomTokens,
    SpoiltDrafts,
)
from speccompile.certificate.results import Check, DraftCounts, check_of
from speccompile.certificate.ties import first_difference
from speccompile.core.proposer import Proposer
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import SpecCompileError
from speccompile.runtime.spec_engine import SpecEngine

FAULTS = "faults"
NO_DRAFTS, NO_TOKENS, SPOILT = "no drafts", "ids that are no tokens", "the method's drafts, half of them replaced"
LENGTH = 4  # of planted chains
Makers = dict[str, Callable[[Known], Proposer]]


def may_draft_trees(engine: SpecEngine) -> bool:
    """Returns whether the target may score trees: it can compact its caches, and its recurrent states follow paths."""
    inner: Any = engine.verifier.engine
    inner = getattr(inner, "engine", inner)
    can_compact = inner.compacts_in_step or getattr(inner, "rollback", True) is not None or not inner.spec.caches
    return can_compact and (inner.states is None or inner.states.scores_trees)


def planted_proposers(engine: SpecEngine) -> Makers:
    """Returns the proposers of the check, by the fault that they have; each is made for the known texts."""
    vocab, nodes = engine.verifier.engine.spec.vocab_size, max(1, engine.context.max_draft_nodes)
    makers: Makers = {
        NO_DRAFTS: lambda known: NoDrafts(vocab, LENGTH),
        "random tokens": lambda known: RandomTokens(vocab, min(LENGTH, nodes)),
        NO_TOKENS: lambda known: NoTokens(vocab, min(LENGTH, nodes)),
        "full chains": lambda known: FullChains(known, nodes, vocab, nodes),
    }
    if may_draft_trees(engine):
        makers["full trees"] = lambda known: FullTrees(known, nodes, vocab, nodes)
    if not drafts_nothing(engine):
        makers[SPOILT] = lambda known: cast(Proposer, SpoiltDrafts(engine.proposer, vocab))
    return makers


def check_faults(engine: SpecEngine, prompts: Prompts, num_tokens: int) -> Check:
    """Decodes with planted drafts, in a batch; texts must be those of plain decoding, to the last token."""
    batch_size = min(engine.context.max_slots, len(prompts))
    greedy = [SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)] * len(prompts)
    sampled = [
        SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, temperature=0.9, top_p=0.95, seed=seed)
        for seed in range(len(prompts))
    ]
    rows, wrong, counts = [], [], dict[str, tuple[int, int]]()
    for kind, params in (("greedy", greedy), ("sampled", sampled)):
        wanted = decode_with(engine, plain_proposer(), prompts, params, batch_size=batch_size)
        known = {tuple(prompt): text for prompt, text in zip(prompts, wanted.texts, strict=True)}
        for fault, make in planted_proposers(engine).items():
            row = _run(engine, make(known), prompts, params, batch_size, wanted.texts)
            rows.append({"fault": fault, "text": kind, **row})
            wrong += [] if row["num_equal"] == len(prompts) else [f"{fault} ({kind})"]
            if fault not in (NO_DRAFTS, NO_TOKENS):  # of which none is to be scored
                counts[f"{fault} ({kind})"] = row.get("num_draft_tokens", 0), row.get("num_steps", 0)
    told = f"texts differ with {', '.join(wrong)}" if wrong else "no text differs"
    faults = [row["fault"] for row in rows if row["text"] == "greedy"]
    summary = f"{len(prompts)} texts of {num_tokens} tokens, greedy and sampled, with {'; '.join(faults)}: {told}"
    return check_of(FAULTS, not wrong, summary, {"num_prompts": len(prompts), "runs": rows}, DraftCounts(counts))


def _run(
    engine: SpecEngine,
    proposer: Proposer,
    prompts: Prompts,
    params: Sequence[SamplingParams],
    batch_size: int,
    wanted: Sequence[Sequence[int]],
) -> dict[str, Any]:
    # Planted drafts have the length that they ask for, those of the method are forced.
    options: dict[str, Any] = {"speculation": "on" if isinstance(proposer, SpoiltDrafts) else "auto"}
    try:
        decoded = decode_with(engine, proposer, prompts, params, batch_size=batch_size, is_invariant=True, **options)
    except SpecCompileError as fault:
        return {"num_equal": 0, "fault_raised": str(fault)}
    parted = [first_difference(a, b) for a, b in zip(wanted, decoded.texts, strict=True)]
    row: dict[str, Any] = {"num_equal": parted.count(None), **decoded.facts()}
    if any(at is not None for at in parted):
        first = next(index for index, at in enumerate(parted) if at is not None)
        row["first_difference"] = {"prompt": first, "position": parted[first]}
    return row
