# SPDX-License-Identifier: Apache-2.0
"""Medusa heads under other conventions than their file states; see `speccompile.doctor.probe`."""

from __future__ import annotations

import torch

from speccompile.doctor.layouts import Case
from speccompile.doctor.probe import Convention, Reading
from speccompile.export.draft_vocab import target_tokens
from speccompile.export.probes import hidden_convention, hidden_of, read_case
from speccompile.speculators.medusa.checkpoint import sizes_of
from speccompile.speculators.medusa.model import MedusaHeads
from speccompile.training_contract import TargetParts, TrainingBatch


class MedusaProbe:
    """A `speccompile.doctor.probe.Probe`."""

    def __init__(self, case: Case, parts: TargetParts) -> None:
        _, weights = read_case(case)
        sizes, self.num_layers = sizes_of(case), int(parts.config["num_hidden_layers"])
        self.tokens = target_tokens(sizes.draft_vocab_size, sizes.vocab_size, weights)
        whole = parts.lm_head if self.tokens is None else parts.lm_head[self.tokens]
        self.lm_head = weights.get("lm_head.weight", whole)
        with torch.device("meta"):
            self.heads = MedusaHeads(sizes)
        self.heads.load_state_dict({name: weights[name] for name in self.heads.state_dict()}, assign=True)
        found = [hidden_convention(case)]
        if sizes.num_heads > 1:
            todo = "Leave the heads before head {value} out: they draft what is known when drafting begins."
            found.append(Convention("first_head", str(case.folder), 0, (1,), todo))
        self.conventions = tuple(found)
        self.max_drafts = max(1, sizes.num_heads - 1)  # of either first head

    def draft(self, reading: Reading, text: TrainingBatch, roots: torch.Tensor, num: int) -> torch.Tensor:
        hidden = hidden_of(text, reading["target_hidden"], self.num_layers)[0, roots - 1]
        first = reading.get("first_head", 0)
        states, projections = self.heads.states(hidden), self.heads.projections(self.lm_head)
        chosen = range(first, first + num)
        best = torch.stack([(states[i] @ projections[i].T).argmax(-1) for i in chosen], 1)
        return best if self.tokens is None else self.tokens[best]
