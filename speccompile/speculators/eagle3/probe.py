# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 or P-EAGLE drafter under other conventions than its file states; see `speccompile.doctor.probe`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from speccompile.checkpoints.target_tables import TargetTables
from speccompile.doctor.layouts import Case
from speccompile.doctor.probe import Convention, Reading
from speccompile.errors import RecipeError
from speccompile.export.chains import IMPLEMENTATION
from speccompile.export.feature_source import dims_from_config
from speccompile.export.probes import (
    HALVES,
    Weights,
    base_convention,
    chain_drafts,
    check_windows,
    halved_heads,
    ids_as_offsets,
    other_layers,
    read_case,
    rotary_convention,
    swapped_inputs,
    with_base,
)
from speccompile.speculators.eagle3.checkpoint import default_layers, layers_from_config
from speccompile.speculators.eagle3.layouts import IDS, mask_token
from speccompile.speculators.eagle3.model import Eagle3Body, make_body, make_fusion
from speccompile.training_contract import TargetParts, TrainingBatch

_MOST_DRAFTS = 4
_MIXED = tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")


class Eagle3Probe:
    """A `speccompile.doctor.probe.Probe`."""

    max_drafts = _MOST_DRAFTS

    def __init__(self, case: Case, parts: TargetParts) -> None:
        self.folder, self.tables = case.folder, TargetTables(parts.embeddings, parts.lm_head)
        self.config, self.weights = read_case(case)
        num_layers = int(parts.config["num_hidden_layers"])
        self.dims = dims_from_config(case.folder, self.config, case.layout.method, 1)
        self.conventions = self._conventions(case, parts, num_layers)

    def _conventions(self, case: Case, parts: TargetParts, num_layers: int) -> tuple[Convention, ...]:
        try:
            published: tuple[int, ...] | None = default_layers(num_layers)
        except RecipeError:
            published = None
        stated = layers_from_config(case.folder, case.config) or default_layers(num_layers)
        todo = "Give speculator.layers: {value} in the recipe; layers count from 0 there."
        found = [
            Convention(
                "layers", case.where_in_config(IDS[0]), list(stated), other_layers(stated, num_layers, published), todo
            )
        ]
        for name in ("norm_before_residual", "norm_output"):
            stated_value = bool(self.config.get(name))
            todo = f"Correct {name} in config.json: {{value}}."
            found.append(Convention(name, case.where_in_config(name), stated_value, (not stated_value,), todo))
        for name in ("norm_before_fc", "fc_norm"):
            if self.config.get(name):
                todo = f"Remove the norm's weights, and correct {name} in config.json: {{value}}."
                found.append(Convention(name, case.where_in_config(name), True, (False,), todo))
        where, todo = str(case.folder), "Swap the halves of its first layer's q_proj, k_proj and v_proj: it is {value}."
        found.append(Convention("concat", where, "embedding_first", ("hidden_first",), todo))
        if "d2t" in self.weights:
            todo = "Subtract 0, 1, 2, ... from d2t: it holds {value}."
            found.append(Convention("d2t", case.where(case.prefix + "d2t"), "offsets", ("ids",), todo))
        return (*found, rotary_convention(case), *base_convention(case, self.config, parts.config))

    def _weights(self, reading: Reading) -> Weights:
        weights = self.weights
        if reading["rotary"] != HALVES:
            weights = halved_heads(weights, self.dims.head_dim)
        if reading["concat"] != "embedding_first":
            weights = swapped_inputs(weights, _MIXED)
        if reading.get("d2t") == "ids":
            weights = ids_as_offsets(weights)
        return weights

    def draft(self, reading: Reading, text: TrainingBatch, roots: torch.Tensor, num: int) -> torch.Tensor:
        switches = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
        config: dict[str, Any] = {**self.config, **{name: reading[name] for name in switches if name in reading}}
        if "rope_theta" in reading:
            config = with_base(config, reading["rope_theta"])
        weights, dims = self._weights(reading), replace(self.dims, layers=tuple(reading["layers"]))
        has_masks, token = mask_token(config)
        body: Eagle3Body = make_body(config, dims, weights, self.tables, has_masks=has_masks)
        check_windows(self.folder, body.windows, text.tokens.shape[1])
        body.config._attn_implementation = IMPLEMENTATION
        features = make_fusion(config, dims, weights)([text.layers[i].float() for i in dims.layers])
        rotary, tokens_of = body.make_rotary(), body.target_tokens

        def advance(tokens: torch.Tensor, read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return body.advance(tokens, read, rotary(read, positions))

        def token_of(own: torch.Tensor) -> torch.Tensor:
            best = body.logits(own).argmax(-1)
            return best if tokens_of is None else tokens_of[best]

        mask = None if body.mask_feature is None else (token, body.mask_feature)
        return chain_drafts(advance, token_of, text.tokens, features, roots, num, mask)
