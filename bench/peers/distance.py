#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Distance to float32 of bundles, of OpenVINO's forms of the same checkpoint and of llama.cpp's types of weights.

    python bench/peers/distance.py BUNDLE [BUNDLE...] --text TEXT [--forms int8,int4] [--ggml Q4_1,Q8_0] [--tokens 4096]

Bundles need `engine.logits: true`. TEXT is a file as `target.calibration` names it: plain text, or JSON lines with
`text`, `prompt` or `messages`; it is read in pieces of 256 tokens, each at once. Float32 is transformers'. OpenVINO
runs in the environment of `make peers`; it converts the checkpoint as it is, so bundles with `target.lora`, an adapter
that is merged into transformers' weights, are compared alone. llama.cpp's types are its reference quantisation of
every linear's weights (package `gguf`; the LM head as Q8_0) in transformers, whose activations are float32 or rounded
to 8 bits in groups of 32, as llama.cpp rounds them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import speccompile
from bench.greedy_equality import open_target
from bench.peers.peers import convert_checkpoint, peer_environment, read_peers
from speccompile.backends.distance import Distance, compare, distance_from_rows
from speccompile.bundle.bundle import Bundle
from speccompile.bundle.choices import read_texts
from speccompile.certificate.checkpoint import Reference
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.core.specs import LENGTHS, LOGITS, TOKENS

HERE = Path(__file__).resolve().parent
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # of the activations; weights as stored
PIECE, GROUP = 256, 32
Rows = Iterable[NDArray[Any]]


def pieces_of_text(path: Path, folder: Path, vocab_size: int, num_tokens: int) -> list[list[int]]:
    """Returns the first tokens of a file in pieces."""
    pieces, left = [], num_tokens
    for text in read_texts(path, folder, vocab_size):
        for at in range(0, len(text), PIECE):
            piece = list(text[at : at + min(PIECE, left)])
            left -= len(piece)
            pieces += [piece] if len(piece) > 1 else []
    return pieces


def logits_of_transformers(bundle: Bundle, texts: Sequence[Sequence[int]]) -> Rows:
    """Returns the logits [tokens, vocab] of each text, by the target's checkpoint in float32."""
    reference = open_target(bundle)
    return [reference.logits(text) for text in texts]


def logits_of_ggml(bundle: Bundle, texts: Sequence[Sequence[int]], name: str, *, rounds: bool) -> Rows:
    """Returns the logits of each text with weights of one of llama.cpp's types, activations rounded or float32."""
    reference = open_target(bundle)
    use_ggml(reference, name, rounds=rounds)
    return (reference.logits(text) for text in texts)


def use_ggml(reference: Reference, name: str, *, rounds: bool) -> None:
    """Replaces the weights of a model's linears."""
    import gguf
    import torch

    def rounded(module: Any, args: tuple[Any]) -> tuple[Any]:
        groups = args[0].unflatten(-1, (-1, GROUP))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return (((groups / scale.clamp_min(1e-30)).round() * scale).flatten(-2),)

    for path, module in reference.target.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            kind = gguf.GGMLQuantizationType["Q8_0" if path.endswith("lm_head") else name]
            weight = gguf.quants.dequantize(gguf.quants.quantize(module.weight.detach().numpy(), kind), kind)
            module.weight.data.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
            if rounds:
                module.register_forward_pre_hook(rounded)


def logits_of_bundle(engine: speccompile.SpecEngine, texts: Sequence[Sequence[int]]) -> Rows:
    """Returns the logits of each text by the bundle's target."""
    target, rows = engine.verifier.engine, []
    for text in texts:
        engine.reset(len(text))
        outputs = target.run({TOKENS: np.array([text], dtype=np.int64), LENGTHS: np.zeros(1, dtype=np.int64)})
        rows.append(np.array(np.asarray(outputs[LOGITS])[0]))
    return rows


def logits_of_openvino(python: str, model: Path, texts: Sequence[Sequence[int]], hints: Mapping[str, str]) -> Rows:
    """Returns the logits of each text by a converted model."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        job = {"model": str(model), "texts": [list(text) for text in texts], "hints": dict(hints), "out": str(out)}
        command = [python, str(HERE / "openvino_logits.py")]
        subprocess.run(command, input=json.dumps(job), text=True, check=True, env=peer_environment(2))
        with np.load(out) as held:
            return [held[name] for name in sorted(held.files)]


def of_texts(wanted: Rows, got: Rows, texts: Sequence[Sequence[int]]) -> Distance:
    """Returns the distance over the positions of all texts."""
    rows = []
    for text, one, other in zip(texts, wanted, got, strict=True):
        vocab = min(one.shape[-1], other.shape[-1])
        rows.append(compare(one[:-1, :vocab], other[:-1, :vocab], np.array(text[1:])))
    return distance_from_rows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", help="of one checkpoint, built with engine.logits: true")
    parser.add_argument("--text", type=Path, required=True, help="plain text, or JSON lines")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text that are read")
    parser.add_argument("--forms", default="int8,int4", help="of OpenVINO")
    parser.add_argument("--ggml", default="Q4_1,Q8_0", help="llama.cpp's types")
    parser.add_argument("--peers-dir", type=Path, default=Path("build/peers"))
    args = parser.parse_args()
    engines = {bundle: speccompile.load(bundle, method="none", verify=False) for bundle in args.bundles}
    first = next(iter(engines.values()))
    assert first.bundle is not None and first.bundle.recipe.target.model is not None
    target = first.bundle.recipe.target
    if any(engine.bundle is None or engine.bundle.recipe.target.lora != target.lora for engine in engines.values()):
        parser.error("bundles of different adapters (target.lora)")
    folder = resolve_checkpoint(target.model)
    texts = pieces_of_text(args.text, folder, first.verifier.engine.spec.vocab_size, args.tokens)
    wanted = list(logits_of_transformers(first.bundle, texts))
    print(f"{sum(map(len, texts)) - len(texts)} positions of {len(texts)} texts\n")
    print("| form | KL | same top token | perplexity |\n|---|---|---|---|")

    def tell(name: str, got: Rows) -> None:
        row = of_texts(wanted, got, texts)
        change, error = row.perplexity_change or 0.0, row.perplexity_error
        print(f"| {name} | {row.kl:.2e} | {row.top1:.1%} | {change:+.2%} ± {error:.2%} |", flush=True)

    for bundle, engine in engines.items():
        tell(bundle, logits_of_bundle(engine, texts))
    for name in filter(None, args.ggml.split(",")):
        for rounds in (False, True):
            activations = "int8" if rounds else "float32"
            tell(f"{name}, {activations} activations", logits_of_ggml(first.bundle, texts, name, rounds=rounds))
    if target.lora is None and args.forms:
        for name, rows in forms_of_openvino(args, Path(str(target.model)), texts):
            tell(name, rows)


def forms_of_openvino(
    args: argparse.Namespace, checkpoint: Path, texts: Sequence[Sequence[int]]
) -> Iterable[tuple[str, Rows]]:
    """Yields the logits of each of OpenVINO's forms, with its own and with float32 activations."""
    [openvino], left_out = read_peers("openvino", args.peers_dir)
    if left_out:
        sys.exit(str(left_out))
    for form in args.forms.split(","):
        model = convert_checkpoint(openvino, form, checkpoint, args.peers_dir / "models")
        for name, hints in ((f"OpenVINO {form}", {}), (f"OpenVINO {form}, float32 activations", FLOAT32)):
            yield name, logits_of_openvino(openvino.python, model, texts, hints)


if __name__ == "__main__":
    main()
