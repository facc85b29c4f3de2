#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Distance to float32 of bundles and of the peers' forms of the same model, for the page of benchmarks.

    python bench/peers/quality.py bundles/smollm2 --peers llama.cpp,openvino,ort-genai --precisions stored,int8,int4 \
        --out bench/results/smollm2-quality.json

Bundles need `engine.logits: true` and a chat template. The texts are answers to our conversations, which transformers
draws in float32 at temperature 0.8; each is read at once, and its answer's positions count. The peers read the
checkpoint as it is: bundles with an adapter (`target.lora`), which is merged into transformers' weights, are compared
alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import speccompile
from bench.greedy_equality import open_target
from bench.peers.peers import Peer, convert_checkpoint, peer_environment, precision_from_bundle, read_peers, source_of
from speccompile.backends.distance import Distance, compare, distance_from_rows
from speccompile.common.chat_prompts import read_chats
from speccompile.core.specs import LENGTHS, LOGITS, TOKENS
from speccompile.errors import BuildError

THREADS, READ = 2, 64  # tokens of a text that a bundle reads at once
Rows = list[NDArray[Any]]


@dataclass(frozen=True)
class Answer:
    """A text to read: a prompt with its answer.

    Args:
        tokens: of both.
        start: index of the answer's first token.
    """

    tokens: list[int]
    start: int

    def rows(self, logits: NDArray[Any]) -> NDArray[Any]:
        """Returns the rows that predict the answer's tokens."""
        return logits[self.start - 1 : len(self.tokens) - 1]


def draw_answers(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, stops: Sequence[int]) -> list[Answer]:
    """Returns prompts with answers that a model of transformers draws at temperature 0.8."""
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": num_tokens, "pad_token_id": 0}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            text = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=list(stops) or None, **options)
        answers.append(Answer(text[0].tolist(), len(prompt)))
    return answers


def logits_of_bundle(engine: speccompile.SpecEngine, answers: Sequence[Answer]) -> Rows:
    """Returns the rows of each answer by the bundle's target."""
    target, rows = engine.verifier.engine, []
    for answer in answers:
        engine.reset(len(answer.tokens))
        parts = []
        for at in range(0, len(answer.tokens), READ):
            tokens = np.array([answer.tokens[at : at + READ]], np.int64)
            outputs = target.run({TOKENS: tokens, LENGTHS: np.full(1, at, np.int64)})
            parts.append(np.array(np.asarray(outputs[LOGITS])[0]))
        rows.append(answer.rows(np.concatenate(parts)))
    return rows


def logits_of_peer(peer: Peer, form: str, model: Path, answers: Sequence[Answer]) -> Rows:
    """Returns the rows of each answer by a peer, which runs in its own environment."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        texts, starts = [answer.tokens for answer in answers], [answer.start for answer in answers]
        job = {"target": str(model), "form": form, "threads": THREADS, "texts": texts, "starts": starts}
        command = [peer.python, peer.worker, "logits"]
        subprocess.run(
            command, input=json.dumps({**job, "out": str(out)}), text=True, check=True, env=peer_environment(THREADS)
        )
        with np.load(out) as held:
            return [held[name] for name in sorted(held.files)]


def distance(answers: Sequence[Answer], wanted: Rows, got: Rows) -> Distance:
    """Returns the distance over the positions of all answers; peers' vocabularies may be padded."""
    pairs = zip(answers, wanted, got, strict=True)
    return distance_from_rows([compare(w, g[:, : w.shape[1]], np.array(a.tokens[a.start :])) for a, w, g in pairs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", help="of one checkpoint, built with engine.logits: true")
    parser.add_argument("--peers", help="some of those that `make peers` made")
    parser.add_argument("--precisions", default="int8,int4", help="of the peers")
    parser.add_argument("--num-prompts", type=int, default=40, help="conversations, the kinds in turn")
    parser.add_argument("--num-tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--peers-dir", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    args = parser.parse_args()
    engines = [speccompile.load(bundle, method="none", verify=False) for bundle in args.bundles]
    bundles = [engine.bundle for engine in engines if engine.bundle is not None]
    if len({(bundle.recipe.target.model, bundle.recipe.target.lora) for bundle in bundles}) > 1:
        parser.error("bundles of different checkpoints or adapters")
    prompts = [engines[0].chat_prompt(chat.messages) for chat in read_chats()[: args.num_prompts]]
    reference = open_target(bundles[0])
    answers = draw_answers(reference.target.model, prompts, args.num_tokens, bundles[0].eos_token_ids)
    wanted = [answer.rows(reference.logits(answer.tokens)) for answer in answers]
    found = {}
    for bundle, engine in zip(bundles, engines, strict=True):
        row = distance(answers, wanted, logits_of_bundle(engine, answers))
        found[f"speccompile {precision_from_bundle(bundle)}"] = row
    peers, left_out = read_peers(args.peers, args.peers_dir) if args.peers else ([], {})
    checkpoint, kept = source_of(str(bundles[0].recipe.target.model)), args.peers_dir / "models"
    for peer in [] if bundles[0].recipe.target.lora else peers:
        for precision in [name for name in args.precisions.split(",") if name in peer.forms]:
            name = f"{peer.name} {precision}"
            try:
                model = convert_checkpoint(peer, precision, checkpoint, kept)
                found[name] = distance(answers, wanted, logits_of_peer(peer, precision, model, answers))
            except (BuildError, subprocess.CalledProcessError) as fault:
                left_out[name] = str(fault)
    num_positions = sum(len(answer.tokens) - answer.start for answer in answers)
    rows = {name: asdict(row) for name, row in found.items()}
    result = {"num_positions": num_positions, "rows": rows, "left_out": left_out}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, row in found.items():
        print(f"{name}: KL {row.kl:.2e}, same top token {row.top1:.2%}, perplexity {row.perplexity_change:+.2%}")


if __name__ == "__main__":
    main()
