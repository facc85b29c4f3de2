# SPDX-License-Identifier: Apache-2.0
"""The assistant in torch, as its graph computes it.

x = pre_projection(concat[the target's embedding of the last token, the hidden state]); layers that attend to the
target's last full and last sliding K and V; logits = lm_head(norm(x)), of all tokens or of those of the most probable
centroids; the next hidden state is post_projection(norm(x)), the first one the target's after its final norm. The
position of all drafts is the root's. The layers are transformers' own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from speccompile.checkpoints.config_values import plain_values
from speccompile.checkpoints.model_config import config_errors
from speccompile.export.adapted_models import adapt_model
from speccompile.export.attention import cross_attention
from speccompile.export.heads_file import check_tensors
from speccompile.export.tree_drafters import Above, take

IMPLEMENTATION = "speccompile_reader"  # the name under which transformers finds `read_rows`
RANDOM_SEED = 0


@dataclass(frozen=True)
class Reading:
    """What the layers of one run read. `caches`: K and V by the kind of layer, [batch, kv_heads, rows, head_dim]."""

    limits: torch.Tensor  # [batch] int64, at least 1: rows of the target's caches, and the position of the root
    caches: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


_READING: ContextVar[Reading] = ContextVar("speccompile_reading")


@contextmanager
def reading(limits: torch.Tensor, caches: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Makes these the rows that the layers of this context read; see `Reading`."""
    token = _READING.set(Reading(limits, caches))
    try:
        yield
    finally:
        _READING.reset(token)


