# SPDX-License-Identifier: Apache-2.0
"""A draft that reads features -> the neutral graph of `feature_draft_spec`; and the graph that computes the features.

They are two graphs: features of the target's states are computed once per round, the draft runs once per depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speccompile.checkpoints.model_config import config_errors
from speccompile.core.specs import GraphSpec, cache_names
from speccompile.doctor.decoder_rows import decoder_config
from speccompile.errors import ExportError
from speccompile.export import attention
from speccompile.export.attention import Frame, cache_pairs, forward_pass, gather_nodes
from speccompile.export.candidates import node_probs, top_tokens
from speccompile.export.decoder import cleanup_table
from speccompile.export.draft_vocab import spread, spread_index
from speccompile.export.trace import trace_draft
from speccompile.graph_kinds.features import NO_FEATURE

RANDOM_SEED = 0


class FeatureBody(nn.Module):
    """The network of a method's draft; its parameters have the names of the method's own layout."""

    target_tokens: torch.Tensor | None  # [draft_vocab] int64: target's token of each; None where they are the same
    windows: tuple[int, ...] | None = None  # of each layer's attention, 0: none; None: as its modules say
    mask_feature: torch.Tensor | None = None  # [hidden] float32: the feature of masks; None: it reads none

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config

    def make_rotary(self) -> nn.Module:
        return LlamaRotaryEmbedding(self.config)

    def advance(self, tokens: torch.Tensor, features: torch.Tensor, angles: Any) -> torch.Tensor:
        """Returns own features of nodes, [batch, nodes, hidden].

        Args:
            tokens: [batch, nodes] int64.
            features: [batch, nodes, hidden], of the positions before the tokens.
            angles: cosines and sines [batch, nodes, head_dim] of these positions, of fewer dims with partial rotation.
        """
        raise NotImplementedError

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch, scored, draft_vocab] after own features [batch, scored, hidden]."""
        raise NotImplementedError


