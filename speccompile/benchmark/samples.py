# SPDX-License-Identifier: Apache-2.0
"""Prompts by kind of text and by length of context, and the figures of each group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.benchmark.rounds import Runs
from speccompile.benchmark.summary import Texts, summary_from_runs
from speccompile.errors import RuntimeFault

TEXTS = Path(__file__).with_name("categories.jsonl")  # to be continued: for models without a chat template
_FIGURES = (
    *("tokens_per_s", "tokens_per_s_spread", "mean_acceptance_length", "acceptance", "num_tokens"),
    *("of_plain", "of_plain_spread", "num_texts", "num_equal", "mean_first_difference"),
)


@dataclass(frozen=True)
class Sample:
    """A prompt as it is measured."""

    ids: list[int]
    category: str | None  # kind of text; None: not stated


def read_lengths(text: str | None, max_seq_len: int, max_new_tokens: int) -> list[int]:
    """Returns context lengths from a comma-separated list, in rising order; [] without one.

    Raises:
        RuntimeFault: no whole numbers, or a context that leaves no room for the new tokens.
    """
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",") if part.strip()]
    room = max_seq_len - max_new_tokens
    if not parts or not all(part.isdecimal() and 1 <= int(part) <= room for part in parts):
        expected = f"whole numbers from 1 to {room}, as a sequence has {max_seq_len} rows and {max_new_tokens} are new"
        raise RuntimeFault("--context-lengths", repr(text), expected, "Correct it, or lower --max-new-tokens.")
    return sorted({int(part) for part in parts})


def samples_from_prompts(prompts: Sequence[Sample], lengths: Sequence[int]) -> list[Sample]:
    """Returns the prompts, at every context length if any: after the others of its category, the last tokens."""
    if not lengths:
        return list(prompts)
    made = []
    for length in lengths:
        for index, prompt in enumerate(prompts):
            alike = [p.ids for p in (*prompts[index + 1 :], *prompts[:index]) if p.category == prompt.category]
            before = [token for ids in alike or [prompt.ids] for token in ids]
            if not before:
                raise RuntimeFault("--context-lengths", "a prompt of no tokens", "text to fill a context", "Add some.")
            text = before * (length // len(before) + 1) + prompt.ids
            made.append(Sample(text[-length:], prompt.category))
    return made


def bucket(length: int, lengths: Sequence[int]) -> str:
    """Returns the name of a context's bucket: its length where lengths were asked for, else up to a power of two."""
    return f"{length}" if lengths else f"up to {max(32, 1 << (max(length, 1) - 1).bit_length())}"


def groups_from_samples(samples: Sequence[Sample], lengths: Sequence[int]) -> dict[str, dict[str, list[int]]]:
    """Returns the samples' indices by category and by context length; prompts without a category are left out there."""
    categories: dict[str, list[int]] = {}
    contexts: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.category is not None:
            categories.setdefault(sample.category, []).append(index)
    for index in sorted(range(len(samples)), key=lambda i: len(samples[i].ids)):
        contexts.setdefault(bucket(len(samples[index].ids), lengths), []).append(index)
    return {"by_category": categories, "by_context": contexts}


def figures_by_group(
    runs: Runs, groups: Mapping[str, Mapping[str, Iterable[int]]], reference: Texts | None, eos_token_ids: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Returns the figures of every mode and the ratios in each group; see `summary_from_runs`.

    Args:
        groups: the prompts' indices by kind of group and its name, see `groups_from_samples`.
        reference: the right text of each prompt; None: not run.
    """
    figures: dict[str, dict[str, Any]] = {}
    for kind, members in groups.items():
        figures[kind] = {}
        for name, indices in members.items():
            chosen = list(indices)
            part = {mode: [[one[i] for i in chosen] for one in rounds] for mode, rounds in runs.items()}
            right = None if reference is None else [reference[i] for i in chosen]
            found = summary_from_runs(part, right, eos_token_ids)
            modes = {mode: {key: row[key] for key in _FIGURES} for mode, row in found["modes"].items()}
            figures[kind][name] = {**found, "num_prompts": len(chosen), "modes": modes}
    return figures
