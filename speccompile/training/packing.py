# SPDX-License-Identifier: Apache-2.0
"""Documents as windows of tokens: texts are tokenised, joined and cut, conversations are a window each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from speccompile.errors import RecipeError
from speccompile.training.conversations import ChatReader, TokenRow, rows_from_tokens
from speccompile.training.corpus import Document
from speccompile.training.windows import HELD_OUT, TRAIN, Rows, Tokens, rows_of_stream

_BATCH = 64  # documents tokenised at once


class _Packer:
    """The windows of one split so far; `eos` comes after each text, and pads conversations."""

    def __init__(self, reader: ChatReader, seq_len: int, max_tokens: int, eos: int) -> None:
        self.reader, self.seq_len, self.max_tokens, self.eos = reader, seq_len, max_tokens, eos
        self.texts: list[Tokens] = []
        self.chats: list[TokenRow] = []
        self.num_tokens = 0

    @property
    def is_full(self) -> bool:
        return self.num_tokens >= self.max_tokens

    def add(self, documents: Sequence[Document]) -> None:
        """Takes documents until it is full."""
        texts = [document.text for document in documents if document.conversation is None]
        samples = [s for document in documents if document.conversation for s in self.reader.samples(document)]
        for ids in self.reader.encode(texts, special=True):
            if not self.is_full:
                self.texts.append(np.array([*ids, self.eos], dtype=np.int32))
                self.num_tokens += len(ids) + 1
        for row in self.reader.rows(samples):
            if not self.is_full:
                self.chats.append(row)
                self.num_tokens += min(self.seq_len, len(row.tokens))

    def rows(self) -> Rows:
        num = self.max_tokens - sum(min(self.seq_len, len(row.tokens)) for row in self.chats)
        joined = np.concatenate([np.zeros(0, dtype=np.int32), *self.texts])[: max(0, num)]
        return Rows.joined([rows_of_stream(joined, self.seq_len), rows_from_tokens(self.chats, self.seq_len, self.eos)])


def pack(
    documents: Iterable[Document], reader: ChatReader, seq_len: int, max_tokens: dict[str, int], eos: int, seed: int
) -> dict[str, Rows]:
    """Returns the windows by split, about `max_tokens` of each, in an order drawn from `seed`.

    Documents are taken in the order of their hash. Each text is followed by `eos`; what fills no window is dropped, as
    are conversations without an answer that begins within `seq_len`.

    Raises:
        RecipeError: too little text for one window of a split; see `ChatReader.samples`.
    """
    packers = {split: _Packer(reader, seq_len, max_tokens[split], eos) for split in (TRAIN, HELD_OUT)}
    left = iter(documents)
    while batch := list(islice(left, _BATCH)):
        for split, packer in packers.items():
            if not packer.is_full:
                packer.add([document for document in batch if document.is_held_out == (split == HELD_OUT)])
        if all(packer.is_full for packer in packers.values()):
            break
    windows = {}
    for split, packer in packers.items():
        rows = packer.rows()
        if not len(rows):
            got = f"{packer.num_tokens} tokens for {split}"
            expected = f"at least one window of {seq_len} tokens, or one conversation with an answer"
            todo = "Give more text, or shorter windows; without answers train on generated ones (plain.steps: 0)."
            raise RecipeError("training.text", got, expected, todo)
        windows[split] = rows.taken(np.random.default_rng(seed).permutation(len(rows)))
    return windows
