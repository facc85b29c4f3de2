# SPDX-License-Identifier: Apache-2.0
"""Greedy text with drafts against the engine's own plain decoding, and that against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from speccompile.certificate.decoding import (
    Prompts,
    decode_with,
    drafts_nothing,
    gives_logits,
    next_logits,
    plain_proposer,
)
from speccompile.certificate.results import Check, DraftCounts, check_of
from speccompile.certificate.ties import (
    MAX_TIE_GAP,
    MAX_TIE_GAPS,
    MOST_SHOWN,
    Divergence,
    LogitsAfter,
    find_divergences,
    text_from_divergences,
)
from speccompile.core.proposer import Proposer
from speccompile.core.sampling_params import SamplingParams
from speccompile.runtime.requests import Speculation
from speccompile.runtime.spec_engine import SpecEngine

GREEDY, REFERENCE = "greedy", "reference"
TEMPERATURE, TOP_P = 0.9, 0.95  # of sampled texts


def plain_texts(engine: SpecEngine, prompts: Prompts, num_tokens: int, adapter: str = "") -> list[list[int]]:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, adapter=adapter)
    return decode_with(engine, plain_proposer(), prompts, params).texts


def check_greedy(
    engine: SpecEngine, prompts: Prompts, plain: Sequence[list[int]], num_tokens: int, dtype: str = "float32"
) -> Check:
    """Compares greedy texts with drafts with those of plain decoding, alone and in the largest batch.

    Drafts are forced in every step, and once as the method's budget decides. Texts sampled with seeds are compared
    too, where activations are float32, as draws have no ties. `dtype` of the activations bounds ties of greedy texts.
    """
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    seeded = [replace(params, temperature=TEMPERATURE, top_p=TOP_P, seed=seed) for seed in range(len(prompts))]
    batch, none = min(engine.context.max_slots, len(prompts)), plain_proposer()
    runs: list[tuple[str, Proposer, int, Speculation]] = [
        ("drafts, batch 1", engine.proposer, 1, "on"),
        (f"drafts, batch {batch}", engine.proposer, batch, "on"),
        (f"drafts by the method's budget, batch {batch}", engine.proposer, batch, "auto"),
        (f"plain, batch {batch}", none, batch, "auto"),
    ]
    sampled = f"drafts, sampled with seeds, batch {batch}"
    runs += [(sampled, engine.proposer, batch, "on")] if dtype == "float32" else []
    greedy_after: LogitsAfter | None = partial(next_logits, engine) if gives_logits(engine) else None
    rows, found, counts = [], [], dict[str, tuple[int, int]]()
    for name, proposer, batch_size, speculation in runs:
        asked, wanted, logits_after = [params] * len(prompts), plain, greedy_after
        if name == sampled:
            asked, logits_after = seeded, None
            wanted = decode_with(engine, none, prompts, seeded, batch_size=batch).texts
        decoded = decode_with(
            engine, proposer, prompts, asked, batch_size=batch_size, is_invariant=True, speculation=speculation
        )
        parted = find_divergences(prompts, wanted, decoded.texts, logits_after, MAX_TIE_GAPS.get(dtype, MAX_TIE_GAP))
        found += parted
        if speculation == "on" and not drafts_nothing(engine):
            counts[name] = decoded.counts
        shown = [d.json_from_divergence() for d in parted[:MOST_SHOWN]]
        rows.append({"run": name, "num_equal": len(prompts) - len(parted), **decoded.facts(), "divergences": shown})
    is_right = all(d.is_tie for d in found)
    length = rows[0]["mean_acceptance_length"]
    told = text_from_divergences(found) or "all equal to plain decoding"
    summary = f"{len(prompts)} texts of {num_tokens} tokens in {len(runs)} ways: {told}; {length:.2f} tokens a step"
    facts = {"num_prompts": len(prompts), "num_tokens": num_tokens, "runs": rows}
    return check_of(GREEDY, is_right, summary, facts, DraftCounts(counts) if counts else None)


def check_reference(
    prompts: Prompts,
    plain: Sequence[list[int]],
    wanted: Sequence[list[int]],
    logits_after: Callable[[list[int]], Any],
    is_exact: bool,
) -> Check:
    """Compares plain texts of the engine with those of transformers in float32.

    Args:
        logits_after: transformers' logits after some tokens.
        is_exact: the engine computes in float32 with the checkpoint's weights: only ties may differ. Otherwise
            differences are stated and decide nothing.
    """
    found: list[Divergence] = find_divergences(prompts, wanted, plain, logits_after)
    num_equal = len(prompts) - len(found)
    facts = {
        "num_prompts": len(prompts),
        "num_equal": num_equal,
        "is_exact": is_exact,
        "divergences": [d.json_from_divergence() for d in found[:MOST_SHOWN]],
    }
    told = f"; {text_from_divergences(found)}" if found else ""
    if not is_exact:
        told = "; quantised or in half precision, so texts may differ" if found else told
    summary = f"{num_equal} of {len(prompts)} plain texts equal to transformers' in float32{told}"
    return check_of(REFERENCE, not is_exact or all(d.is_tie for d in found), summary, facts)
