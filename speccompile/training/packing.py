# SPDX-License-Identifier: Apache-2.0
"""Documents as windows of tokens on disk: tokenised, concatenated, cut; split by content hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from speccompile.bundle.staging import staged_folder
from speccompile.errors import RecipeError
from speccompile.training.corpus import Document

Tokens = NDArray[np.int32]
SHARD_WINDOWS = 512  # windows of a shard
_BATCH = 64  # documents tokenised at once
TRAIN, HELD_OUT = "train", "held_out"


@dataclass(frozen=True)
class Windows:
    """Windows of one length in the shards of a folder.

    Args:
        folder: holds <split>-<number>.npy, [windows, seq_len] int32 each.
    """

    folder: Path
    seq_len: int
    counts: dict[str, int]

    def read(self, split: str, shard: int) -> Tokens:
        return np.asarray(np.load(self.folder / f"{split}-{shard:05d}.npy"), dtype=np.int32)

    def rows(self, split: str, rows: Sequence[int]) -> Tokens:
        """Returns some windows of a split, [rows, seq_len]."""
        shards = {row // SHARD_WINDOWS for row in rows}
        held = {i: np.load(self.folder / f"{split}-{i:05d}.npy", mmap_mode="r") for i in shards}
        return np.stack([held[row // SHARD_WINDOWS][row % SHARD_WINDOWS] for row in rows])

    def num_shards(self, split: str) -> int:
        return -(-self.counts[split] // SHARD_WINDOWS)

    def all(self, split: str) -> Tokens:
        """Returns all windows of a split, [windows, seq_len]."""
        return np.concatenate([self.read(split, i) for i in range(self.num_shards(split))])


def pack(
    documents: Iterable[Document], tokenizer: Tokenizer, seq_len: int, max_tokens: dict[str, int], eos: int, seed: int
) -> dict[str, Tokens]:
    """Returns the windows by split, at most `max_tokens` of each, in an order drawn from `seed`.

    Documents are taken in the order of their hash, which is independent of their content. Each is followed by
    `eos`; the rest that fills no window is dropped.

    Raises:
        RecipeError: too little text for one window of a split.
    """
    streams: dict[str, list[Tokens]] = {TRAIN: [], HELD_OUT: []}
    held = dict.fromkeys(streams, 0)
    for batch in _batches(documents):
        batch = [d for d in batch if held[_split(d)] < max_tokens[_split(d)]]
        for document, encoded in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
            split = _split(document)
            if held[split] < max_tokens[split]:
                streams[split].append(np.array([*encoded.ids, eos], dtype=np.int32))
                held[split] += len(encoded.ids) + 1
        if all(held[s] >= max_tokens[s] for s in streams):
            break
    windows = {}
    for split, parts in streams.items():
        joined = np.concatenate(parts)[: max_tokens[split]] if parts else np.zeros(0, dtype=np.int32)
        num = len(joined) // seq_len
        if num == 0:
            got = f"{len(joined)} tokens for {split}"
            expected = f"at least one window of {seq_len} tokens"
            raise RecipeError("training.text", got, expected, "Give more text, or shorter windows.")
        rows = joined[: num * seq_len].reshape(num, seq_len)
        windows[split] = rows[np.random.default_rng(seed).permutation(num)]
    return windows


def write_windows(dest: Path, windows: dict[str, Tokens]) -> Windows:
    """Writes shards to `dest`, atomically, and returns them."""
    seq_len = int(windows[TRAIN].shape[1])
    counts = {split: len(rows) for split, rows in windows.items()}
    with staged_folder(dest) as folder:
        for split, rows in windows.items():
            for shard, start in enumerate(range(0, len(rows), SHARD_WINDOWS)):
                np.save(folder / f"{split}-{shard:05d}.npy", rows[start : start + SHARD_WINDOWS])
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


def _split(document: Document) -> str:
    return HELD_OUT if document.is_held_out else TRAIN


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
