# SPDX-License-Identifier: Apache-2.0
"""Prints the acceptance of pycode-hybrid's MTP module by position, on prompts that the model continues greedily.

    python examples/models/hybrid/acceptance.py --prompts examples/prompts.jsonl

The model writes each continuation once. Over that text all chains are drafted in one forward of the module; a draft
is accepted where it and all before it in its chain are the text, so greedy draft-verify of any length is a walk.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.errors import CheckpointError
from speccompile.speculators.mtp.config import MtpTraining
from speccompile.speculators.mtp.trainer import MtpTrainer, TrainableMtp
from speccompile.training.states import batch_from_outputs
from speccompile.training.target import Target
from speccompile.training_contract import TargetNeeds

MODEL = Path(__file__).parents[1] / "pycode-hybrid"


def load_module(target: Target, depth: int) -> TrainableMtp:
    """Returns the module inside a target's folder, which drafts chains of `depth` tokens from every position."""
    parts = target.parts(torch.zeros(target.dims.vocab_size, dtype=torch.int64))
    return MtpTrainer().make(MtpTraining(unrolled_steps=depth), parts, target.folder).eval()


@torch.no_grad()
def find_hits(target: Target, module: TrainableMtp, tokens: list[int]) -> torch.Tensor:
    """Returns [steps, depth] bool: whether the drafts of a step are the next tokens, for every step of the text.

    Row t is the step whose root is token t + 1. Rows end where a whole chain does not fit any more.
    """
    rows = torch.tensor([tokens])
    drafted = module(batch_from_outputs(rows, target.run(rows, TargetNeeds(hidden=True)), seed=0))
    hits = torch.zeros(len(tokens), module.num_positions, dtype=torch.bool)
    for position, projection in enumerate(drafted.projections):
        # A label is the position whose distribution is drafted, so the draft is the token after it.
        labels = drafted.labels[:, position]
        known = (labels >= 0) & (labels < len(tokens) - 1)
        found = (drafted.states[known, position] @ projection.T).argmax(-1) == rows[0, labels[known] + 1]
        hits[labels[known] - 1 - position, position] = found
    return hits[: len(tokens) - 1 - module.num_positions]


def draft_verify(hits: torch.Tensor, num_drafts: int) -> tuple[list[int], list[int]]:
    """Returns accepted and tried drafts by position of greedy draft-verify over the steps of `find_hits`."""
    step, kept, tried = 0, [0] * num_drafts, [0] * num_drafts
    while step < len(hits):
        accepted = int(hits[step, :num_drafts].long().cumprod(0).sum())
        for position in range(min(num_drafts, accepted + 1)):
            tried[position] += 1
            kept[position] += position < accepted
        step += accepted + 1
    return kept, tried


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with `prompt`")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4, help="most drafts of a step")
    args = parser.parse_args()
    target = Target(args.model, torch.float32)
    target.model.generation_config.eos_token_id = None  # all texts weigh the same
    module = load_module(target, args.depth)
    tokenizer = load_tokenizer(args.model / "tokenizer.json", CheckpointError, "Download the file again.")
    kept, tried = torch.zeros(2, args.depth + 1, args.depth, dtype=torch.int64)
    for line in args.prompts.read_text().splitlines()[: args.num_prompts]:
        prompt = tokenizer.encode(json.loads(line)["prompt"]).ids
        text = target.model.generate(torch.tensor([prompt]), max_new_tokens=args.new_tokens, do_sample=False)[
            0
        ].tolist()
        hits = find_hits(target, module, text)[len(prompt) - 1 :]
        for num_drafts in range(1, args.depth + 1):
            accepted, drafted = draft_verify(hits, num_drafts)
            kept[num_drafts, :num_drafts] += torch.tensor(accepted)
            tried[num_drafts, :num_drafts] += torch.tensor(drafted)
    for num_drafts in range(1, args.depth + 1):
        pairs = zip(kept[num_drafts, :num_drafts].tolist(), tried[num_drafts, :num_drafts].tolist(), strict=True)
        rates = " ".join(f"{a / max(1, b):.2f}" for a, b in pairs)
        mean = 1 + int(kept[num_drafts].sum()) / int(tried[num_drafts, 0])
        print(f"{num_drafts} drafts: mean acceptance length {mean:.2f}, by position {rates}")


if __name__ == "__main__":
    main()
