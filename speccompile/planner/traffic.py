# SPDX-License-Identifier: Apache-2.0
"""What is decoded: a kind of text or recorded requests, in which the drafts of lookups are counted without a model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.core import registry
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.tree import Verdict
from speccompile.errors import RecipeError
from speccompile.planner.acceptance import (
    MIXED,
    QUANTILE,
    Acceptance,
    assumed,
    published,
    published_kinds,
    rates_from_lengths,
)
from speccompile.recipe.speculative_config import METHOD

if TYPE_CHECKING:
    from speccompile.planner.candidates import Candidate

MAX_DRAFTS = 8  # of a chain that is looked at
COUNTED = (1, 2, 4, MAX_DRAFTS)  # lengths of chains of lookups
MOST_TOKENS = 20_000  # of recorded outputs in which they are counted
CONTEXT = 512  # tokens of a sequence, where nothing says how many


@dataclass(frozen=True)
class Traffic:
    """What is decoded, and what is known about acceptance: `given` by a candidate's or method's name, "" for all."""

    kind: str | None = None  # of text, as in the table of published lengths
    temperature: float | None = None
    texts: Sequence[tuple[list[int], list[int]]] = ()  # prompt and output of each recorded request
    context: int = CONTEXT
    given: Mapping[str, Acceptance] = field(default_factory=dict)

    def acceptance(self, one: Candidate) -> Acceptance | None:
        """Returns what is known of a candidate's drafts; None: nothing, so that it is not predicted.

        Lookups draft where the text repeats itself, which no assumption and no other kind of text covers; of several
        drafters in one bundle each step uses another one.
        """
        method = one.section[METHOD]
        for name in (one.name, method):
            if (found := self.given.get(name)) is not None:
                return found if one.needs_graphs else found.of_lookups or found
        if one.is_several:
            return None
        if one.needs_graphs:
            return self.given.get("") or published(method, self.kind, self.temperature) or assumed()
        if self.texts:
            return count_lookups(one.section, self.texts)
        kind = self.kind or MIXED
        return published(method, kind, self.temperature) if (method, kind) in published_kinds() else None


def read_traffic(text: str | None, temperature: float | None, given: Mapping[str, Acceptance]) -> Traffic:
    """Returns what `--traffic` says: a kind of text, or the file of `serve --record`.

    Raises:
        RecipeError: neither.
        RuntimeFault: the record is damaged.
    """
    from speccompile.runtime.record import read_record

    kinds = sorted({kind for _, kind in published_kinds()})
    if text is None or text in kinds:
        return Traffic(text, temperature, given=given)
    path = Path(text)
    if not os.path.isfile(path):
        expected = f"{', '.join(kinds)}, or a file of serve --record"
        raise RecipeError("--traffic", repr(text), expected, "Correct it.")
    texts, temperatures = [], []
    for one in read_record(path).recorded:
        requests = [request for request in one.requests for _ in range(request.num_outputs)]
        for request, (tokens, _) in zip(requests, one.outputs, strict=True):
            if not isinstance(request.prompt, str) and len(tokens) > 1:
                texts.append((list(request.prompt), tokens))
                temperatures.append(request.sampling.temperature)
    if not texts:
        raise RecipeError(f"--traffic {path}", "no text of token ids", "one or more", "Record more requests.")
    context = round(median(len(prompt) + len(output) for prompt, output in texts))
    return Traffic(None, median(temperatures) if temperature is None else temperature, texts, context, given)


@dataclass
class _Text:
    """A `TokenSequence` that is read, not decoded."""

    tokens: list[int]
    max_drafts: int = MAX_DRAFTS
    sampling: SamplingParams = field(default_factory=SamplingParams)
    draft_state: Any = None
    has_draft: bool = True
    grammar: Any = None


@dataclass
class _Texts:
    """A `Batch` of one."""

    sequences: list[_Text]
    is_greedy: bool = True
    is_forced: bool = True
    least_drafts: int = 1
    may_draw: bool = False


def count_lookups(section: Mapping[str, Any], texts: Sequence[tuple[list[int], list[int]]]) -> Acceptance | None:
    """Returns the acceptance of a method without a graph in the texts; None: there is no step.

    Drafts of lookups depend on the tokens before them alone, and are accepted where the text goes on so, whoever
    decoded it. Longer chains pass easy tokens over, so each length is counted by itself; the range is the 95 % interval
    of tokens a step over texts.
    """
    lengths: list[tuple[float, float]] = []
    texts = [(prompt, output) for prompt, output in texts if len(output) > 1]
    texts = texts[
        : max(sum(1 for end in itertools.accumulate(len(text[1]) for text in texts) if end <= MOST_TOKENS), 1)
    ]
    for num in COUNTED if texts else ():
        steps, drafted = np.array([_steps_of_text(section, *text, num) for text in texts], dtype=float).T
        tokens = np.array([len(output) - 1 for _, output in texts], dtype=float)
        mean = tokens.sum() / steps.sum()
        error = QUANTILE * np.sqrt(np.sum((tokens - mean * steps) ** 2)) / steps.sum()
        lengths.append((max(mean - error, 1.0), min(mean + error, num + 1.0)))
    if not lengths:
        return None
    low, high = (tuple(rates_from_lengths(COUNTED, ends)) or (0.0,) for ends in zip(*lengths, strict=True))
    source = f"counted in {len(texts)} recorded texts"
    return Acceptance(low, high, source, drafted=drafted.sum() / steps.sum())  # of the longest chains


def _steps_of_text(
    section: Mapping[str, Any], prompt: list[int], output: list[int], max_drafts: int
) -> tuple[int, int]:
    # Returns the steps, and those that have drafts.
    method = registry.method(section[METHOD])
    config = method.Config(**{key: value for key, value in section.items() if key != METHOD})
    context = MethodContext(1, len(prompt) + len(output) + max_drafts, max_drafts)
    proposer: Any = method.make_proposer(config, {}, context)
    whole, text = [*prompt, *output], _Text([*prompt, output[0]])
    num_steps = num_drafted = 0
    batch = _Texts([text])
    proposer.start(0, text)
    proposer.prefill(0, text, np.array([prompt], dtype=np.int64), 0, {})
    while len(text.tokens) < len(whole):
        following, path = whole[len(text.tokens) :], [0]
        text.max_drafts = min(max_drafts, len(following) - 1)
        tree = proposer.propose(batch)
        while alike := [c for c in tree.children(0, path[-1]) if tree.tokens[0, c] == following[len(path) - 1]]:
            path.append(alike[0])
        num = len(path) - 1
        row = np.full((1, tree.tokens.shape[1]), -1, dtype=np.int64)
        row[0, : num + 1] = path
        proposer.commit(batch, tree, Verdict(row, np.array([num]), np.array([following[num]])), {})
        text.tokens = whole[: len(text.tokens) + num + 1]
        num_steps += 1
        num_drafted += bool(tree.children(0, 0))
    return num_steps, num_drafted
