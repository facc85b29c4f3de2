# SPDX-License-Identifier: Apache-2.0
"""A draft's vocabulary cut to the tokens that occur: options of graphs, and the recipe fields that ask for them.

The LM head is a large part of a small draft's weights. Tokens that are left out have probability 0 in the draft's
distribution, and drafts may be drawn from any distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from speccompile.core.jobs import CandidateOptions
from speccompile.errors import RecipeError

KEY = "speculator.draft_vocab_size"


@dataclass(frozen=True)
class DraftVocab:
    """Which tokens a draft may name."""

    size: int
    text: str = field(compare=False)  # file in which they are counted; no part of a cache key: the chosen tokens are


@dataclass(frozen=True)
class VocabCandidateOptions(CandidateOptions):
    """Options of a draft whose LM head may be cut."""

    vocab: DraftVocab | None = field(default=None, kw_only=True)  # the tokens that are kept; None: all


@dataclass(frozen=True, kw_only=True)
class DraftVocabFields:
    """Recipe fields; a method's `Config` inherits them.

    Args:
        draft_vocab_size: draft only the most frequent tokens of `draft_vocab_text`, so many of them; null: all tokens.
        draft_vocab_text: text like that which will be written: JSON lines with `text` or `prompt`, else a text file.

    Raises:
        RecipeError: there is one without the other, or the size is no vocabulary's.
    """

    draft_vocab_size: int | None = None
    draft_vocab_text: str | None = None

    def check_vocab(self) -> None:
        """Checks both fields."""
        size, text = self.draft_vocab_size, self.draft_vocab_text
        if size is not None and size < 2:
            raise RecipeError(KEY, f"{size}", "at least 2 tokens", "Correct the recipe.")
        if (size is None) != (text is None):
            got = "draft_vocab_text alone" if size is None else "draft_vocab_size alone"
            todo = "Give both, or neither to draft with the whole vocabulary."
            raise RecipeError("speculator", got, "the number of tokens and the text in which they are counted", todo)

    @property
    def draft_vocab(self) -> DraftVocab | None:
        size, text = self.draft_vocab_size, self.draft_vocab_text
        return None if size is None or text is None else DraftVocab(size, text)
