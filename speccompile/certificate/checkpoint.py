# SPDX-License-Identifier: Apache-2.0
"""The target's checkpoint in transformers, float32: what the bundle's engine is compared with, and how far it is."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from speccompile.backends.distance import Distance, compare, distance_from_rows
from speccompile.bundle.bundle import TARGET, Bundle
from speccompile.certificate.decoding import gives_logits
from speccompile.certificate.prompts import TEXTS
from speccompile.certificate.results import Check, check_of, not_run
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.common.extras import install_command
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.core.specs import LENGTHS, LOGITS, TOKENS, all_sure
from speccompile.errors import BundleError, SpecCompileError
from speccompile.runtime.spec_engine import SpecEngine

if TYPE_CHECKING:
    from speccompile.training.target import Target


PACKAGES = ("torch", "transformers")


def find_checkpoint(bundle: Bundle, folder: Path | None = None) -> tuple[Path | None, str]:
    """Returns the folder of the target's checkpoint, or None and the reason; without `folder`, as when it was built."""
    target = bundle.recipe.target
    if target.weights != "checkpoint":
        return None, f"the target's weights are {target.weights}: there is no checkpoint of them"
    if bundle.manifest["recipe"]["target"].get("num_layers") is not None:
        return None, "the target has fewer layers than its checkpoint (target.num_layers)"
    found = folder or (Path(target.model) if target.model else None)
    if found is not None and found.exists():
        found = resolve_checkpoint(str(found))  # of a GGUF file: the folder that is made of it
    if found is None or not (found / "config.json").is_file():
        return None, f"the checkpoint {target.model} is not at hand; name its folder with --checkpoint"
    return found, ""


class Reference:
    """The target in transformers. `target`: in float32."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @property
    def vocab_size(self) -> int:
        return int(self.target.dims.vocab_size)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Returns the tokens of greatest logits, one by one with transformers' cache."""
        import torch

        ids, past, text = torch.tensor([list(prompt)]), None, []
        with torch.inference_mode():
            for _ in range(num_tokens):
                out = self.target.model(input_ids=ids, past_key_values=past, use_cache=True)
                text.append(int(out.logits[0, -1].argmax()))
                ids, past = torch.tensor([[text[-1]]]), out.past_key_values
        return text

    def greedy_beside(self, prompt: Sequence[int], text: Sequence[int]) -> list[int]:
        """Returns the greedy text after a prompt up to where it leaves a given one, by one forward over all of it."""
        rows = self.logits([*prompt, *text])[len(prompt) - 1 : -1]
        best: list[int] = rows.argmax(axis=-1).tolist()
        at = next((i for i, (own, given) in enumerate(zip(best, text, strict=True)) if own != given), len(text) - 1)
        return best[: at + 1] if at + 1 < len(text) else best

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits after each token, [tokens, vocab] float32."""
        import torch

        with torch.inference_mode():
            out = self.target.model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        logits: NDArray[np.float32] = out.logits[0].float().numpy()
        return logits

    def last_logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits after the last token, [vocab] float32."""
        row: NDArray[np.float32] = self.logits(tokens)[-1]
        return row


def open_reference(folder: Path, lora: str | None = None, adapter: str | None = None) -> tuple[Reference | None, str]:
    """Returns a checkpoint's target with `lora` and `adapter` merged, or None and why it cannot be run here."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return None, f"{' and '.join(missing)} not installed: {install_command('build')}"
    import torch

    from speccompile.checkpoints.lora import open_lora
    from speccompile.export.lora import merge_lora
    from speccompile.training.target import Target, keep_pages

    keep_pages()
    try:
        target = Target(folder, torch.float32, lora=lora)
        if adapter is not None:
            merge_lora(target.model, open_lora(adapter))
        return Reference(target), ""
    except (SpecCompileError, ImportError, MemoryError) as fault:
        return None, f"transformers cannot run {folder}: {fault}"


def is_exact(manifest: dict[str, Any]) -> bool:
    """Returns whether the target's graph computes in float32 with the checkpoint's own weights and float caches."""
    return rows_of(manifest) == "float32" and manifest["graphs"]["target"].get("quantization", "none") == "none"


def dtype_of(manifest: dict[str, Any]) -> str:
    """Returns the dtype of the target's activations."""
    return str(manifest["recipe"]["target"].get("dtype") or "float32")


def rows_of(manifest: dict[str, Any]) -> str:
    """Returns the dtype of the rows of the target's caches."""
    kind = str(manifest["recipe"]["engine"].get("kv_cache", "auto"))
    return dtype_of(manifest) if kind == "auto" else kind


TOKENIZER, FILE = "tokenizer", "tokenizer.json"
ODD_TEXTS = ("", " ", "naïve café, 数字 12 345,67", "\t\tx = [1, 2]\r\n", "🙂🙃", "<s></s>")
LONG_TEXT = "\n".join(TEXTS) * 200  # some 40,000 tokens: more than a stored truncation leaves


