# SPDX-License-Identifier: Apache-2.0
"""How a GLIDE drafter is trained. Needs no torch before `make`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.core.training import TargetNeeds, TargetParts
from speccompile.errors import RecipeError


@dataclass(frozen=True)
class HeadsConfig:
    """What is trained.

    Args:
        num_layers: of the drafter.
        intermediate_size: of its MLPs; 0: the target's.
        block: drafts of a block: a draft at depth d sees no rows of the target's cache from its block's root on.
    """

    num_layers: int = 1
    intermediate_size: int = 0
    block: int = 5

    def __post_init__(self) -> None:
        for name in ("num_layers", "block"):
            if getattr(self, name) < 1:
                raise RecipeError(f"training.heads.{name}", f"{getattr(self, name)}", "1 or more", "Raise it.")
        if self.intermediate_size < 0:
            got = f"{self.intermediate_size}"
            raise RecipeError("training.heads.intermediate_size", got, "0 or more", "Correct the recipe.")


class GlideTrainer:
    """See `speccompile.core.training.Trainer`."""

    def needs(self, config: HeadsConfig, target: Mapping[str, Any]) -> TargetNeeds:
        """The last layer's cache."""
        return TargetNeeds(caches=True)

    def make(self, config: HeadsConfig, parts: TargetParts, start: Path | None) -> Any:
        """Embeddings and last layers as the target's, or `start`."""
        from speccompile.export.heads_file import read_heads
        from speccompile.speculators.glide.heads import GlideSizes
        from speccompile.speculators.glide.trainable import TrainableGlide, begin_drafter

        vocab, hidden = parts.lm_head.shape
        target = parts.config
        heads = int(target["num_attention_heads"])
        kv_heads = int(target.get("num_key_value_heads") or heads)
        head_dim = int(target.get("head_dim") or hidden // heads)
        theta = float((target.get("rope_parameters") or target).get("rope_theta", 10000.0))
        sizes = GlideSizes(
            hidden_size=hidden,
            intermediate_size=config.intermediate_size or int(target.get("intermediate_size") or 4 * hidden),
            num_layers=config.num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            target_hidden_size=hidden,
            target_heads=heads,
            target_kv_heads=kv_heads,
            target_head_dim=head_dim,
            rms_norm_eps=float(target.get("rms_norm_eps", 1e-5)),
            rope_theta=theta,
            target_rope_theta=theta,
        )
        drafter = begin_drafter(sizes, parts)
        if start is not None:
            drafter.load_state_dict(read_heads(start, drafter.state_dict()))
        return TrainableGlide(drafter, config.block)
