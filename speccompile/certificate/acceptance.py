# SPDX-License-Identifier: Apache-2.0
"""Acceptance of a bundle's drafts: beside shifted ones, and beside a plain loop over network and target in torch.

A drafter that is wired wrongly (another layer's features, position, table of tokens) gives no wrong text: only its
acceptance falls. The loop shares no graph, cache or engine with the bundle. It follows a quantised bundle's own texts,
so that both draft after the same tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from speccompile.bundle.bundle import Bundle
from speccompile.certificate.checkpoint import Reference, is_exact
from speccompile.certificate.decoding import Decoded, Prompts, decode_with, drafts_nothing
from speccompile.certificate.planted_drafts import ShiftedDrafts
from speccompile.certificate.results import Check, DraftCounts, check_of, not_run
from speccompile.checkpoints.lora import open_lora
from speccompile.core import registry
from speccompile.core.proposer import Proposer
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import SpecCompileError
from speccompile.runtime.engine import load
from speccompile.runtime.spec_engine import SpecEngine

ACCEPTANCE, RECORD = "acceptance", "training.json"
NUM_DRAFTS = 4
MAX_DIFFERENCE = 0.02  # of the share accepted at a position, and of the mean acceptance length, as a share of it
MAX_DIFFERENCE_QUANTIZED = 0.15  # the loop reads float32 states along the bundle's own text

MOST_ERRORS = 2.5  # with quantised weights

Outcomes = Mapping[tuple[int, int], int]  # by (drafted, accepted): steps


@dataclass(frozen=True)
class Acceptance:
    """Of chains."""

    num_steps: int
    tried: tuple[int, ...]  # by position: chains that had a draft there whose parent was accepted
    kept: tuple[int, ...]

    @classmethod
    def of(cls, outcomes: Outcomes, num_drafts: int) -> Acceptance:
        tried = [sum(n for (d, a), n in outcomes.items() if d > i and a >= i) for i in range(num_drafts)]
        kept = [sum(n for (_, a), n in outcomes.items() if a > i) for i in range(num_drafts)]
        return cls(sum(outcomes.values()), tuple(tried), tuple(kept))

    @property
    def length(self) -> float:
        """Mean acceptance length: 1 + accepted / steps."""
        return 1 + sum(self.kept) / max(1, self.num_steps)

    @property
    def shares(self) -> list[float]:
        return [kept / tried if tried else 0.0 for kept, tried in zip(self.kept, self.tried, strict=True)]

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "shares": [round(s, 4) for s in self.shares], "length": round(self.length, 4)}


def is_near(engine: Acceptance, reference: Acceptance, bound: float) -> bool:
    """Returns whether lengths differ by at most `bound` of the reference's, and shares by at most `bound`.

    One chain more or less never decides: a share may differ by one of the chains tried there.
    """
    if abs(engine.length - reference.length) > bound * reference.length:
        return False
    pairs = zip(engine.shares, reference.shares, engine.tried, reference.tried, strict=True)
    return all(abs(a - b) <= max(bound, 1.5 / max(1, min(n, m))) for a, b, n, m in pairs)


def is_no_less(engine: Acceptance, reference: Acceptance, bound: float) -> bool:
    """Returns whether neither length nor shares are below the reference's by more than `bound`, as in `is_near`.

    For quantised drafts, to which chance may give more. Later positions try some dozens of chains: shares may be lower
    by `MOST_ERRORS` standard errors of their difference.
    """
    if engine.length < (1 - bound) * reference.length:
        return False
    pairs = zip(engine.kept, reference.kept, engine.tried, reference.tried, strict=True)
    for ours, theirs, n, m in pairs:
        if not (n and m):
            continue
        share = (ours + theirs) / (n + m)
        error = math.sqrt(share * (1 - share) * (1 / n + 1 / m))
        if ours / n < theirs / m - max(bound, MOST_ERRORS * error):
            return False
    return True


def outcomes_of(steps: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    outcomes: dict[tuple[int, int], int] = {}
    for step in steps:
        outcomes[step] = outcomes.get(step, 0) + 1
    return outcomes


def check_acceptance(
    engine: SpecEngine, prompts: Prompts, plain: Sequence[Sequence[int]], reference: Reference | None, why: str
) -> Check:
    """Compares acceptance with that of shifted drafts, and by position with that of the loop in torch.

    Args:
        engine: of the bundle, which is loaded once more beside the loop, with greedy chains of a fixed length.
        reference: the target in transformers; None: it cannot be run.
    """
    bundle = engine.bundle
    if drafts_nothing(engine):
        return not_run(ACCEPTANCE, "the bundle drafts nothing")
    if bundle is not None and bundle.recipe.target.weights != "checkpoint":
        return not_run(ACCEPTANCE, f"the target's weights are {bundle.recipe.target.weights}: no draft is right")
    runs = decode_shifted(engine, prompts, min(len(text) for text in plain))
    own, shifted = FirstDrafts.of(runs[OWN]), {name: FirstDrafts.of(runs[name]) for name in SHIFTS}
    is_right = all(is_better(own, other) for other in shifted.values())
    counts = {name: decoded.counts for name, decoded in runs.items()}
    found = None
    if reference is not None and bundle is not None:
        found, why = compare_with_loop(bundle, prompts, plain, reference)
    sides = {"own": own.facts(), **{name: other.facts() for name, other in shifted.items()}}
    facts = {**sides, "loop": why if found is None else found.facts()}
    most = max(other.share for other in shifted.values())
    summary = f"{own.share:.1%} of steps keep a draft, at most {most:.1%} if all tokens are shifted by one"
    if found is not None:
        is_right, counts["greedy chains"] = is_right and found.is_right, found.counts
    told = f"no plain loop in torch: {why}" if found is None else found.summary
    return check_of(ACCEPTANCE, is_right, f"{summary}; {told}", facts, DraftCounts(counts))


@dataclass(frozen=True)
class Comparison:
    """Chains of the bundle beside those of the loop."""

    num_drafts: int
    bound: float
    is_exact: bool  # the bundle computes in float32 with the checkpoint's weights
    engine: Acceptance
    reference: Acceptance
    counts: tuple[int, int]  # draft tokens that the bundle scored, and steps

    @property
    def is_right(self) -> bool:
        return (is_near if self.is_exact else is_no_less)(self.engine, self.reference, self.bound)

    @property
    def summary(self) -> str:
        """Its main figures."""
        ours, theirs = self.engine, self.reference
        shares = ", ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(ours.shares, theirs.shares, strict=True))
        return (
            f"greedy chains of {self.num_drafts}: {ours.length:.3f} tokens a step, {theirs.length:.3f} in a plain loop "
            f"in torch; accepted by position {shares}"
        )

    def facts(self) -> dict[str, Any]:
        sides = {"engine": self.engine.facts(), "reference": self.reference.facts()}
        return {"num_drafts": self.num_drafts, "bound": self.bound, **sides}


def compare_with_loop(
    bundle: Bundle, prompts: Prompts, plain: Sequence[Sequence[int]], reference: Reference
) -> tuple[Comparison | None, str]:
    """Returns the acceptance of the bundle's chains, loaded once more, beside that of the loop; or None, and why."""
    if bundle.recipe.speculator.get("draft_vocab_size"):
        return None, "it drafts with the whole vocabulary, the bundle with a part of it"
    drafter, why = open_drafter(bundle, reference)
    if drafter is None:
        return None, why
    trainable, needs = drafter
    num = min(NUM_DRAFTS, int(trainable.num_positions))
    try:
        engine = load(bundle.path, method=_chain_section(bundle.recipe.method, num), verify=False)
    except SpecCompileError as fault:
        return None, f"the bundle cannot draft greedy chains: {fault}"
    engine.controller = None
    num_tokens = min(len(text) for text in plain)
    # The loop's first token is the target's alone: the engine has it from reading the prompt, or it is given.
    reads = engine.verifier.may_read_last and all(len(prompt) > 1 for prompt in prompts)
    begun = [list(p) if reads else [*p, text[0]] for p, text in zip(prompts, plain, strict=True)]
    params = SamplingParams(max_new_tokens=max(1, num_tokens - (not reads)), ignore_eos=True)
    decoded = decode_with(engine, engine.proposer, begun, params, batch_size=min(engine.context.max_slots, len(begun)))
    exact = is_exact(bundle.manifest)
    texts = [None] * len(begun) if exact else [text[:num_tokens] for text in plain]
    theirs = Acceptance.of(outcomes_of(_loop(reference, trainable, needs, prompts, texts, num, num_tokens)), num)
    bound = MAX_DIFFERENCE if exact else MAX_DIFFERENCE_QUANTIZED
    return Comparison(num, bound, exact, Acceptance.of(decoded.outcomes, num), theirs, decoded.counts), ""


