# SPDX-License-Identifier: Apache-2.0
"""The head behind the target's first layers in torch: an adapter and a norm; the LM head is the target's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from speccompile.export.layers import RmsNorm, SwiGlu, init_linear

MODEL_TYPE = "early_exit"


@dataclass(frozen=True)
class ExitSizes:
    """Sizes; the fields are those of config.json.

    Args:
        hidden_size: of the target.
        vocab_size: of the target.
        num_exit_layers: decoder layers of the target that run before the head.
        intermediate_size: of the adapter.
        rms_norm_eps: of the norms.
    """

    hidden_size: int
    vocab_size: int
    num_exit_layers: int
    intermediate_size: int
    rms_norm_eps: float = 1e-5

    def config_from_sizes(self) -> dict[str, Any]:
        """The config.json of a checkpoint."""
        return {"model_type": MODEL_TYPE, **asdict(self)}


def sizes_from_config(config: dict[str, Any]) -> ExitSizes:
    """Inverse of `config_from_sizes`; KeyError when a size is missing."""
    return ExitSizes(**{f.name: config[f.name] for f in fields(ExitSizes)})


class ExitHead(nn.Module):
    """norm(x + adapter(adapter_norm(x))), x being the residual stream behind the target's first layers.

    Args:
        sizes: its sizes.
    """

    def __init__(self, sizes: ExitSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.adapter_norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.adapter = SwiGlu(sizes.hidden_size, sizes.intermediate_size)
        self.norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        init_linear(self)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """What the target's LM head reads: [..., hidden] -> the same."""
        return self.norm(stream + self.adapter(self.adapter_norm(stream)))
