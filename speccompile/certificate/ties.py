# SPDX-License-Identifier: Apache-2.0
"""Where two greedy texts part, and whether that is a tie of logits or a defect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from numpy.typing import ArrayLike, NDArray

# Largest gap of two logits that rounding may turn around, by the dtype of activations: about 50 units in the last
# place of a logit of 20 (float32), and 2 to 3 of such a unit for the others.
MAX_TIE_GAPS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
MAX_TIE_GAP = MAX_TIE_GAPS["float32"]
MOST_SHOWN = 8  # divergences of a certificate

LogitsAfter = Callable[[list[int]], NDArray[Any]]


@dataclass(frozen=True)
class Divergence:
    """The first token in which a text differs from the one that it should be."""

    prompt: int
    position: int
    wanted: int  # the token, -1 where the text should have ended
    got: int  # the other text's, -1 where it ends
    gap: float | None  # logit of `wanted` minus that of `got`; None: not known, as a text ends or no logits are at hand
    is_tie: bool

    def json_from_divergence(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """Returns the first position in which two texts differ; None where they are equal."""
    if list(wanted) == list(got):
        return None
    pairs = zip(wanted, got, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(got)))


def gap_of(logits: ArrayLike, wanted: int, got: int) -> float:
    """Returns the logit of `wanted` minus that of `got`, in a row [vocab]."""
    row: Any = logits
    return float(row[wanted]) - float(row[got])


def find_divergences(
    prompts: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    logits_after: LogitsAfter | None,
    max_gap: float = MAX_TIE_GAP,
) -> list[Divergence]:
    """Returns the divergences of texts, at most one for each prompt.

    Args:
        logits_after: the logits [vocab] after some tokens, by which a divergence is judged; None: each is a defect.
    """
    found = []
    for index, (prompt, text, other) in enumerate(zip(prompts, wanted, got, strict=True)):
        at = first_difference(text, other)
        if at is None:
            continue
        has_both = at < min(len(text), len(other))
        gap = None
        if has_both and logits_after is not None:
            gap = gap_of(logits_after([*prompt, *text[:at]]), text[at], other[at])
        tokens = (text[at] if at < len(text) else -1, other[at] if at < len(other) else -1)
        found.append(Divergence(index, at, *tokens, gap, gap is not None and abs(gap) <= max_gap))
    return found


def text_from_divergences(found: Sequence[Divergence]) -> str:
    """Returns e.g. "2 differ (1 tie within 1.2e-05, 1 DEFECT: prompt 3, token 17, gap 0.4)"; empty for none."""
    if not found:
        return ""
    ties = [d for d in found if d.is_tie]
    defects = [d for d in found if not d.is_tie]
    parts = []
    if ties:
        largest = max(abs(d.gap or 0.0) for d in ties)
        parts.append(f"{len(ties)} {'tie' if len(ties) == 1 else 'ties'} within {largest:.1e}")
    if defects:
        worst = defects[0]
        gap = "unknown" if worst.gap is None else f"{worst.gap:.2g}"
        parts.append(f"{len(defects)} no tie: prompt {worst.prompt}, token {worst.position}, gap {gap}")
    return f"{len(found)} differ ({', '.join(parts)})"