def _loop(
    reference: Reference,
    trainable: Any,
    needs: Any,
    prompts: Prompts,
    texts: Sequence[Sequence[int] | None],
    num: int,
    num_tokens: int,
) -> list[tuple[int, int]]:
    from speccompile.training.reference import decode_chains

    steps: list[tuple[int, int]] = []
    for prompt, text in zip(prompts, texts, strict=True):
        made = decode_chains(reference.target, trainable, needs, list(prompt), num, num_tokens, True, text)
        steps += made
    return steps


def _chain_section(method: str, num_drafts: int) -> dict[str, Any]:
    known = {field.name for field in fields(registry.method(method).Config)}
    wanted = {"tree": "chain", "num_draft_tokens": num_drafts, "drafts": "greedy"}
    return {"method": method, **{key: value for key, value in wanted.items() if key in known}}


def open_drafter(bundle: Bundle, reference: Reference) -> tuple[tuple[Any, Any] | None, str]:
    """Returns (the method's network in torch, what it needs of the target) or None, and the reason.

    Its sizes are those of `training.json` beside its checkpoint, or of the checkpoint alone where the trainer can.
    """
    name, section = bundle.recipe.method, dict(bundle.recipe.speculator)
    method = registry.method(name)
    if not method.trainer or method.TrainingConfig is None:
        return None, f"method {name} has no network in torch to compare with"
    model = section.get("model") or reference.target.folder
    folder = Path(str(model))
    if not folder.is_dir():
        return None, f"the speculator {model} is not at hand"
    import torch

    from speccompile.export.lora import merge_lora

    trainer: Any = registry.trainer(name)
    heads = _heads_of(folder, name)
    if heads is None and not getattr(trainer, "reads_sizes", False):
        return None, f"{folder} has no {RECORD} with the sizes of its training"
    try:
        config = method.TrainingConfig(**_with_tuples(heads or {}))
        parts = reference.target.parts(torch.zeros(reference.target.dims.vocab_size, dtype=torch.int64))
        trainable = trainer.make(config, parts, folder).eval()
        if section.get("lora"):
            merge_lora(trainable.model, open_lora(str(section["lora"])))
        return (trainable, trainer.needs(config, reference.target.config)), ""
    except (SpecCompileError, TypeError, ValueError, KeyError) as fault:
        return None, f"the network of {folder} cannot be made in torch: {fault}"


