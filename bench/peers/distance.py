#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Distance to float32 of bundles and of OpenVINO's forms of the same checkpoint: mean KL, and top-1 agreement.

    python bench/peers/distance.py BUNDLE [BUNDLE...] --prompts PROMPTS [--forms int8,int4] [--limit 24]

Bundles need `engine.logits: true`. The texts are the prompts themselves, each read at once; float32 is transformers'.
OpenVINO runs in the environment of `make peers`; it converts the checkpoint as it is, so bundles with an adapter
(`target.lora`), which is merged into transformers' weights, are compared alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import speccompile
from bench.greedy_equality import open_target
from speccompile.backends.onnxruntime.fidelity import Distance, distance
from speccompile.cli.bench_peers import convert_checkpoint, peer_environment, read_peers
from speccompile.core.specs import LENGTHS, LOGITS, TOKENS
from speccompile.runtime.bundle import Bundle

HERE = Path(__file__).resolve().parent
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # of the activations; weights as stored
Rows = list[NDArray[Any]]


def logits_of_transformers(bundle: Bundle, texts: Sequence[Sequence[int]]) -> Rows:
    """Returns the logits [tokens, vocab] of each text, by the target's checkpoint in float32."""
    reference = open_target(bundle)
    return [reference.logits(text) for text in texts]


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


def of_texts(wanted: Rows, got: Rows) -> Distance:
    """Returns the distance over the positions of all texts."""
    return distance(np.concatenate(wanted).astype(np.float64), np.concatenate(got).astype(np.float64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", help="of one checkpoint, built with engine.logits: true")
    parser.add_argument("--prompts", type=Path, required=True, help="one JSON object with `prompt` a line")
    parser.add_argument("--forms", default="int8,int4", help="of OpenVINO")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--peers-dir", type=Path, default=Path("build/peers"))
    args = parser.parse_args()
    engines = {bundle: speccompile.load(bundle, method="none", verify=False) for bundle in args.bundles}
    first = next(iter(engines.values()))
    assert first.bundle is not None and first.bundle.recipe.target.model is not None
    target = first.bundle.recipe.target
    if any(engine.bundle is None or engine.bundle.recipe.target.lora != target.lora for engine in engines.values()):
        parser.error("bundles of different adapters (target.lora)")
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.limit]
    texts = [first.encode(json.loads(line)["prompt"]) for line in lines]
    wanted = logits_of_transformers(first.bundle, texts)
    found = {bundle: of_texts(wanted, logits_of_bundle(engine, texts)) for bundle, engine in engines.items()}
    if target.lora is None:
        found |= distances_of_openvino(args, Path(str(target.model)), texts, wanted)
    print(f"{sum(map(len, texts))} positions of {len(texts)} texts\n\n| form | KL | top-1 |\n|---|---|---|")
    for name, row in found.items():
        print(f"| {name} | {row.kl:.2e} | {row.top1:.2%} |")


def distances_of_openvino(
    args: argparse.Namespace, checkpoint: Path, texts: Sequence[Sequence[int]], wanted: Rows
) -> dict[str, Distance]:
    """Returns the distance of each of OpenVINO's forms, with its own and with float32 activations."""
    [openvino], left_out = read_peers("openvino", args.peers_dir)
    if left_out:
        sys.exit(str(left_out))
    found = {}
    for form in args.forms.split(","):
        model = convert_checkpoint(openvino, form, checkpoint, args.peers_dir / "models")
        for name, hints in ((f"OpenVINO {form}", {}), (f"OpenVINO {form}, float32 activations", FLOAT32)):
            found[name] = of_texts(wanted, logits_of_openvino(openvino.python, model, texts, hints))
    return found


if __name__ == "__main__":
    main()