def check_tokenizer(engine: SpecEngine, checkpoint: Path | None) -> Check:
    """Compares vocabulary and ids of texts with the checkpoint's tokenizer, and the ids with the target's vocabulary.

    Ids are compared with transformers' where it can read the tokenizer; `checkpoint` is None: it is not at hand.
    """
    if engine.tokenizer is None:
        return not_run(TOKENIZER, "the bundle has no tokenizer")
    size = engine.verifier.engine.spec.vocab_size
    texts = [*TEXTS, *ODD_TEXTS, LONG_TEXT]
    ids = [engine.tokenizer.encode(text).ids for text in texts]
    largest = max((token for row in ids for token in row), default=0)
    facts: dict[str, Any] = {"num_texts": len(texts), "largest_id": largest, "vocab_size": size}
    if largest >= size:
        summary = f"the tokenizer gives id {largest}, the target has {size} tokens"
        return check_of(TOKENIZER, False, summary, facts)
    if checkpoint is None or not (checkpoint / FILE).is_file():
        return not_run(TOKENIZER, "ids are tokens of the target, but the checkpoint's tokenizer is not at hand")
    other: Any = load_tokenizer(checkpoint / FILE, BundleError, "Give the target's checkpoint.")
    expected = _ids_of_transformers(checkpoint, texts)
    reader = "tokenizers" if expected is None else "transformers"
    expected = [other.encode(text).ids for text in texts] if expected is None else expected
    differing = [i for i, row in enumerate(expected) if row != ids[i]]
    ours, theirs = engine.tokenizer.get_vocab(), other.get_vocab()
    num_moved = sum(theirs.get(token) != index for token, index in ours.items()) + len(theirs.keys() - ours.keys())
    facts |= {"num_equal": len(texts) - len(differing), "reader": reader}
    facts |= {"num_entries": len(ours), "num_entries_differing": num_moved}
    is_right = not differing and not num_moved
    told = f"{len(texts) - len(differing)} of {len(texts)} texts have the ids of the checkpoint's tokenizer in {reader}"
    summary = f"{told}; {num_moved} of {len(ours)} entries of the vocabulary differ"
    return check_of(TOKENIZER, is_right, summary, facts)


def _ids_of_transformers(checkpoint: Path, texts: Sequence[str]) -> list[list[int]] | None:
    try:
        from transformers import PreTrainedTokenizerFast

        reader = PreTrainedTokenizerFast.from_pretrained(checkpoint, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return [list(reader(text, verbose=False)["input_ids"]) for text in texts]


DISTANCE = "distance"
MAX_KL_EXACT = 1e-6  # nats; only the order of sums differs
MAX_KL = 0.5  # of any form: beyond it is another model
CHUNK = 16  # tokens of a step


def logits_of(engine: SpecEngine, tokens: Sequence[int], chunk: int = CHUNK, start: int = 0) -> NDArray[np.float64]:
    """Returns the engine's logits after each token from `start` on, in steps of `chunk`: [tokens, vocab] float64."""
    target, rows = engine.verifier.engine, []
    engine.reset(len(tokens))
    for at, end in pairwise((*range(0, start, CHUNK), *range(start, len(tokens), chunk), len(tokens))):
        part = np.array([tokens[at:end]], dtype=np.int64)
        feeds = {TOKENS: part, LENGTHS: np.array([at], np.int64), **all_sure(target.spec, 1, part.shape[1])}
        logits = np.asarray(target.run(feeds)[LOGITS])[0]
        rows += [np.array(logits, dtype=np.float64)] if at >= start else []
    return np.concatenate(rows)


def check_distance(
    engine: SpecEngine,
    texts: Sequence[Sequence[int]],
    reference: Reference | None,
    why: str,
    manifest: Mapping[str, Any],
) -> Check:
    """Measures KL divergence and agreement of the likeliest token; states what the build measured beside it."""
    graph = manifest["graphs"][TARGET]
    form, quantization = graph.get("form"), graph.get("quantization", "none")
    facts: dict[str, Any] = {"form": form, "quantization": quantization, "dtype": dtype_of(dict(manifest))}
    built = (graph.get("form_distances") or {}).get(form)
    told = ""
    if built is not None:
        facts["measured_by_the_build"] = built
        told = f"; the build measured {Distance.from_json(built).summary()}, over other texts"
    if (cached := graph.get("cache_distance")) is not None:
        facts["int8_caches_measured_by_the_build"] = cached
        told += f"; of its int8 caches, from float32 ones, {Distance.from_json(cached).summary()}"
    if reference is None or not gives_logits(engine):
        return not_run(DISTANCE, (why if reference is None else "the target keeps its logits to itself") + told)
    vocab = min(engine.verifier.engine.spec.vocab_size, reference.vocab_size)
    rows = []
    for text in texts:
        wanted, got = reference.logits(text)[:-1, :vocab], logits_of(engine, text)[:-1, :vocab]
        rows.append(compare(wanted, got, np.array(text[1:], np.int64)))
    found = distance_from_rows(rows)
    exact = is_exact(dict(manifest))
    facts |= {"num_tokens": sum(map(len, texts)), "is_exact": exact, **asdict(found)}
    is_right = found.kl <= (MAX_KL_EXACT if exact else MAX_KL)
    kind = "float32" if exact else f"{quantization} weights, {facts['dtype']}"
    summary = f"{kind}, from transformers' float32 over {found.num_positions} positions: {found.summary()}{told}"
    return check_of(DISTANCE, is_right, summary, facts)
