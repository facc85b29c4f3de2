# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 drafter in plain torch, from the public descriptions: whole texts and trees, without caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x: [heads, nodes, head_dim], positions: [nodes]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)


@dataclass(frozen=True)
class Oracle:
    """A drafter by its config and tensors, which have the keys of the first release; `first` begins its first layer's.

    Args:
        config: of the layers.
        tensors: floats in float32.
        first: prefix of the first layer's keys.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    first: str = "midlayer"

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def target_tokens(self) -> torch.Tensor:
        """Returns [draft vocab] int64, the target's token of each draft token."""
        num = self.tensors["lm_head.weight"].shape[0]
        return torch.arange(num) + self.tensors.get("d2t", torch.zeros(num, dtype=torch.int64))

    def fuse(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the features of the target's streams, [..., target hidden] each."""
        if "fc_norm.0.weight" in self.tensors:
            streams = [self.norm(x, f"fc_norm.{i}") for i, x in enumerate(streams)]
        joined = torch.cat(tuple(streams), -1)
        return self.linear(self.norm(joined, "input_norm") if "input_norm.weight" in self.tensors else joined, "fc")

    def own(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor | Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Returns own features [nodes, hidden].

        Args:
            embedded: [nodes, hidden], of the tokens after the features.
            features: [nodes, hidden].
            positions: [nodes] int64.
            seen: [nodes, nodes] bool; or one for each layer.
        """
        num = self.config["num_hidden_layers"]
        masks = [seen] * num if isinstance(seen, torch.Tensor) else seen
        normed = self.norm(features, f"{self.first}.hidden_norm")
        joined = torch.cat((self.norm(embedded, f"{self.first}.input_layernorm"), normed), -1)
        residual = normed if self.config["norm_before_residual"] else features
        x = self._finish(self.first, residual, self.attend(self.first, joined, positions, masks[0]))
        for i in range(1, num):
            layer = f"layers.{i}"
            read = self.norm(x, f"{layer}.input_layernorm")
            x = self._finish(layer, x, self.attend(layer, read, positions, masks[i]))
        return self.norm(x, "norm") if self.config.get("norm_output") else x

    def attend(self, layer: str, x: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        config = self.config

        def project(name: str) -> torch.Tensor:
            stem = f"{layer}.self_attn.{name}"
            rows = self.linear(x, f"{stem}_proj").unflatten(-1, (-1, config["head_dim"])).transpose(0, 1)
            return self.norm(rows, f"{stem}_norm") if f"{stem}_norm.weight" in self.tensors else rows  # DeepSpec's

        q, k = (rotate(project(name), positions, config["rope_theta"]) for name in "qk")
        k, v = (part.repeat_interleave(len(q) // len(part), 0) for part in (k, project("v")))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.linear(mixed.transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")

    def inner(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """Returns what the MLP's last product reads, of the stream after the attention."""
        y = self.norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (self.linear(y, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return functional.silu(gate) * up

    def _finish(self, layer: str, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = residual + attended
        return x + self.linear(self.inner(layer, x), f"{layer}.mlp.down_proj")

    def scored(self, own: torch.Tensor) -> torch.Tensor:
        """Returns what the LM head's last product reads."""
        x = own if self.config.get("norm_output") else self.norm(own, "norm")
        return self.linear(x, "lm_head_down") if "lm_head_down.weight" in self.tensors else x

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        """Returns [nodes, draft vocab]."""
        return self.linear(self.scored(own), "lm_head")


def causal(num: int, window: int = 0) -> torch.Tensor:
    """Returns [num, num] bool."""
    seen = torch.ones(num, num, dtype=torch.bool).tril()
    return seen.triu(1 - window) if window else seen


def target_logits(
    config: Mapping[str, Any], held: Mapping[str, torch.Tensor], layer: str, tokens: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Logits over the target's vocabulary, -inf for tokens that the draft lacks.

    Args:
        config: of the layer, with `norm_before_residual`.
        held: the checkpoint's tensors by its own keys.
        layer: prefix of the layer's keys.
        tokens: [nodes] int64.
        states: [nodes, num_layers * target_hidden].
    """
    tensors = {k: v.float() if v.is_floating_point() else v for k, v in held.items()}
    oracle, num = Oracle({"num_hidden_layers": 1, **config}, tensors, layer), len(tokens)
    embedded = tensors["embed_tokens.weight"][tokens]
    own = oracle.own(embedded, states @ tensors["fc.weight"].T, torch.arange(num), causal(num))
    full = torch.full((num, config["vocab_size"]), float("-inf"))
    full[:, oracle.target_tokens()] = oracle.logits(own)
    return full