def read_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' registry: attends to caches of the target, without a causal mask.

    A window counts the rows before the newest one, as transformers' mask does.
    """
    limits = _READING.get().limits[:, None].expand(-1, query.shape[2])
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    window = sliding_window + 1 if sliding_window else 0
    return cross_attention(query, key, value, limits, scale, window), None


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, read_rows)


class MaskedEmbedding(nn.Module):
    """The LM head's tokens by centroid."""

    token_ordering: torch.Tensor

    def __init__(self, num_centroids: int, num_chosen: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.centroids = nn.Linear(hidden, num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.zeros(vocab, dtype=torch.int64))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Returns [batch, nodes, vocab] of [batch, nodes, hidden]: other tokens have one logit below those chosen."""
        centroids = self.centroids(x).topk(self.num_chosen, dim=-1).indices
        chosen = self.token_ordering.view(self.centroids.out_features, -1)[centroids].flatten(2)
        near = (table[chosen] @ x[..., None]).squeeze(-1)
        lowest = near.amin(-1, keepdim=True) - 1.0
        return lowest.expand(-1, -1, table.shape[0]).scatter(-1, chosen, near)


class Assistant(nn.Module):
    """The assistant; its parameters have the names of the checkpoint."""

    def __init__(self, text: Any, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, vocab, target = text.config.hidden_size, text.config.vocab_size, int(config["backbone_hidden_size"])
        self.model = text
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.pre_projection = nn.Linear(2 * target, width, bias=False)
        self.post_projection = nn.Linear(width, target, bias=False)
        sizes = int(config["num_centroids"]), int(config["centroid_intermediate_top_k"])
        is_ordered = config.get("use_ordered_embeddings") is True
        self.masked_embedding = MaskedEmbedding(*sizes, width, vocab) if is_ordered else None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [batch, nodes, vocab] of [batch, nodes, hidden]."""
        if self.masked_embedding is None:
            return self.lm_head(x)
        return self.masked_embedding(x, self.lm_head.weight)


class AssistantExpander(nn.Module):
    """An `Expander` whose state of a node is the hidden state that its children read.

    Args:
        embeddings: the target's, [vocab, target hidden], without their factor.
    """

    def __init__(self, assistant: Assistant, embeddings: torch.Tensor) -> None:
        super().__init__()
        self.assistant = assistant
        self.embeddings = nn.Parameter(embeddings, requires_grad=False)
        self.kinds = tuple(assistant.model.config.layer_types)

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def expand(
        self, depth: int, state: torch.Tensor, tokens: torch.Tensor, above: Above
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the assistant for all nodes of a depth, each at the root's position."""
        base, held = self.assistant.model, _READING.get()
        embedded = functional.embedding(tokens, self.embeddings) * math.sqrt(self.embeddings.shape[1])
        x = self.assistant.pre_projection(torch.cat((embedded, take(state, above)), -1))
        positions = held.limits[:, None].expand(-1, tokens.shape[1])
        angles = {kind: base.rotary_emb(x, positions, kind) for kind in sorted(set(self.kinds))}
        for kind, layer in zip(self.kinds, base.layers, strict=True):
            x = layer(x, shared_kv_states=held.caches, position_embeddings=angles[kind], attention_mask=None)
        x = base.norm(x)
        return self.assistant.post_projection(x), self.assistant.logits(x)


class ReadingChain(nn.Module):
    """A `tree_drafters.Chain` that reads caches: the inputs of its spec in order, the caches as one list."""

    def __init__(self, drafter: nn.Module, kinds: Sequence[str]) -> None:
        super().__init__()
        self.drafter, self.kinds = drafter, tuple(kinds)

    def forward(
        self,
        hidden: torch.Tensor,
        start_nodes: torch.Tensor,
        tokens: torch.Tensor,
        uniforms: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        target_lengths: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> Any:
        with reading(target_lengths.clamp(min=1), _by_kind(self.kinds, caches)):
            return self.drafter(hidden, start_nodes, tokens, uniforms, temperature, top_k, top_p)


class ReadingTree(nn.Module):
    """A drafter of trees that reads caches; see `ReadingChain`."""

    def __init__(self, drafter: nn.Module, kinds: Sequence[str]) -> None:
        super().__init__()
        self.drafter, self.kinds = drafter, tuple(kinds)

    def forward(
        self,
        hidden: torch.Tensor,
        start_nodes: torch.Tensor,
        tokens: torch.Tensor,
        target_lengths: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> Any:
        with reading(target_lengths.clamp(min=1), _by_kind(self.kinds, caches)):
            return self.drafter(hidden, start_nodes, tokens)


def _by_kind(kinds: Sequence[str], caches: Sequence[torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {kind: (caches[2 * i], caches[2 * i + 1]) for i, kind in enumerate(kinds)}


def make_assistant(where: str, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None) -> Assistant:
    """Returns the assistant in float32, whose layers read caches; `weights` by name, None: the same random ones."""
    register()
    with torch.device("meta"):
        text = _text_model(str(config["model_type"]).replace("assistant", "text"), config["text_config"])
        assistant = Assistant(text, config)
    text.rotary_emb = type(text.rotary_emb)(text.config)  # its frequencies are in no file
    state = _random(assistant) if weights is None else _fitted(where, assistant, weights)
    assistant.load_state_dict(state, strict=True, assign=True)
    text.embed_tokens = nn.Identity()  # read by the LM head alone: its inputs are the target's embeddings
    adapt_model(text)
    return assistant.eval()


def _text_model(kind: str, fields: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    base = CONFIG_MAPPING[kind]
    own = type("AssistantTextConfig", (base,), {"kv_sharing_modes": property(_all_shared)})
    left_out = ("model_type", "dtype", "torch_dtype", "architectures", "transformers_version")
    with config_errors("config.json (text_config)", fields):
        config = own(**{k: value for k, value in plain_values(fields).items() if k not in left_out})
    config._attn_implementation = IMPLEMENTATION
    return MODEL_MAPPING[base](config)


def _all_shared(config: Any) -> list[str | None]:
    return ["reuse"] * int(config.num_hidden_layers)


def _random(assistant: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    state = {}
    for name, weight in assistant.state_dict().items():
        if not weight.dtype.is_floating_point:
            state[name] = torch.arange(weight.numel(), dtype=weight.dtype).view(weight.shape)
        elif weight.dim() > 1:
            state[name] = torch.empty(weight.shape).normal_(0, 0.02, generator=generator)
        else:
            state[name] = torch.ones(weight.shape)
    return state


def _fitted(where: str, assistant: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stored, expected = dict(weights), "the weights of a Gemma 4 assistant of this config"
    stored.setdefault("lm_head.weight", stored["model.embed_tokens.weight"])
    todo = "Config and weights are of different models: fetch the folder again, or correct config.json."
    check_tensors(where, assistant.state_dict(), stored, expected, todo)
    return {n: t.float() if t.dtype.is_floating_point else t.long() for n, t in stored.items()}
