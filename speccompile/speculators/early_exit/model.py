# SPDX-License-Identifier: Apache-2.0
"""The head after the target's first layers in torch: an adapter and a norm; the LM head is the target's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from speccompile.errors import ExportError
from speccompile.export.layers import RmsNorm, SwiGlu, init_linear
from speccompile.speculators.early_exit.config import MODEL_TYPE

RANDOM_SEED = 0


@dataclass(frozen=True)
class ExitSizes:
    """Sizes; the fields are those of config.json."""

    hidden_size: int
    vocab_size: int
    num_exit_layers: int  # decoder layers of the target that run before the head
    intermediate_size: int
    rms_norm_eps: float = 1e-5

    def config_from_sizes(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE, **asdict(self)}


class ExitHead(nn.Module):
    """norm(x + adapter(adapter_norm(x))), x being the residual stream after the target's first layers."""

    def __init__(self, sizes: ExitSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.adapter_norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.adapter = SwiGlu(sizes.hidden_size, sizes.intermediate_size)
        self.norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        init_linear(self)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Returns what the target's LM head reads: [..., hidden] -> the same."""
        return self.norm(stream + self.adapter(self.adapter_norm(stream)))


def make_head(sizes: ExitSizes, weights: Mapping[str, torch.Tensor] | None) -> ExitHead:
    """Returns a head in float32; without weights a random one, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        head = ExitHead(sizes)
    if weights is not None:
        head.load_state_dict({name: tensor.to(torch.float32) for name, tensor in weights.items()})
    head.eval().requires_grad_(False)
    return head


def replace_norm(model: Any, head: ExitHead) -> None:
    """Puts a head in place of the final norm of a transformers model. Raises ExportError: the norm cannot be found."""
    base = model.base_model
    if not isinstance(getattr(base, "norm", None), torch.nn.Module):
        todo = "Draft with the layers alone: leave speculator.model out."
        raise ExportError(type(model).__name__, "no module `norm` after its layers", "the final norm", todo)
    base.norm = head
