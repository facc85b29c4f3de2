# SPDX-License-Identifier: Apache-2.0
"""A multi-token prediction module under other conventions than its file states; see `speccompile.doctor.probe`."""

from __future__ import annotations

import torch

from speccompile.doctor.layouts import Case
from speccompile.doctor.probe import Convention, Reading
from speccompile.export.chains import IMPLEMENTATION, register
from speccompile.export.probes import chain_drafts, hidden_of, read_case
from speccompile.speculators.mtp.layer_rows import CHOICES, EMBEDDINGS, LM_HEAD
from speccompile.speculators.mtp.model import MtpModule, fitted_weights
from speccompile.training_contract import TargetParts, TrainingBatch


class MtpProbe:
    """A `speccompile.doctor.probe.Probe`."""

    max_drafts = 4

    def __init__(self, case: Case, parts: TargetParts) -> None:
        register()
        self.folder, self.num_layers = case.folder, int(parts.config["num_hidden_layers"])
        self.config, self.weights = read_case(case)
        self.embeddings: torch.Tensor = self.weights.get(EMBEDDINGS, parts.embeddings)
        self.lm_head: torch.Tensor = self.weights.get(LM_HEAD, parts.lm_head)
        found = []
        for name, values in CHOICES.items():
            stated = self.config[name]
            todo = f"Give speculator.{name}: {{value}} in the recipe."
            if name == "target_hidden":
                todo = "Give target_hidden: {value} in config.json."
            found.append(
                Convention(name, case.where_in_config(name), stated, tuple(v for v in values if v != stated), todo)
            )
        self.conventions = tuple(found)

    def draft(self, reading: Reading, text: TrainingBatch, roots: torch.Tensor, num: int) -> torch.Tensor:
        config = {**self.config, **reading}
        with torch.device("meta"):
            module = MtpModule(config, IMPLEMENTATION)
        module.to_empty(device="cpu").eval()
        for buffer in module.buffers():
            buffer.zero_()
        module.load_state_dict(fitted_weights(str(self.folder), module, config, self.weights), assign=True)
        rotary = module.make_rotary()

        def advance(tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return module.read(self.embeddings[tokens], hidden, rotary(hidden, positions))

        def token_of(own: torch.Tensor) -> torch.Tensor:
            return (module.finish(own) @ self.lm_head.T).argmax(-1)

        hidden = hidden_of(text, reading["target_hidden"], self.num_layers)
        return chain_drafts(advance, token_of, text.tokens, hidden, roots, num)
