# SPDX-License-Identifier: Apache-2.0
"""Conversations as rows of tokens: rendered by the target's chat template, with a mask of what the target writes.

A row is one conversation from its start, cut at the row's end, then padding, which causal models do not see; batches
are cut to their longest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Encoding, Tokenizer

from speccompile.checkpoints.checkpoint import special_tokens
from speccompile.common.chat_prompts import find_template, message_for_template
from speccompile.common.tokenizer_file import TokenizerFaults
from speccompile.errors import BundleError, RecipeError, RuntimeFault
from speccompile.training.corpus import Document
from speccompile.training.windows import Rows

if TYPE_CHECKING:
    from speccompile.common.chat_template import ChatTemplate

_WHERE = "training.text.files"


@dataclass(frozen=True)
class Sample:
    """A rendered conversation. `answers`: (first, last + 1) character of each text that the model writes."""

    text: str
    answers: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class TokenRow:
    """Tokens of a conversation, and of each whether it is the model that writes it."""

    tokens: list[int]
    is_answer: list[bool]


class ChatReader:
    """Renders and tokenises conversations as the server does. `folder`: of the target's tokenizer and chat template."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self._ends = set(special_tokens(folder)[0])

    @cached_property
    def _template(self) -> ChatTemplate:
        return find_template(self.folder, "messages")

    def samples(self, document: Document) -> list[Sample]:
        """Returns a conversation's text with its answers; the text after the last answer is left out.

        An answer follows the messages before it with the assistant's turn opened. Earlier turns that a template writes
        otherwise once others follow are samples of their own.

        Raises:
            RecipeError: there is no chat template, it refuses the messages, or answers do not follow their prompts.
        """
        talk, samples, current = document.conversation, [], Sample("")
        assert talk is not None
        for turn in talk.turns():
            if turn == len(talk.messages):
                break
            before, whole = self.prompt(document, turn), self._render(document, turn + 1, False)
            if not current.text or not before.startswith(current.text):
                current = Sample(whole)
                samples.append(current)
            else:
                current = samples[-1] = Sample(whole, current.answers)
            current.answers.append((self._start(document, turn, before, whole), len(whole)))
        return samples

    def prompt(self, document: Document, turn: int) -> str:
        """Returns the first `turn` messages with the assistant's turn opened."""
        return self._render(document, turn, True)

    def _start(self, document: Document, turn: int, before: str, whole: str) -> int:
        if whole.startswith(before):
            return len(before)
        if not whole.startswith(self._render(document, turn, False)):
            got = f"{document.source}: a chat template that writes the messages before message {turn} anew"
            todo = "Give the conversation as `text`, without a mask."
            raise RecipeError(_WHERE, got, "a template that adds each message to those before it", todo)
        pairs = enumerate(zip(before, whole, strict=False))  # it opens a turn otherwise than it writes one
        return next((at for at, (one, other) in pairs if one != other), len(whole))

    def _render(self, document: Document, num: int, opens: bool) -> str:
        talk = document.conversation
        assert talk is not None
        try:
            messages = [message_for_template(message) for message in talk.messages[:num]]
            return self._template.render(messages, opens, talk.variables, document.source)
        except (BundleError, RuntimeFault) as fault:
            raise RecipeError(_WHERE, f"{fault.where}: {fault.got}", fault.expected, fault.todo) from fault

    def encode(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Returns the token ids of texts; `special`: with those that the tokenizer puts around, as templates do."""
        return [list(encoded.ids) for encoded in self._encodings(texts, special)]

    def rows(self, samples: Sequence[Sample]) -> Iterator[TokenRow]:
        """Yields samples as tokens; one belongs to an answer where it begins in it, but not after the end token."""
        for sample, encoded in zip(samples, self._encodings([sample.text for sample in samples]), strict=True):
            is_answer = [False] * len(encoded.ids)
            for first, end in sample.answers:
                for at, (begin, _) in enumerate(encoded.offsets):
                    if first <= begin < end:
                        is_answer[at] = True
                        if encoded.ids[at] in self._ends:
                            break
            yield TokenRow(list(encoded.ids), is_answer)

    def _encodings(self, texts: Sequence[str], special: bool = False) -> list[Encoding]:
        with TokenizerFaults(RecipeError, _WHERE, "texts that the tokenizer reads", "Shorten what repeats in them."):
            return self.tokenizer.encode_batch(list(texts), add_special_tokens=special)


def rows_from_tokens(rows: Sequence[TokenRow], seq_len: int, padding: int) -> Rows:
    """Returns the rows that have something to learn within `seq_len` tokens, cut or padded to it."""
    tokens, labels = np.full((len(rows), seq_len), padding, np.int32), np.zeros((len(rows), seq_len), np.bool_)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = row.tokens[:seq_len]
        learned = row.is_answer[1 : seq_len + 1]
        labels[index, : len(learned)] = learned
    kept = labels.any(1)
    return Rows(tokens[kept], labels[kept])
