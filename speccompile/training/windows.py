# SPDX-License-Identifier: Apache-2.0
"""Windows of tokens in memory and on disk, with a mask of what is learned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.bundle.staging import staged_folder

Tokens = NDArray[np.int32]
SHARD_WINDOWS = 512  # windows of a shard
_TRIM = 32  # windows are cut to multiples of these tokens, so that tensors have few sizes
TRAIN, HELD_OUT = "train", "held_out"


@dataclass(frozen=True)
class Rows:
    """Windows of one length.

    Args:
        is_label: [windows, seq_len] bool, whether the distribution after a token is learned: of a text all are, of a
            conversation those before tokens that the model writes.
    """

    tokens: Tokens  # [windows, seq_len] int32
    is_label: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        return Rows(np.concatenate([p.tokens for p in parts]), np.concatenate([p.is_label for p in parts]))

    def taken(self, rows: Any) -> Rows:
        return Rows(self.tokens[rows], self.is_label[rows])

    def learned_tokens(self) -> Tokens:
        """Returns the tokens that are drafted: those after a label."""
        return self.tokens[:, 1:][self.is_label[:, :-1]]

    def trimmed(self) -> Rows:
        """Returns the windows cut after the last label of the longest, and the token that follows it."""
        last = int(np.flatnonzero(self.is_label.any(0)).max(initial=0))
        nodes = -(-(last + 2) // _TRIM) * _TRIM
        return Rows(self.tokens[:, :nodes], self.is_label[:, :nodes])


@dataclass(frozen=True)
class Windows:
    """Windows of one length in the shards of a folder."""

    folder: Path  # holds <split>-<number>.npy, [windows, seq_len] int32 each, and <split>-labels-<number>.npy
    seq_len: int
    counts: dict[str, int]

    def read(self, split: str, shard: int) -> Rows:
        tokens, is_label = (np.load(self.folder / f"{name}-{shard:05d}.npy") for name in (split, f"{split}-labels"))
        return Rows(tokens, is_label)

    def rows(self, split: str, rows: Sequence[int]) -> Rows:
        """Returns some windows of a split, whole."""
        return Rows(self._rows(split, rows), self._rows(f"{split}-labels", rows))

    def _rows(self, name: str, rows: Sequence[int]) -> NDArray[Any]:
        shards = {row // SHARD_WINDOWS for row in rows}
        held = {i: np.load(self.folder / f"{name}-{i:05d}.npy", mmap_mode="r") for i in shards}
        return np.stack([held[row // SHARD_WINDOWS][row % SHARD_WINDOWS] for row in rows])

    def lengths(self, split: str) -> NDArray[np.int64]:
        """Returns the length of each window up to its last label, [windows]."""
        masks = (self.read(split, shard).is_label for shard in range(self.num_shards(split)))
        return np.concatenate([(mask * np.arange(1, self.seq_len + 1)).max(1) for mask in masks])

    def num_shards(self, split: str) -> int:
        return -(-self.counts[split] // SHARD_WINDOWS)


def rows_of_stream(tokens: Tokens, seq_len: int) -> Rows:
    """Returns a text's tokens [tokens] as windows; the rest that fills none is dropped."""
    num = len(tokens) // seq_len
    cut = tokens[: num * seq_len].reshape(num, seq_len)
    return Rows(cut, np.ones(cut.shape, np.bool_))


def write_windows(dest: Path, windows: dict[str, Rows]) -> Windows:
    """Writes shards to `dest`, atomically, and returns them."""
    seq_len = int(windows[TRAIN].tokens.shape[1])
    counts = {split: len(rows) for split, rows in windows.items()}
    with staged_folder(dest) as folder:
        for split, rows in windows.items():
            for shard, start in enumerate(range(0, len(rows), SHARD_WINDOWS)):
                part = slice(start, start + SHARD_WINDOWS)
                np.save(folder / f"{split}-{shard:05d}.npy", rows.tokens[part])
                np.save(folder / f"{split}-labels-{shard:05d}.npy", rows.is_label[part])
        (folder / "windows.json").write_text(json.dumps({"seq_len": seq_len, "counts": counts}))
    return Windows(dest, seq_len, counts)


def open_windows(folder: Path) -> Windows | None:
    """Returns the windows that `write_windows` wrote, or None."""
    path = folder / "windows.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    return Windows(folder, record["seq_len"], record["counts"])


def digest_from_json(record: object) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
