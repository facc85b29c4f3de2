# SPDX-License-Identifier: Apache-2.0
"""The target's caches after many rolled-back drafts against those of a fresh prefill of the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.certificate.checkpoint import CHUNK, logits_of
from speccompile.certificate.decoding import Prompts, gives_logits, make_sequences, root_logits
from speccompile.certificate.faults import may_draft_trees
from speccompile.certificate.planted_drafts import FullChains, FullTrees
from speccompile.certificate.results import Check, DraftCounts, check_of, not_run
from speccompile.core.sampling_params import SamplingParams
from speccompile.runtime.loop import read_prompts, run_step
from speccompile.runtime.sequences import SequenceBatch
from speccompile.runtime.spec_engine import SpecEngine

CACHES = "caches"
# Largest difference of a row, in standard deviations of its cache, by the dtype of activations: rounding in another
# order of sums stays far below, the row of another token is about 1.
# One of 127 levels of int8 is about 0.03 of the standard deviation of a row's levels.
MAX_DEVIATIONS = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3, "int8": 0.1}
# The same for the logits after the last token.
MAX_LOGIT_DEVIATIONS = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3, "int8": 0.1}


def check_caches(
    engine: SpecEngine, prompts: Prompts, plain: list[list[int]], dtype: str = "float32", seed: int = 0
) -> Check:
    """Decodes with full trees or chains of right and wrong drafts, and reads the same tokens anew.

    All rows of the target's caches are compared, where its engine shows them, and if logits are an output, those after
    the last token and of chains of 16 with single steps, along all texts.

    Args:
        prompts: token ids; as many as there are slots are used.
        dtype: of the rows of the target's caches, which bounds the differences.
    """
    num = min(engine.context.max_slots, len(prompts))
    vocab, nodes = engine.verifier.engine.spec.vocab_size, max(1, engine.context.max_draft_nodes)
    known = {tuple(prompt): text for prompt, text in zip(prompts, plain, strict=True)}
    kind = FullTrees if may_draft_trees(engine) else FullChains
    length = min(len(text) for text in plain[:num])
    params = SamplingParams(max_new_tokens=length, ignore_eos=True)
    waiting = make_sequences(engine, prompts[:num], [params] * num, "auto")
    batch = SequenceBatch(list(waiting), num)
    verifier, proposer = engine.verifier, kind(known, nodes, vocab, nodes, seed)
    engine.reset(1)
    read_prompts(verifier, proposer, batch)
    num_steps = num_accepted = num_drafts = 0
    while min(length - (len(sequence.tokens) - sequence.num_prompt) for sequence in waiting) > 1:
        steps = run_step(verifier, proposer, batch, engine.engines)[0]
        num_steps, num_accepted = num_steps + 1, num_accepted + sum(step.num_accepted for step in steps)
        num_drafts += sum(step.num_draft_tokens for step in steps)
    texts = [list(sequence.tokens) for sequence in waiting]
    held = _contents(engine, texts)
    engine.reset(1)
    for slot, tokens in enumerate(texts):
        for _ in verifier.prefill(slot, tokens):
            pass
    fresh = _contents(engine, texts)
    if held[0] is None and held[1] is None:
        return not_run(CACHES, "the engine shows neither its caches nor its logits")
    rows, logits = (_deviation(*pair) for pair in zip(held, fresh, strict=True))
    chain = max(_chain_deviation(engine, *pair) for pair in known.items()) if held[1] is not None else 0.0
    most = MAX_LOGIT_DEVIATIONS.get(dtype, 0.01)
    is_right = rows <= MAX_DEVIATIONS.get(dtype, 0.01) and max(logits, chain) <= most
    facts = {
        "num_sequences": num,
        "num_steps": num_steps,
        "num_accepted": num_accepted,
        "num_rows": sum(len(tokens) - 1 for tokens in texts),
        "num_caches": len(held[0] or ()) // num,
        "row_deviation": rows,
        "logit_deviation": logits,
        "chain_deviation": chain,
    }
    told = f"rows differ by at most {rows:.1e}" if held[0] is not None else "rows are not shown by the engine"
    told += f", the next logits by {logits:.1e}" if held[1] is not None else ""
    drafts = "trees" if kind is FullTrees else "chains"
    summary = (
        f"{facts['num_rows']} rows after {num_steps} steps of {num} sequences with {drafts}, {num_accepted} drafts "
        f"kept, against a fresh prefill: {told} (in standard deviations)"
    )
    if held[1] is not None:
        same = "those of single steps in bits" if chain == 0 else f"those of single steps but for {chain:.1e}"
        summary += f"; the logits of chains along {len(known)} texts are {same}"
    return check_of(CACHES, is_right, summary, facts, DraftCounts({f"full {drafts}": (num_drafts, num_steps * num)}))


def _contents(engine: SpecEngine, texts: list[list[int]]) -> tuple[Any, Any]:
    target = engine.verifier.engine
    rows: dict[str, NDArray[Any]] | None = {}
    for slot, tokens in enumerate(texts):
        found: Mapping[str, NDArray[Any]] | None = target.read_caches(slot, len(tokens) - 1)
        if found is None or rows is None:
            rows = None
            break
        rows |= {f"{name}, slot {slot}": np.array(values) for name, values in found.items()}
    logits = None
    if gives_logits(engine):  # last, as these steps write rows
        logits = {str(slot): root_logits(engine, slot, tokens[-1]) for slot, tokens in enumerate(texts)}
    return rows, logits


def _chain_deviation(engine: SpecEngine, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Returns the deviation of logits of chains along a text from those of single steps."""
    tokens, start = [*prompt, *text], len(prompt) - 1
    return _deviation(*({"": logits_of(engine, tokens, chunk, start)} for chunk in (CHUNK, 1)))


def _deviation(held: Mapping[str, NDArray[Any]] | None, fresh: Mapping[str, NDArray[Any]] | None) -> float:
    worst = 0.0
    for name, values in (held or {}).items():
        assert fresh is not None
        other = np.asarray(fresh[name], np.float64)
        difference = np.abs(np.asarray(values, np.float64) - other)
        if not difference.size:
            continue
        largest = float(difference.max())
        if not np.isfinite(largest):
            return float("inf")
        worst = max(worst, largest / max(float(other.std()), 1e-30) if largest else 0.0)
    return worst