class FeatureDraft(nn.Module):
    """The module that is traced: inputs as in `feature_draft_spec`, those of the warp and the caches as lists."""

    def __init__(self, body: FeatureBody, spec: GraphSpec) -> None:
        super().__init__()
        self.body, self.rotary = body, body.make_rotary()
        self.num_candidates, self.dists = spec.num_candidates, spec.gives_probs
        # Of each layer its number of caches: a latent one keeps K and V in one.
        held = [sum(name in spec.caches for name in cache_names(i)) for i in range(len(spec.caches))]
        self.num_caches = [num for num in held if num]
        tokens = body.target_tokens
        if tokens is not None:
            self.register_buffer("index", spread_index(tokens, spec.vocab_size))
        self.reads_masks = spec.mask_token is not None
        if self.reads_masks:
            self.register_buffer("mask_feature", body.mask_feature)

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tree_mask: torch.Tensor,
        scored_nodes: torch.Tensor,
        features: torch.Tensor,
        feature_nodes: torch.Tensor,
        warp: list[torch.Tensor],
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        return self._step(tokens, lengths, tree_mask, scored_nodes, features, feature_nodes, lengths, warp, caches)

    def _step(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tree_mask: torch.Tensor,
        scored_nodes: torch.Tensor,
        features: torch.Tensor,
        feature_nodes: torch.Tensor,
        root_positions: torch.Tensor,
        warp: list[torch.Tensor],
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Returns the outputs of a step whose first node has the position `root_positions` [batch]."""
        read = self._read(features, feature_nodes)
        depth = tree_mask.to(torch.int64).sum(-1) - 1
        latent = [i for i, num in enumerate(self.num_caches) if num == 1]
        pairs = cache_pairs(range(len(self.num_caches)), caches, latent)
        positions = root_positions.unsqueeze(1) + depth
        windows = self.body.windows
        step = Frame(lengths, tree_mask, scored_nodes, pairs, positions=positions, windows=windows)
        with forward_pass(step) as frame:
            own = self.body.advance(tokens, read, self.rotary(read, positions))
        logits, tokens_of = self.body.logits(gather_nodes(own, scored_nodes)), self.body.target_tokens
        if self.dists:  # candidates share the distributions' vocabulary, the target's: bodies support only one
            logits, tokens_of = logits if tokens_of is None else spread(logits, self.index), None
        candidates, probs = top_tokens(logits, self.num_candidates)
        if tokens_of is not None:
            candidates = tokens_of[candidates]
        dists = (node_probs(logits, *warp),) if self.dists else ()
        updated = [cache for i, num in enumerate(self.num_caches) for cache in frame.updated[i][:num]]
        return (candidates, probs, *dists, torch.cat((read[:, :1], own), 1), *updated)

    def _read(self, features: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        if not self.reads_masks:
            return gather_nodes(features, nodes)
        is_mask = nodes == NO_FEATURE
        held = gather_nodes(features, torch.where(is_mask, 0, nodes))
        return torch.where(is_mask[:, :, None], self.mask_feature, held)


class SlidingFeatureDraft(FeatureDraft):
    """The same where the caches slide: row 0 of a slot has the position `first_positions` [batch]."""

    def forward(  # type: ignore[override]
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tree_mask: torch.Tensor,
        scored_nodes: torch.Tensor,
        features: torch.Tensor,
        feature_nodes: torch.Tensor,
        first_positions: torch.Tensor,
        warp: list[torch.Tensor],
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        roots = lengths + first_positions
        return self._step(tokens, lengths, tree_mask, scored_nodes, features, feature_nodes, roots, warp, caches)


@strict
class _LayerConfig(LlamaConfig):
    def validate_architecture(self) -> None: ...  # Heads may have a width of their own; `check_heads` has seen them.


def layer_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Returns the config of the decoder layers in a speculator's config.json, for `attention.attend`."""
    values = {**decoder_config(config), "tie_word_embeddings": False}
    try:
        with config_errors("config.json", values):
            made = _LayerConfig(**values)
    except (TypeError, ValueError, KeyError) as fault:
        todo = "Correct the speculator's config.json."
        raise ExportError("config.json", str(fault).strip().splitlines()[0], "sizes of a Llama layer", todo) from fault
    attention.register()
    made._attn_implementation = attention.IMPLEMENTATION
    return made


def has_qkv_bias(config: Mapping[str, Any]) -> bool:
    """Whether queries, keys and values have biases: by `qkv_bias`, else by `attention_bias`."""
    stated = config.get("qkv_bias")
    return bool(config.get("attention_bias") if stated is None else stated)


def widen_projections(module: nn.Module, width: int, config: Mapping[str, Any]) -> None:
    """Replace the projections of a Llama attention by ones from `width`, with the biases of the config."""
    bias = has_qkv_bias(config)
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(module, name)
        setattr(module, name, nn.Linear(width, old.out_features, bias=bias))


def fill_weights(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor] | None,
    shared: Mapping[str, torch.Tensor] | None = None,
    std: float = 0.02,
) -> None:
    """Loads a module on the meta device with float32 weights by name; None: random ones with a fixed seed."""
    module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    held = {**(shared or {}), **(weights or {})}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(False)
            if name in held or weights is not None:
                parameter.data = held[name].to(torch.float32)
            elif parameter.dim() > 1:
                parameter.normal_(0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def export_feature_draft(
    body: FeatureBody, spec: GraphSpec, max_rows: int, progress: Callable[[str], None]
) -> ir.Model:
    """Trace a draft and clean the trace. Returns the neutral graph; its weights refer to torch's memory."""
    dims = {"draft_vocab": spec.dist_width}
    whole = tuple(replace(t, dims=tuple(dims.get(str(d), d) for d in t.dims)) for t in spec.outputs)
    groups = (3 if spec.gives_probs else 0, len(spec.caches))

    def name_dims(graph: ir.Model) -> None:
        for value, tensor in zip(graph.graph.outputs, spec.outputs, strict=True):
            value.shape = ir.Shape(list(tensor.dims))

    draft = SlidingFeatureDraft if spec.window else FeatureDraft
    table = cleanup_table(max_rows)
    return trace_draft(draft(body, spec), spec, progress, table, groups, replace(spec, outputs=whole), name_dims)


def export_fusion(module: nn.Module, spec: GraphSpec, progress: Callable[[str], None]) -> ir.Model:
    """Trace the network that computes features from a list of target states -> [batch, nodes, hidden]."""
    return trace_draft(module, spec, progress, cleanup_table(1), (len(spec.inputs),))
