# SPDX-License-Identifier: Apache-2.0
"""Drafts after which a grammar fails: texts have such a token as often as without drafts, and end after it."""

from dataclasses import replace

import numpy as np
import pytest

from speccompile.runtime.grammars import GrammarFault, GrammarMatcher
from tests.runtime.test_grammar_drafts import (
    CONSTRAINT,
    KINDS,
    LENGTH,
    NUM,
    PROMPT,
    TOKENS,
    VOCAB,
    WARM,
    exact_joint,
    make_engine,
)
from tests.runtime.test_logits_processors import RIGHT, kept_warps  # noqa: F401


@pytest.mark.distribution
@pytest.mark.usefixtures("kept_warps")
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_after_which_the_grammar_fails_are_kept_as_often_as_others(kind, monkeypatch):
    """A text ends after such a token; the drafts of a step must not be left out because one of them is it."""
    stats = pytest.importorskip("scipy.stats")
    right, end = GrammarMatcher._mask_by, TOKENS.index("c")

    def mask_by(self, path, matcher):
        if [*self.tokens, *path][1:] == [end]:
            raise GrammarFault("too complex")
        return right(self, path, matcher)

    def read(self, tokens, right=GrammarMatcher.read):
        self.tokens = list(tokens)
        right(self, tokens)

    monkeypatch.setattr(GrammarMatcher, "_mask_by", mask_by)
    monkeypatch.setattr(GrammarMatcher, "read", read)
    asked = [replace(WARM, seed=seed, structured_outputs=CONSTRAINT) for seed in range(NUM)]
    results, plain = (
        [(r.tokens, r.finish_reason) for r in make_engine(kind).generate([PROMPT] * NUM, asked, speculative=drafts)]
        for drafts in (True, False)
    )
    assert {tuple(tokens) for tokens, reason in plain if reason == "error"} == {(end,)}
    assert all((tokens == [end]) == (reason == "error") for tokens, reason in results)
    if kind.startswith("raced"):
        assert results == plain
    wanted = NUM * exact_joint(WARM).reshape((VOCAB,) * LENGTH).sum(axis=(1, 2))
    seen = np.bincount([tokens[0] for tokens, _ in results], minlength=VOCAB)
    assert seen[wanted == 0].sum() == 0
    assert stats.chisquare(seen[wanted > 0], wanted[wanted > 0]).pvalue > RIGHT
