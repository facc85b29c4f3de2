# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of a bundle: the target's is copied, a draft's must be the same."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.bundle.format import digest_from_json
from speccompile.checkpoints.texts import TOKENIZER
from speccompile.common.json_reader import read_json_object
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.core.dims import ModelDims
from speccompile.errors import CheckpointError, RecipeError

TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "chat_template.jinja"),
    *("generation_config.json", "special_tokens_map.json"),
)


@dataclass(frozen=True)
class TokenizerFacts:
    """Facts on which two tokenizers must agree so that their token ids have the same meaning."""

    digest: str  # over the model part (vocabulary, merges) and the added tokens
    num_tokens: int  # 1 + the highest token id
    kind: str
    num_own: int = 0  # the same as `num_tokens` without added tokens


def read_tokenizer(source: Path) -> TokenizerFacts | None:
    """Returns the facts of a folder's tokenizer.json; None when there is none."""
    path = source / TOKENIZER
    if not path.exists():
        return None
    try:
        data = read_json_object(path, CheckpointError, "Download the file again.", "a tokenizers file")
        model: dict[str, Any] = data["model"]
        added = [(str(t["content"]), int(t["id"])) for t in data.get("added_tokens") or ()]
        vocab = model["vocab"]
        # Unigram lists its pieces, the others map them to ids.
        num_own = 1 + max(vocab.values() if isinstance(vocab, dict) else range(len(vocab)), default=-1)
        num_tokens = max([num_own, *(i + 1 for _, i in added)])
    except (OSError, ValueError, KeyError, TypeError) as fault:
        got = f"{type(fault).__name__}: {fault}"
        raise CheckpointError(str(path), got, "a tokenizers file", "Download the file again.") from fault
    digest = digest_from_json({"model": model, "added": sorted(added)})
    return TokenizerFacts(digest, num_tokens, str(model.get("type", "BPE")), num_own)


def check_tokenizer(source: Path, dims: ModelDims, weights: str) -> TokenizerFacts | None:
    """Returns the target's tokenizer; None where random weights are built without one.

    Raises:
        CheckpointError: missing, or it has tokens that the model's vocabulary lacks.
    """
    facts = read_tokenizer(source)
    if facts is None and weights == "checkpoint":
        todo = "Save the tokenizer beside the weights with transformers: tokenizer.save_pretrained(FOLDER)."
        raise CheckpointError(str(source / TOKENIZER), "no such file", "the model's tokenizer", todo)
    if facts is not None:  # the bundle's is loaded when it is served
        load_tokenizer(source / TOKENIZER, CheckpointError, "Download the file again.")
    if facts is not None and facts.num_tokens > dims.vocab_size:
        got = f"token ids up to {facts.num_tokens - 1}"
        expected = f"less than vocab_size {dims.vocab_size} of config.json"
        todo = "Config and tokenizer belong to different models: download both again."
        if facts.num_own <= dims.vocab_size:
            got = f"added tokens with ids up to {facts.num_tokens - 1}, which have no row in the embedding"
            todo = "Remove them from added_tokens, or resize the model with transformers: resize_token_embeddings."
        raise CheckpointError(str(source / TOKENIZER), got, expected, todo)
    return facts


def check_same_tokenizer(
    name: str, target: tuple[Path, ModelDims], draft: tuple[Path, ModelDims], may_differ: bool
) -> None:
    """Refuses a draft whose token ids have another meaning than the target's.

    Vocabularies of the same tokenizer may be padded differently, see `passes.fit_vocab`. A draft that may differ loses
    the tokens that the target lacks.

    Raises:
        RecipeError: they differ, or the draft lacks tokens of the shared tokenizer.
    """
    (target_source, target_dims), (draft_source, draft_dims) = target, draft
    if may_differ:
        return
    where = f"speculator: {name} {draft_source}"
    todo = "Choose a draft of the same family, or set speculator.allow_tokenizer_mismatch: true."
    ours, theirs = read_tokenizer(target_source), read_tokenizer(draft_source)
    if ours is None and theirs is None:
        if draft_dims.vocab_size != target_dims.vocab_size:
            expected = f"{target_dims.vocab_size}, as the target has"
            raise RecipeError(where, f"a vocabulary of {draft_dims.vocab_size} tokens", expected, todo)
        return
    if ours is None or theirs is None:
        missing = target_source if ours is None else draft_source
        raise RecipeError(where, f"no {TOKENIZER} in {missing}", "the target's tokenizer", todo)
    if ours != theirs:
        got = f"a {theirs.kind} tokenizer of {theirs.num_tokens} tokens, digest {theirs.digest[:12]}"
        expected = f"the target's: {ours.kind}, {ours.num_tokens} tokens, digest {ours.digest[:12]}"
        raise RecipeError(where, got, expected, todo)
    if draft_dims.vocab_size < theirs.num_tokens:
        expected = f"at least {theirs.num_tokens}, the tokens of its tokenizer"
        todo = "Config and tokenizer belong to different models: download both again."
        raise RecipeError(where, f"a vocabulary of {draft_dims.vocab_size} tokens", expected, todo)


def copy_tokenizer(source: Path, dest: Path) -> str | None:
    """Copy the tokenizer's existing files into the folder `dest`; returns tokenizer.json's path in the bundle."""
    dest.mkdir()
    return f"{dest.name}/{TOKENIZER}" if TOKENIZER in copy_tokenizer_files(source, dest) else None


def copy_tokenizer_files(source: Path, dest: Path) -> list[str]:
    found = [name for name in TOKENIZER_FILES if (source / name).exists()]
    for name in found:
        shutil.copyfile(source / name, dest / name)
    return found
