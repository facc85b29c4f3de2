# SPDX-License-Identifier: Apache-2.0
"""A transformers model with its weights in float32: a checkpoint's, or random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from speccompile.frontend.attention import IMPLEMENTATION

Weights = Literal["checkpoint", "random"]


def load_model(source: Path, weights: Weights) -> Any:
    """The model in evaluation mode, float32, on the CPU, with our attention in place."""
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    config._attn_implementation = IMPLEMENTATION
    return AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True
    ).eval()
