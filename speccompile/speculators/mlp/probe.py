# SPDX-License-Identifier: Apache-2.0
"""An MLP speculator under other conventions than its file states; see `speccompile.doctor.probe`."""

from __future__ import annotations

from dataclasses import replace

import torch

from speccompile.doctor.layouts import Case
from speccompile.doctor.probe import Convention, Reading
from speccompile.export.probes import hidden_convention, hidden_of, read_case
from speccompile.speculators.mlp.checkpoint import sizes_of
from speccompile.speculators.mlp.model import make_heads
from speccompile.training_contract import TargetParts, TrainingBatch

_SCALE = "scale_input"


class MlpProbe:
    """A `speccompile.doctor.probe.Probe`."""

    def __init__(self, case: Case, parts: TargetParts) -> None:
        _, self.weights = read_case(case)
        self.num_layers = int(parts.config["num_hidden_layers"])
        self.sizes = sizes_of(case)
        self.max_drafts, stated = self.sizes.num_heads, self.sizes.scales_input
        todo = f"Correct {_SCALE} in config.json: {{value}}."
        scale = Convention(_SCALE, case.where_in_config(_SCALE), stated, (not stated,), todo)
        self.conventions = (scale, hidden_convention(case))

    def draft(self, reading: Reading, text: TrainingBatch, roots: torch.Tensor, num: int) -> torch.Tensor:
        heads = make_heads(replace(self.sizes, scales_input=reading[_SCALE]), self.weights)
        state = heads.begin(hidden_of(text, reading["target_hidden"], self.num_layers)[:, roots - 1])
        drafts, last = [], text.tokens.shape[1] - 1
        for i in range(num):
            state, logits = heads.step(i, state, text.tokens[:, (roots + i).clamp(max=last)])
            drafts.append(logits.argmax(-1))
        return torch.cat(drafts).T
