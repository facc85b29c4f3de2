# SPDX-License-Identifier: Apache-2.0
"""The Prophet transformer in torch.

Its sequence is [input_proj(target's final-normed state at the last accepted position), emb(root), emb(d1), ...]; the
output at a token's position drafts the next. It sees nothing else, so it has no cache between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from speccompile.checkpoints.target_tables import TargetTables
from speccompile.export.layers import RmsNorm, SelfAttention, SwiGlu, attend, init_linear, join_heads
from speccompile.export.tree_drafters import Above, take
from speccompile.speculators.prophet.config import ProphetSizes

RANDOM_SEED = 0
Held = list[tuple[torch.Tensor, torch.Tensor]]


class ProphetLayer(nn.Module):
    """Pre-norm attention and SwiGLU, as in Llama."""

    def __init__(self, sizes: ProphetSizes) -> None:
        super().__init__()
        width, heads = sizes.hidden_size, sizes.num_attention_heads
        self.input_layernorm = RmsNorm(width, sizes.rms_norm_eps)
        self.self_attn = SelfAttention(
            width, width, heads, sizes.num_key_value_heads, sizes.head_dim, sizes.rope_theta
        )  # fmt: skip
        self.post_attention_layernorm = RmsNorm(width, sizes.rms_norm_eps)
        self.mlp = SwiGlu(width, sizes.intermediate_size)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None, mask: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Runs the layer over new positions; returns outputs as `x`, and keys and values with the new positions.

        Args:
            x: [batch, nodes, hidden].
            positions: [1, nodes] int64.
            past: keys and values [batch, kv_heads, rows, head_dim] of the positions before, None at the start.
            mask: bool [nodes, rows + nodes], None where every position is seen.
        """
        q, k, v = self.self_attn.project(self.input_layernorm(x), positions)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        x = x + self.self_attn.o_proj(join_heads(attend(q, k, v, mask)))
        return x + self.mlp(self.post_attention_layernorm(x)), (k, v)


