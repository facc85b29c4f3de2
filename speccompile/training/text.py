# SPDX-License-Identifier: Apache-2.0
"""The windows of both stages, made once and stored under the digest of what they depend on.

Texts are tokenised, joined and cut, conversations are a window each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from speccompile.bundle.format import digest_from_file
from speccompile.checkpoints.checkpoint import special_tokens
from speccompile.checkpoints.folders import digests_from_checkpoint
from speccompile.checkpoints.target_tables import WEIGHT_FILES
from speccompile.common.cache_root import make_cache_folder
from speccompile.common.tokenizer_file import load_tokenizer, read_template_file
from speccompile.errors import CheckpointError, RecipeError
from speccompile.recipe.models import AUTO_TEXTS, NO_TEXTS, Recipe
from speccompile.recipe.training import TrainingSection
from speccompile.training.answers import choose_prompts, generate
from speccompile.training.conversations import ChatReader, TokenRow, rows_from_tokens
from speccompile.training.corpus import Document, Sources, find_sources
from speccompile.training.windows import (
    HELD_OUT,
    TRAIN,
    Rows,
    Tokens,
    Windows,
    digest_from_json,
    open_windows,
    rows_of_stream,
    write_windows,
)

Progress = Callable[[str], None]
_FORMAT = 2  # of the stored windows; a new number makes all of them again
# Of the engine, what changes none of its numbers.
_SIZES = {"max_batch_size", "max_seq_len", "max_draft_nodes", "threads", "logits", "synthetic_acceptance"}


def cache_folder() -> Path:
    """Returns the folder for windows, generated text and the target's outputs. Raises BuildError: not writable."""
    return make_cache_folder("training")


class TextBook:
    """Makes the windows of a run."""

    def __init__(self, recipe: Recipe, target: Path, progress: Progress) -> None:
        assert recipe.training is not None
        self.recipe, self.target, self.progress = recipe, target, progress
        self.section: TrainingSection = recipe.training
        self._sources: Sources | None = None
        tokenizer, self.tokenizer_digest = read_tokenizer(target)
        self.reader = ChatReader(target, tokenizer)

    def digest(self, stage: str) -> str:
        """Returns the digest of everything that the windows of a stage, `plain` or `generated`, depend on."""
        if stage == "plain":
            return digest_from_json({**self._record(), "seq_len": self.section.plain.seq_len})
        names = {"seq_len", "prompt_tokens", "num_sequences", "temperatures"}
        sizes = self.section.generated.model_dump(include=names, mode="json")
        return digest_from_json({**self._record(), **sizes, **self.target_record()})

    @cached_property
    def files(self) -> dict[str, str]:
        """The digests of the target's config and weights, by name. Large ones are read once a run."""
        found = digests_from_checkpoint(self.target, "checkpoint", WEIGHT_FILES)
        return {name: digest[:16] for name, digest in found.items()}

    def target_record(self) -> dict[str, Any]:
        """Returns what the numbers of the target's bundle depend on, JSON-ready."""
        target = self.recipe.target
        engine = self.recipe.engine.model_dump(mode="json", exclude=_SIZES)
        form = target.model_dump(mode="json", exclude={"model"})
        if target.calibration not in (AUTO_TEXTS, NO_TEXTS):
            form["calibration"] = digest_from_file(Path(target.calibration))
        return {**engine, **form, **self._reading(), **self.files}

    def windows(self, stage: str) -> Windows:
        make = self._pack if stage == "plain" else self._generate
        folder = cache_folder() / stage / self.digest(stage)
        return open_windows(folder) or write_windows(folder, make())

    def sources(self) -> Sources:
        if self._sources is None:
            self.progress("text: find documents")
            self._sources = find_sources(self.section.text.files, self.section.text.python_sources)
        return self._sources

    def _record(self) -> dict[str, Any]:
        limits = self.section.text.model_dump(include={"max_tokens", "held_out_tokens"})
        return {
            "format": _FORMAT,
            "documents": self.sources().digest,
            **self._reading(),
            **limits,
            "seed": self.section.seed,
        }

    def _reading(self) -> dict[str, Any]:
        template, special = read_template_file(self.target), special_tokens(self.target)
        return {"tokenizer": self.tokenizer_digest, "template": template, "special_tokens": special}

    def _pack(self) -> dict[str, Rows]:
        self.progress("text: tokenise")
        text, seq_len = self.section.text, self.section.plain.seq_len
        limits = {TRAIN: text.max_tokens, HELD_OUT: text.held_out_tokens}
        return pack(self.sources().documents(), self.reader, seq_len, limits, self._eos(), self.section.seed)

    def _eos(self) -> int:
        return (special_tokens(self.target)[0] or [0])[0]

    def _generate(self) -> dict[str, Rows]:
        self.progress("text: choose prompts")
        prompts = choose_prompts(self.sources().documents(), self.reader, self.section.generated, self.section.seed)
        folder = cache_folder() / "answers" / self.digest("generated")
        return generate(self.recipe, prompts, folder, self._eos(), self.progress)


def read_tokenizer(folder: Path) -> tuple[Tokenizer, str]:
    """Returns the tokenizer of a checkpoint, and its digest. Raises CheckpointError: there is no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(str(path), "no such file", "the tokenizer of the target", "Save it beside the weights.")
    tokenizer = load_tokenizer(path, CheckpointError, "Download the file again.")
    return tokenizer, hashlib.sha256(path.read_bytes()).hexdigest()[:16]


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
            todo = "Give more documents, of which 3 percent are held out, or shorter windows; without answers "
            todo += "train on generated ones (plain.steps: 0)."
            raise RecipeError("training.text", got, expected, todo)
        windows[split] = rows.taken(np.random.default_rng(seed).permutation(len(rows)))
    return windows