def _heads_of(folder: Path, method: str) -> dict[str, Any] | None:
    try:
        plan = json.loads((folder / RECORD).read_text(encoding="utf-8"))["plan"]
        return dict(plan["heads"]) if plan["method"] == method else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


LEAST_ERRORS = 2.5  # standard errors of the difference of the shares
OWN, SHIFTS = "the method's drafts", {"the same, each id one higher": 1, "the same, each id one lower": -1}


@dataclass(frozen=True)
class FirstDrafts:
    """Of steps with drafts: how many kept one at least."""

    num_steps: int
    num_kept: int

    @classmethod
    def of(cls, decoded: Decoded) -> FirstDrafts:
        rows = [(accepted, num) for (depth, accepted), num in decoded.outcomes.items() if depth]
        return cls(sum(num for _, num in rows), sum(num for accepted, num in rows if accepted))

    @property
    def share(self) -> float:
        return self.num_kept / max(1, self.num_steps)

    def facts(self) -> dict[str, Any]:
        return {"num_steps_with_drafts": self.num_steps, "num_that_kept_one": self.num_kept, "share": self.share}


def is_better(own: FirstDrafts, shifted: FirstDrafts) -> bool:
    """Returns whether drafts are kept more often than shifted ones, by `LEAST_ERRORS` standard errors."""
    if not (own.num_steps and shifted.num_steps):
        return False
    share = (own.num_kept + shifted.num_kept) / (own.num_steps + shifted.num_steps)
    error = math.sqrt(share * (1 - share) * (1 / own.num_steps + 1 / shifted.num_steps))
    return own.share > shifted.share + LEAST_ERRORS * error


# Shifted drafts are as many and in the same trees, with every id one higher or one lower. A drafter with a wrong table
# or order of tokens is accepted no more often than these.
def decode_shifted(engine: SpecEngine, prompts: Prompts, num_tokens: int) -> dict[str, Decoded]:
    """Returns by `OWN` and the names of `SHIFTS` the greedy texts with these drafts."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    batch_size, vocab = min(engine.context.max_slots, len(prompts)), engine.verifier.engine.spec.vocab_size
    runs = {OWN: engine.proposer}
    runs |= {name: cast(Proposer, ShiftedDrafts(engine.proposer, vocab, shift)) for name, shift in SHIFTS.items()}
    made = dict[str, Decoded]()
    for name, proposer in runs.items():
        made[name] = decode_with(engine, proposer, prompts, params, batch_size=batch_size)
    return made