class Prophet(nn.Module):
    """The transformer without vocabulary projection; parameters have the names of the checkpoint."""

    def __init__(self, sizes: ProphetSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_proj = nn.Linear(sizes.target_hidden_size, sizes.hidden_size, bias=False)
        self.layers = nn.ModuleList(ProphetLayer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        init_linear(self)
        if not sizes.uses_target_embeddings:
            self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
            if not sizes.tie_word_embeddings:
                self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Returns [starts, tokens, hidden] of all positions, teacher-forced: row i drafts the token after token i.

        `hidden` are [starts, target hidden], `embedded` [starts, tokens, hidden], the root first.
        """
        x = torch.cat((self.input_proj(hidden)[:, None], embedded), 1)
        nodes = x.shape[1]
        positions = torch.arange(nodes, device=x.device)[None]
        mask = torch.ones(nodes, nodes, dtype=torch.bool, device=x.device).tril()
        for layer in self.layers:
            x, _ = layer(x, positions, None, mask)
        return self.norm(x[:, 1:])

    def begin(self, hidden: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns keys and values of each layer for the target's state, position 0: hidden [batch, target hidden]."""
        x, past = self.input_proj(hidden)[:, None], []
        positions = torch.zeros(1, 1, dtype=torch.int64, device=x.device)
        for layer in self.layers:
            x, kept = layer(x, positions, None, None)
            past.append(kept)
        return past

    def step(
        self, index: int, embedded: torch.Tensor, held: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Returns [batch, hidden] of one token, for the LM head, and the new keys and values.

        Args:
            index: its distance from the root; the root's is 0.
            embedded: [batch, 1, hidden].
            held: keys and values of the positions before, from `begin` or the last `step`.
        """
        x, grown = embedded, []
        positions = torch.full((1, 1), index + 1, dtype=torch.int64, device=x.device)
        for layer, past in zip(self.layers, held, strict=True):
            x, kept = layer(x, positions, past, None)
            grown.append(kept)
        return self.norm(x[:, 0]), grown


@dataclass(frozen=True, eq=False)
class Seen:
    """The positions that are held, and which of them the nodes of the last depth see, themselves included.

    `rows` are those positions by node, where equal in every slot; else [batch, nodes, positions] float32, 1: seen.
    """

    held: Held  # keys and values of each layer, [batch, kv_heads, positions, head_dim]
    rows: tuple[tuple[int, ...], ...] | torch.Tensor


class ProphetExpander(nn.Module):
    """An `export.tree_drafters.Expander`. `embeddings`: [vocab, hidden]. `lm_head`: [vocab, hidden]."""

    def __init__(self, heads: Prophet, embeddings: torch.Tensor, lm_head: torch.Tensor) -> None:
        super().__init__()
        self.heads = heads
        self.embeddings = nn.Parameter(embeddings, requires_grad=False)
        self.lm_head = self.embeddings if lm_head is embeddings else nn.Parameter(lm_head, requires_grad=False)

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the first state, the row of position 0; it runs together with the root, which reads weights once."""
        row: torch.Tensor = self.heads.input_proj(hidden)
        return row

    def expand(
        self, depth: int, state: torch.Tensor | Seen, tokens: torch.Tensor, above: Above
    ) -> tuple[Seen, torch.Tensor]:
        """Runs the nodes of one depth, which share a position; with the root, position 0 as well."""
        x = functional.embedding(tokens, self.embeddings)
        positions = torch.full((1, 1), depth + 1, dtype=torch.int64)
        if isinstance(state, Seen):
            past: Sequence[tuple[torch.Tensor, torch.Tensor] | None] = state.held
            rows, mask = _see(state, tokens, above)
        else:
            x, positions, past = torch.cat((state, x), 1), torch.arange(2)[None], [None] * len(self.heads.layers)
            rows, mask = ((0, 1),), torch.ones(2, 2, dtype=torch.bool).tril()
        grown = []
        for layer, before in zip(self.heads.layers, past, strict=True):
            x, kept = layer(x, positions, before, mask)
            grown.append(kept)
        x = x if isinstance(state, Seen) else x[:, 1:]
        return Seen(grown, rows), functional.linear(self.heads.norm(x), self.lm_head)


def _see(
    state: Seen, tokens: torch.Tensor, above: Above
) -> tuple[tuple[tuple[int, ...], ...] | torch.Tensor, torch.Tensor | None]:
    """Returns the positions that new nodes see, and the mask over all, None where each node sees all."""
    num_held, nodes = state.held[0][0].shape[2], tokens.shape[1]
    if not isinstance(above, torch.Tensor):
        assert not isinstance(state.rows, torch.Tensor)
        rows = tuple((*state.rows[parent], num_held + node) for node, parent in enumerate(above))
        if all(len(row) == num_held + nodes for row in rows):
            return rows, None
        return rows, torch.tensor([[at in row for at in range(num_held + nodes)] for row in rows])
    if isinstance(state.rows, torch.Tensor):
        before = take(state.rows, above)
    else:
        known = torch.tensor([[float(at in row) for at in range(num_held)] for row in state.rows])
        before = known[above]
    index = torch.arange(nodes)
    own = (index[:, None] == index).float().expand(tokens.shape[0], nodes, nodes)
    seen = torch.cat((before, own), 2)
    return seen, (seen > 0.5)[:, None]


def make_expander(
    sizes: ProphetSizes, weights: Mapping[str, torch.Tensor] | None, tables: TargetTables | None
) -> ProphetExpander:
    """Returns the drafter in float32; `weights` by canonical name, None: random ones, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        heads = Prophet(sizes)
    if weights is not None:
        parameters = {k: nn.Parameter(weights[k].to(torch.float32), requires_grad=False) for k in heads.state_dict()}
        heads.load_state_dict(parameters, assign=True)
    heads.requires_grad_(False)
    if sizes.uses_target_embeddings:
        assert tables is not None
        return ProphetExpander(heads, tables.embeddings, tables.lm_head).eval()
    embeddings = heads.embed_tokens.weight
    lm_head = embeddings if sizes.tie_word_embeddings else heads.lm_head.weight
    return ProphetExpander(heads, embeddings, lm_head).eval()
