# SPDX-License-Identifier: Apache-2.0
"""A block drafter under other conventions than its file states; see `speccompile.doctor.probe`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from speccompile.doctor.layouts import Case
from speccompile.doctor.probe import Convention, Reading
from speccompile.export.feature_source import dims_from_config
from speccompile.export.probes import (
    HALVES,
    base_convention,
    check_windows,
    halved_heads,
    ids_as_offsets,
    other_layers,
    read_case,
    rotary_convention,
    with_base,
)
from speccompile.graph_kinds.blocks import block_draft_spec
from speccompile.speculators.dflash.drafter import NESTED, drafter_from_config, published_layers
from speccompile.speculators.dflash.heads import make_step, most_probable_path
from speccompile.speculators.dflash.layouts import AUX_LAYERS, EMBEDDINGS, LAYERS, LM_HEAD, METHOD
from speccompile.speculators.dflash.model import BlockDraft, make_draft, make_fusion
from speccompile.speculators.dflash.trainer import fill_blocks
from speccompile.training_contract import TargetParts, TrainingBatch

_MOST_DRAFTS, _NUM_CANDIDATES = 4, 16
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")  # tokens that texts do not have inside


class DflashProbe:
    """A `speccompile.doctor.probe.Probe`."""

    def __init__(self, case: Case, parts: TargetParts) -> None:
        self.folder, self.shared = case.folder, {EMBEDDINGS: parts.embeddings, LM_HEAD: parts.lm_head}
        self.config, self.weights = read_case(case)
        self.dims = dims_from_config(case.folder, self.config, METHOD, 1)
        self.drafter = drafter_from_config(str(case.folder), self.config)
        self.max_drafts = min(_MOST_DRAFTS, self.drafter.block_size - 1)
        self.conventions = self._conventions(case, parts)

    def _conventions(self, case: Case, parts: TargetParts) -> tuple[Convention, ...]:
        num_layers, drafter = int(parts.config["num_hidden_layers"]), self.drafter
        published = published_layers(num_layers, case.sizes["num_states"] or 1)
        layers = list(self.config[NESTED].get(LAYERS) or published)
        shown = next((name for name in (LAYERS, AUX_LAYERS) if name in case.config), LAYERS)
        todo = "Give speculator.layers: {value} in the recipe; layers count from 0 there."
        found = [
            Convention("layers", case.where_in_config(shown), layers, other_layers(layers, num_layers, published), todo)
        ]

        def add(name: str, stated: Any, others: tuple[Any, ...], todo: str = "") -> None:
            todo = todo or f"Correct {name} in config.json: {{value}}."
            found.append(Convention(name, case.where_in_config(name), stated, others, todo))

        if drafter.corrector is None:
            add("sample_from_anchor", drafter.starts_at_root, (not drafter.starts_at_root,))
        if len(set(drafter.is_causal)) == 1:
            add("is_causal", drafter.is_causal[0], (not drafter.is_causal[0],))
        config = parts.config
        special = dict.fromkeys([*(config.get(name) for name in _SPECIAL), len(parts.embeddings) - 1])
        tokens = tuple(i for i in special if isinstance(i, int) and i != drafter.mask_token_id)
        add("mask_token_id", drafter.mask_token_id, tokens)
        if "d2t" in self.weights:
            add("d2t", "offsets", ("ids",), "Subtract 0, 1, 2, ... from d2t: it holds {value}.")
        where = str(case.folder)
        todo = "Its blocks begin {value} positions after the root's, which no build supports: ask its author."
        found.append(Convention("block_position", where, 0, (1, -1), todo))
        return (*found, rotary_convention(case), *base_convention(case, self.config, config))

    def _network(self, reading: Reading, num: int) -> tuple[BlockDraft, torch.nn.Module]:
        nested = {
            **self.config[NESTED],
            LAYERS: reading["layers"],
            "sample_from_anchor": reading.get("sample_from_anchor", self.drafter.starts_at_root),
            "mask_token_id": reading["mask_token_id"],
        }
        config: dict[str, Any] = {**self.config, NESTED: nested}
        if "is_causal" in reading:
            config["is_causal"] = reading["is_causal"]
        if "rope_theta" in reading:
            config = with_base(config, reading["rope_theta"])
        drafter, dims = drafter_from_config(str(self.folder), config), replace(self.dims, layers=reading["layers"])
        weights = self.weights if reading["rotary"] == HALVES else halved_heads(self.weights, dims.head_dim)
        if reading.get("d2t") == "ids":
            weights = ids_as_offsets(weights)
        most = min(drafter.num_candidates or _NUM_CANDIDATES, dims.draft_vocab_size)
        spec = block_draft_spec(
            METHOD, dims, 1, num_drafts=num, num_candidates=most, is_paired=drafter.is_paired,
            num_masks=drafter.num_masks(num),
        )  # fmt: skip
        return make_draft(config, drafter, dims, spec, weights, self.shared), make_fusion(config, dims, weights)

    def draft(self, reading: Reading, text: TrainingBatch, roots: torch.Tensor, num: int) -> torch.Tensor:
        check_windows(self.folder, self.drafter.windows, text.tokens.shape[1])
        draft, fusion = self._network(reading, num)
        features = fusion([text.layers[i].float() for i in reading["layers"]])
        tokens = text.tokens[0, roots][:, None]
        masks = torch.full((len(roots), draft.num_masks), draft.drafter.mask_token_id)
        embedded = draft.embed_tokens(torch.cat((tokens, masks), 1))[None] * draft.drafter.embedding_scale
        rows = fill_blocks(draft, features, embedded, roots[None], reading["block_position"])[0]
        hidden = rows[:, 1 + draft.num_masks - num :]
        logits = draft.logits(hidden)
        ranked = logits.topk(draft.num_ranked).indices
        if draft.drafter.corrector:
            best = logits.softmax(-1).amax(-1, keepdim=True)
            candidates, scores = draft.corrected(hidden, features[0, roots - 1], logits, ranked, best)
        else:
            candidates, scores = draft.scored(tokens, hidden, logits, ranked)
        if draft.drafter.path:
            step = make_step(draft.drafter.path, self.dims.hidden_size, self.weights)
            return most_probable_path(step, *draft.terms(tokens, hidden, candidates), candidates, scores[:, :, 0])
        # The most probable walk: a slot's scores are those after the candidate that was taken before it.
        taken, each = torch.zeros(len(roots), dtype=torch.int64), torch.arange(len(roots))
        drafts = []
        for slot in range(num):
            before = torch.zeros_like(taken) if scores.shape[2] == 1 else taken
            taken = scores[each, slot, before].argmax(-1)
            drafts.append(candidates[each, slot, taken])
        return torch.stack(drafts, 1)
