# SPDX-License-Identifier: Apache-2.0
"""What is decoded: a kind of text or recorded requests, in which the drafts of lookups are counted without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.core import registry
from speccompile.core.acceptance import Verdict
from speccompile.core.jobs import MethodContext
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import RecipeError
from speccompile.planner.acceptance import MIXED, Acceptance, assumed, from_counts, published, published_kinds
from speccompile.recipe.speculative_config import METHOD

if TYPE_CHECKING:
    from speccompile.planner.candidates import Candidate

MAX_DRAFTS = 8  # of a chain that is looked at
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
                return found if one.needs_graphs else found.of_all_steps()
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
    if not path.is_file():
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
    """Returns how many drafts of a method without a graph the texts have, step by step; None: no step.

    Drafts of lookups depend on the tokens before them alone, and are accepted where the text goes on so, whoever
    decoded it.
    """
    method, reached = registry.method(section[METHOD]), Counter[int]()
    config = method.Config(**{key: value for key, value in section.items() if key != METHOD})
    for prompt, output in texts:
        context = MethodContext(1, len(prompt) + len(output) + MAX_DRAFTS, MAX_DRAFTS)
        proposer: Any = method.make_proposer(config, {}, context)
        whole, text = [*prompt, *output], _Text([*prompt, output[0]])
        batch = _Texts([text])
        proposer.start(0, text)
        proposer.prefill(0, text, np.array([prompt], dtype=np.int64), 0, {})
        while len(text.tokens) < len(whole):
            text.max_drafts = min(MAX_DRAFTS, len(whole) - len(text.tokens) - 1)
            tree, path = proposer.propose(batch), [0]
            following = whole[len(text.tokens) :]
            while child := [c for c in tree.children(0, path[-1]) if tree.tokens[0, c] == following[len(path) - 1]]:
                path.append(child[0])
            num = len(path) - 1
            row = np.full((1, tree.tokens.shape[1]), -1, dtype=np.int64)
            row[0, : num + 1] = path
            verdict = Verdict(row, np.array([num]), np.array([following[num]]))
            proposer.commit(batch, tree, verdict, {})
            text.tokens = whole[: len(text.tokens) + num + 1]
            reached.update(range(num + 1))
    counts = [(float(reached[i]), float(reached[i + 1])) for i in range(MAX_DRAFTS) if reached[i]]
    return from_counts(counts, f"counted in {len(texts)} recorded texts")
