# SPDX-License-Identifier: Apache-2.0
"""The windows of both stages, made once and stored under the digest of what they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from speccompile.bundle.stage_cache import StageCache
from speccompile.checkpoints.checkpoint import read_text_config
from speccompile.checkpoints.gguf.folder import weight_files
from speccompile.checkpoints.special_tokens import token_ids
from speccompile.common.cache_root import make_cache_folder
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import CheckpointError, RecipeError
from speccompile.pipeline import build
from speccompile.recipe.models import Recipe, SpeculatorSection
from speccompile.recipe.plan import find_device, resolve
from speccompile.recipe.training import TrainingSection
from speccompile.runtime.engine import load
from speccompile.training.corpus import HELD_OUT_SHARE, Document, Sources, find_sources
from speccompile.training.packing import (
    HELD_OUT,
    TRAIN,
    Tokens,
    Windows,
    digest_from_json,
    open_windows,
    pack,
    write_windows,
)

Progress = Callable[[str], None]
_FORMAT = 1  # of the stored windows; a new number makes all of them again


def cache_folder() -> Path:
    """Returns the folder for windows, generated text and the target's outputs.

    Raises:
        BuildError: it cannot be written.
    """
    return make_cache_folder("training")


class TextBook:
    """Makes the windows of a run."""

    def __init__(self, recipe: Recipe, target: Path, progress: Progress) -> None:
        assert recipe.training is not None
        self.recipe, self.target, self.progress = recipe, target, progress
        self.section: TrainingSection = recipe.training
        self._sources: Sources | None = None
        self.tokenizer, self.tokenizer_digest = read_tokenizer(target)

    def digest(self, stage: str) -> str:
        """Returns the digest of everything that the windows of a stage, `plain` or `generated`, depend on."""
        if stage == "plain":
            return digest_from_json({**self._record(), "seq_len": self.section.plain.seq_len})
        names = {"seq_len", "prompt_tokens", "num_sequences", "temperatures"}
        sizes = self.section.generated.model_dump(include=names, mode="json")
        engine = self.recipe.engine.model_dump(mode="json", include={"backend", "device"})
        return digest_from_json({**self._record(), **sizes, **engine, "target": _digest_of_weights(self.target)})

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
        tokenizer, documents = self.tokenizer_digest, self.sources().digest
        return {
            "format": _FORMAT, "documents": documents, "tokenizer": tokenizer, **limits, "seed": self.section.seed
        }  # fmt: skip

    def _pack(self) -> dict[str, Tokens]:
        """Returns the windows of stage 1."""
        self.progress("text: tokenise")
        text, seq_len = self.section.text, self.section.plain.seq_len
        limits = {TRAIN: text.max_tokens, HELD_OUT: text.held_out_tokens}
        return pack(self.sources().documents(), self.tokenizer, seq_len, limits, self._eos(), self.section.seed)

    def _eos(self) -> int:
        path = self.target / "config.json"
        return (token_ids(path, read_text_config(self.target), "eos_token_id") or [0])[0]

    def _generate(self) -> dict[str, Tokens]:
        """Returns the windows of stage 2: prompts cut from the text, continued by the target."""
        section = self.section.generated
        num_held_out = max(1, round(section.num_sequences * HELD_OUT_SHARE))
        wanted = {TRAIN: section.num_sequences, HELD_OUT: num_held_out}
        prompts = self._prompts(wanted)
        plan = resolve(_plain_recipe(self.recipe), find_device(self.recipe.engine.device))
        self.progress("text: build the target")
        bundle = build(plan, cache_folder() / "bundles" / self.digest("generated"), cache=StageCache(None))
        engine = load(bundle.path)
        params = SamplingParams(max_new_tokens=section.seq_len - section.prompt_tokens)
        windows = {}
        for split, rows in prompts.items():
            heats = [section.temperatures[i % len(section.temperatures)] for i in range(len(rows))]
            sampling = [replace(params, temperature=h, seed=self.section.seed + i) for i, h in enumerate(heats)]
            texts: list[list[int]] = [[] for _ in rows]
            run = engine.run(rows, sampling, speculative=False, batch_size=section.batch_slots)
            for done, (index, generation) in enumerate(run, 1):
                texts[index] = [*rows[index], *generation.tokens]
                self.progress(f"text: generate {split} {done}/{len(rows)}")
            windows[split] = _cut(texts, section.seq_len)
        return windows

    def _prompts(self, wanted: dict[str, int]) -> dict[str, list[list[int]]]:
        """Returns the prompts by split: each begins at a line of a document of that split."""
        num = self.section.generated.prompt_tokens
        rng = np.random.default_rng(self.section.seed)
        found: dict[str, list[list[int]]] = {split: [] for split in wanted}
        by_split: dict[str, list[Document]] = {TRAIN: [], HELD_OUT: []}
        for document in self.sources().documents():
            split = HELD_OUT if document.is_held_out else TRAIN
            if len(by_split[split]) < wanted[split]:
                by_split[split].append(document)
            if all(len(by_split[s]) >= wanted[s] for s in wanted):
                break
        for split, documents in by_split.items():
            for tries in range(20 * wanted[split]):
                if len(found[split]) == wanted[split] or not documents:
                    break
                lines = documents[tries % len(documents)].text.splitlines(keepends=True)
                first = int(rng.integers(len(lines)))
                ids = self.tokenizer.encode("".join(lines[first : first + num])).ids[:num]
                if len(ids) == num:
                    found[split].append(ids)
            if not found[split]:
                got, expected = f"no line of {split} text is followed by {num} tokens", "some that are"
                raise RecipeError("training.text", got, expected, "Give more text, or shorter prompts.")
        return found


def read_tokenizer(folder: Path) -> tuple[Tokenizer, str]:
    """Returns the tokenizer of a checkpoint, and its digest.

    Raises:
        CheckpointError: there is no tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(str(path), "no such file", "the tokenizer of the target", "Save it beside the weights.")
    tokenizer = load_tokenizer(path, CheckpointError, "Download the file again.")
    return tokenizer, hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _digest_of_weights(folder: Path) -> list[str]:
    files = sorted([*weight_files(folder), folder / "config.json"])
    return [hashlib.file_digest(file.open("rb"), "sha256").hexdigest() for file in files]


def _plain_recipe(recipe: Recipe) -> Recipe:
    assert recipe.training is not None
    section = recipe.training.generated
    engine = recipe.engine.model_copy(
        update={"max_batch_size": section.batch_slots, "max_seq_len": section.seq_len + 32, "max_draft_nodes": 1}
    )
    return recipe.model_copy(update={"engine": engine, "speculator": SpeculatorSection(method="none")})


def _cut(texts: Sequence[list[int]], seq_len: int) -> Tokens:
    rows = [t for t in texts if len(t) == seq_len]
    rest = [token for t in texts if len(t) != seq_len for token in t]
    rows += list(_step_outputs(rest, seq_len))
    if not rows:
        got = f"{len(rest)} tokens in all"
        raise RecipeError("training.generated", got, f"at least {seq_len}", "Generate more sequences.")
    return np.array(rows, dtype=np.int32)


def _step_outputs(tokens: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(tokens) - size + 1, size):
        yield tokens[start : start + size]
