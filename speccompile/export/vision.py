# SPDX-License-Identifier: Apache-2.0
"""A vision tower with its projection -> the neutral graph of `vision_spec`. Its weights alone are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers import AutoModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from speccompile.checkpoints.model_config import read_whole_config
from speccompile.checkpoints.tensor_files import open_files
from speccompile.checkpoints.vision import own_name
from speccompile.core.specs import GraphSpec
from speccompile.export.trace import trace_module
from speccompile.export.weights import RANDOM_SEED, check_loading, name_weights, names_by_address
from speccompile.graph_kinds.decoder import PIXELS
from speccompile.passes.base import Pass, run_pipeline
from speccompile.passes.cleanup import remove_dead, share_common_subexpressions
from speccompile.passes.fold_weights import fold_weights
from speccompile.passes.fuse_gelu import fuse_gelu
from speccompile.passes.fuse_rms_norm import fuse_rms_norm
from speccompile.passes.unflatten_linears import unflatten_linears

_CLEANUP: tuple[Pass, ...] = (
    remove_dead,
    share_common_subexpressions,
    fuse_rms_norm,
    fuse_gelu,
    unflatten_linears,
    fold_weights,
    share_common_subexpressions,
    remove_dead,
)


class VisionGraph(nn.Module):
    """The module that is traced: transformers' own tower and projector."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        config.vision_config.vision_use_head = False  # pools what the projection reads row by row
        self.tower = AutoModel.from_config(config.vision_config, attn_implementation="eager", dtype=torch.float32)
        self.projector = Gemma3MultiModalProjector(config)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels [1, 3, height, width] float32 -> rows [1, image_tokens, hidden] float32."""
        rows: torch.Tensor = self.projector(self.tower(pixel_values=pixels).last_hidden_state)
        return rows


def export_vision(source: Path, spec: GraphSpec, weights: str, progress: Callable[[str], None]) -> tuple[ir.Model, int]:
    """Traces the vision tower in `source`; returns the model, with weights in torch's memory, and its parameters.

    Args:
        source: a multimodal checkpoint folder; with random weights its config.json is enough.
        weights: "checkpoint" or "random" (with a fixed seed).

    Raises:
        CheckpointError: a weight is missing, left over or of another shape.
    """
    progress("load weights")
    config = read_whole_config(source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        module = VisionGraph(config).eval()
        if weights == "random":
            nn.init.normal_(module.projector.mm_input_projection_weight, std=config.initializer_range)
    if weights == "checkpoint":
        _load(module, source)
    names = names_by_address(module)
    progress("trace")
    pixels = torch.zeros([int(d) for d in spec.input(PIXELS).dims])
    graph = trace_module(module, (pixels,), ({},), spec, f"{config.model_type} (vision tower)")
    name_weights(graph, names)
    run_pipeline(graph, _CLEANUP, progress)
    return graph, sum(p.numel() for p in module.parameters())


def _load(module: nn.Module, source: Path) -> None:
    files = open_files(source)
    held = {own: files.tensor(key) for key in files.headers if (own := own_name(key)) is not None}
    wanted = dict(module.state_dict())
    mismatched = [name for name in held.keys() & wanted.keys() if held[name].shape != wanted[name].shape]
    missing, left = wanted.keys() - held.keys(), held.keys() - wanted.keys()
    found = {"missing_keys": _weights(missing), "unexpected_keys": _weights(left), "mismatched_keys": mismatched}
    check_loading(source, found)
    module.load_state_dict({name: held[name].to(torch.float32) for name in wanted if name in held}, strict=False)


def _weights(names: Any) -> list[str]:
    return [name for name in names if not name.endswith("position_ids")]
