# SPDX-License-Identifier: Apache-2.0
"""The windows of both stages, made once and stored under the digest of what they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from speccompile.checkpoints.checkpoint import read_text_config, token_ids
from speccompile.checkpoints.folders import weight_files
from speccompile.common.cache_root import make_cache_folder
from speccompile.common.tokenizer_file import load_tokenizer, read_template_file
from speccompile.errors import CheckpointError
from speccompile.recipe.models import Recipe
from speccompile.recipe.training import TrainingSection
from speccompile.training.answers import choose_prompts, generate
from speccompile.training.conversations import ChatReader
from speccompile.training.corpus import Sources, find_sources
from speccompile.training.packing import pack
from speccompile.training.windows import HELD_OUT, TRAIN, Rows, Windows, digest_from_json, open_windows, write_windows

Progress = Callable[[str], None]
_FORMAT = 2  # of the stored windows; a new number makes all of them again


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

    def target_record(self) -> dict[str, Any]:
        """Returns what the numbers of the target's bundle depend on, JSON-ready."""
        engine = self.recipe.engine.model_dump(mode="json", include={"backend", "device"})
        form = self.recipe.target.model_dump(mode="json", include={"dtype", "quantization"})
        return {**engine, **form, "target": _digest_of_weights(self.target)}

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
            "tokenizer": self.tokenizer_digest,
            "template": read_template_file(self.target),
            **limits,
            "seed": self.section.seed,
        }

    def _pack(self) -> dict[str, Rows]:
        self.progress("text: tokenise")
        text, seq_len = self.section.text, self.section.plain.seq_len
        limits = {TRAIN: text.max_tokens, HELD_OUT: text.held_out_tokens}
        return pack(self.sources().documents(), self.reader, seq_len, limits, self._eos(), self.section.seed)

    def _eos(self) -> int:
        path = self.target / "config.json"
        return (token_ids(path, read_text_config(self.target), "eos_token_id") or [0])[0]

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


def _digest_of_weights(folder: Path) -> list[str]:
    files = sorted([*weight_files(folder), folder / "config.json"])
    return [hashlib.file_digest(file.open("rb"), "sha256").hexdigest() for file in files]
