# SPDX-License-Identifier: Apache-2.0
"""Joint training: low-rank changes (LoRA, arXiv 2106.09685) of the target beside its drafter, tethered to the target.

With the base target's distributions p0, the changed target's p and the drafts' q, the loss of a batch is

    loss(p, q) + cross_entropy * CE(p, next token) + strength * KL(p0 || p)

over the positions that are learned. The first term is the drafter's; its gradient reaches the changes through the
states that the drafter reads and through p. `strength` is a multiplier that keeps KL below its bound: each step it
grows while the KL of the batch is above `_AIM` of the bound, and shrinks while it is below.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from speccompile.checkpoints.lora import CHANGE, CONFIG, WEIGHTS
from speccompile.errors import RecipeError
from speccompile.export.wrapper import find_layers
from speccompile.recipe.training import JointSection
from speccompile.training.losses import LossOptions, judge
from speccompile.training.target import Target, dist_from_logits
from speccompile.training_contract import TargetNeeds, TrainingBatch

ADAPTER = "adapter"  # folder in the speculator's
_AIM, _RATE = 0.8, 0.1  # share of the bound at which KL is kept; largest change of log strength a step
_STRENGTHS = (1e-2, 1e4)


class LowRankChange(nn.Module):
    """x -> scale * B A x, zero at the start. A is [rank, in], B [out, rank], float32."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * nn.functional.linear(nn.functional.linear(x.to(self.a.dtype), self.a), self.b)


class NoStates:
    """Stands for the target's outputs where `JointModule` runs the target itself."""

    def read(self, split: str, rows: Any, tokens: Any) -> dict[str, torch.Tensor]:
        del split, rows
        empty = (*tokens.shape, 0)
        return {"dist_tokens": torch.zeros(empty, dtype=torch.int64), "dist_probs": torch.zeros(empty)}


class JointModule(nn.Module):
    """A trainable, the changes of the target, and their loss: as `TrainedModule`.

    Raises:
        RecipeError: no linear layer of the target has one of the names in `joint.modules`.
    """

    def __init__(
        self, trainable: Any, options: LossOptions, target: Target, needs: TargetNeeds, joint: JointSection
    ) -> None:
        super().__init__()
        self.trainable, self.options, self.joint = trainable, options, joint
        self._target, self._needs = (target,), needs  # in a tuple: its weights are no parameters of this module
        self._linears = _chosen_linears(target, joint.modules)
        scale = joint.alpha / joint.rank
        self.changes = nn.ModuleList(LowRankChange(linear, joint.rank, scale) for linear in self._linears.values())
        self.register_buffer("strength", torch.ones(()))

    def forward(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, and the measures as [11, positions] float64.

        Those of `judge`, then sums of KL(base || changed), of the negative log-probabilities of the text's tokens by
        the base and by the changed target, and their number, the same at each position.
        """
        target = self._target[0]
        with torch.no_grad():
            base = target.outputs(batch.tokens, TargetNeeds())["logits"]
        with self._changed():
            held = target.outputs(batch.tokens, self._needs)
        logits = held.pop("logits")
        layers = {int(name.partition(".")[2]): held.pop(name).float() for name in list(held) if "layer." in name}
        own = {name: value.float() for name, value in held.items()}
        batch = replace(batch, layers=layers, **own, **dist_from_logits(logits))
        loss, sums = judge(self.trainable(batch), batch, self.options, logits.shape[-1])
        divergence, before, after, count = tether_terms(base, logits, batch.tokens, batch.is_label)
        mean = divergence / count
        loss = loss + self.joint.cross_entropy * after / count + self.strength.clone() * mean
        if torch.is_grad_enabled():
            self._adapt(float(mean.detach()))
        rows = torch.stack([value.detach().double() for value in (divergence, before, after, count)])
        return loss, torch.cat((sums, rows[:, None].expand(-1, sums.shape[1])))

    def _adapt(self, divergence: float) -> None:
        excess = max(-1.0, min(1.0, divergence / (_AIM * self.joint.kl) - 1.0))
        self.strength.mul_(torch.tensor(_RATE * excess).exp()).clamp_(*_STRENGTHS)

    @contextmanager
    def _changed(self) -> Iterator[None]:
        hooks = [
            linear.register_forward_hook(lambda _, args, out, change=change: out + change(args[0]).to(out.dtype))
            for linear, change in zip(self._linears.values(), self.changes, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def save_adapter(self, folder: Path, base: str, measures: dict[str, Any]) -> None:
        """Writes the changes in PEFT's layout, and what they cost on held-out text: kl, perplexity, base_perplexity."""
        folder.mkdir()
        tensors = {}
        for name, change in zip(self._linears, self.changes, strict=True):
            for side, value in (("A", change.a), ("B", change.b)):
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = value.detach().float().cpu().contiguous()
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.joint.rank,
            "lora_alpha": self.joint.alpha,
            "target_modules": sorted({name.rpartition(".")[2] for name in self._linears}),
            "bias": "none",
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        cost = {name: measures[name] for name in ("kl", "perplexity", "base_perplexity")}
        (folder / CHANGE).write_text(json.dumps(cost, indent=1) + "\n", encoding="utf-8")


def tether_terms(
    base: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor, is_label: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns sums over the learned positions that a token follows: KL(base || changed), -log p by both; their number.

    Args:
        base, logits: [batch, nodes, vocab].
        tokens: [batch, nodes] int64.
        is_label: [batch, nodes] bool; None: all.
    """
    chosen = torch.ones_like(tokens, dtype=torch.bool) if is_label is None else is_label.clone()
    chosen[:, -1] = False
    labels = tokens.roll(-1, 1)[chosen][:, None]
    first, second = (part[chosen].float().log_softmax(-1) for part in (base, logits))
    divergence = (first.exp() * (first - second)).sum()
    before, after = (-part.gather(1, labels).sum() for part in (first, second))
    return divergence, before, after, chosen.sum().clamp(min=1)


def _chosen_linears(target: Target, modules: tuple[str, ...]) -> dict[str, nn.Linear]:
    inside = {id(module) for layer in find_layers(target.model, target.dims.num_layers) for module in layer.modules()}
    linears = {
        name: module
        for name, module in target.model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }
    chosen = {name: m for name, m in linears.items() if not modules or name.rpartition(".")[2] in modules}
    endings = sorted({name.rpartition(".")[2] for name in linears})
    missing = [name for name in modules if name not in endings]
    if missing or not chosen:
        got = ", ".join(missing) or "no linear layer in the target's decoder layers"
        todo = "Correct the recipe." if missing else "Train the drafter alone: leave training.joint out."
        raise RecipeError("training.joint.modules", got, f"some of {', '.join(endings) or 'its linear layers'}", todo)
    return chosen
