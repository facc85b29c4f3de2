# SPDX-License-Identifier: Apache-2.0
"""Drafters of a target in torch: how many of their drafts a text accepts, and small ones that know texts by heart.

What is compared is how two programs draft with the same weights, so seconds of training on the very texts will do:
drafts of every position are accepted often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from speccompile.core import registry
from speccompile.training.losses import LossOptions, TrainedModule
from speccompile.training.stage import make_optimizer
from speccompile.training.states import batch_from_outputs
from speccompile.training.target import Target


class Text:
    """A prompt with the target's greedy tokens after it.

    Args:
        target: in float32.
        prompt: token ids.
        after: greedy tokens, which are checked.
    """

    def __init__(self, target: Target, prompt: Sequence[int], after: Sequence[int]) -> None:
        self.target, self.first = target, len(prompt)
        self.tokens = torch.tensor([[*prompt, *after]])

    def outputs(self, needs: Any) -> dict[str, torch.Tensor]:
        """Returns what a drafter reads of the target, of all positions."""
        held: dict[str, torch.Tensor] = self.target.run(self.tokens, needs)
        assert torch.equal(held["dist_tokens"][0, self.first - 1 : -1, 0], self.tokens[0, self.first :])
        return held


class Drafter:
    """A drafter of a target, new or from its folder.

    Args:
        target: in float32.
        method: its name.
        heads: of its training.
        folder: of its checkpoint; None: it begins anew.
    """

    def __init__(self, target: Target, method: str, heads: Any, folder: Path | None = None) -> None:
        trainer = registry.trainer(method)
        if isinstance(heads, Mapping):
            heads = registry.method(method).TrainingConfig(**heads)
        self.needs, self.vocab_size = trainer.needs(heads, target.config), target.dims.vocab_size
        torch.manual_seed(0)
        self.trainable = trainer.make(heads, target.parts(torch.ones(self.vocab_size, dtype=torch.int64)), folder)

    def learn(self, texts: Sequence[Text], rounds: int) -> None:
        """Trains on whole texts, one a step, `rounds` times on each."""
        module = TrainedModule(self.trainable, LossOptions(1.0, 1.0, torch.bfloat16), self.vocab_size)
        optimizer = make_optimizer(module, 0.0)
        held = [(text.tokens, text.outputs(self.needs)) for text in texts]
        for seed in range(rounds):
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 - seed / rounds)
            for tokens, outputs in held:
                with torch.autocast("cpu", torch.bfloat16):
                    loss, _ = module(batch_from_outputs(tokens, outputs, seed))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    def accepted(self, texts: Sequence[Text], num_drafts: int, num_tokens: int) -> list[int]:
        """Returns how many drafts each step of greedy chains accepts.

        The first token after a prompt is the target's alone, and the root of the first chain.

        Args:
            texts: with at least `num_drafts` tokens more than are written.
            num_drafts: of a chain.
            num_tokens: the step that reaches them is the last one of a text.
        """
        self.trainable.eval()
        return [step for text in texts for step in self._accepted(text, num_drafts, num_tokens)]

    def _accepted(self, text: Text, num_drafts: int, num_tokens: int) -> list[int]:
        held, tokens = text.outputs(self.needs), text.tokens[0].tolist()
        found, root = [], text.first
        while root - text.first + 1 < num_tokens:
            known = {name: value[:, :root] for name, value in held.items()}
            batch = batch_from_outputs(text.tokens[:, : root + 1], known, 0)
            after = zip(self.trainable.draft(batch, num_drafts).tolist(), tokens[root + 1 :], strict=False)
            found.append(next((i for i, (draft, token) in enumerate(after) if draft != token), num_drafts))
            root += found[-1] + 1
        return found
