# SPDX-License-Identifier: Apache-2.0
"""Muse-Glimmer's language model with its head: transformers has the head in the multimodal class alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer import modeling_muse_glimmer as muse
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig


class MuseGlimmerForCausalLM(muse.MuseGlimmerPreTrainedModel):  # type: ignore[misc]
    """The text model; logits are scaled, then bounded by a tanh, as `MuseGlimmerForConditionalGeneration` does."""

    config_class = MuseGlimmerTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = muse.MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> CausalLMOutputWithPast:
        """Returns the logits [batch, nodes, vocab] of tokens [batch, nodes]."""
        outputs = self.model(input_ids, **arguments)
        bound = self.config.final_logit_softcapping
        logits = torch.tanh(self.lm_head(outputs.last_hidden_state) * self.config.output_multiplier / bound) * bound
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


def register() -> None:
    AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerForCausalLM, exist_ok=True)
