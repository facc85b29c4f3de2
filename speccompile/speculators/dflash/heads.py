# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr's layers over the candidates of a block, which score pairs of neighbouring ones (arXiv 2608.20530).

Every candidate of every slot is a row: its token, its slot's state, and its probability. A few layers without a mask
let all rows see one another. Each row gives vectors for the edges into it and out of it, and the newest position that
the target has read gives that of the root. Parameters have the published names.

Domino's head is a recurrent state over a path's drafts, which corrects the scores of the slot after it: state =
GRU(embedding of the path's last token, state before it), delta = W2 SiLU(W1 [slot's state of the drafter, state of the
path]) (arXiv 2605.29707). A block computes what depends on no path: embeddings, the first part of W1's product and the
candidates' rows of W2. The step does the rest for one token of a path.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from speccompile.export.feature_draft import fill_weights
from speccompile.speculators.dflash.drafter import Corrector, PathHead

_NUM_FEATURES = 5  # of how likely a candidate is; see `_features`


class LatticeAttention(nn.Module):
    """Attention of all rows to all, with a bias for each head and pair of slots."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden // num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * hidden))
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Returns [batch, slots, candidates, hidden] of x of the same shape; bias [heads, slots, slots]."""
        _, slots, num, _ = x.shape
        rows = functional.linear(x, self.in_proj_weight, self.in_proj_bias).flatten(1, 2)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in rows.chunk(3, -1))
        scores = (q * self.head_dim**-0.5) @ k.transpose(2, 3)  # [batch, heads, slots * candidates, the same]
        pairs = scores.unflatten(3, (slots, num)).unflatten(2, (slots, num)) + bias[:, :, None, :, None]
        mixed = pairs.flatten(4, 5).flatten(2, 3).softmax(-1) @ v
        out: torch.Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out.unflatten(1, (slots, num))


class LatticeLayer(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, hidden: int, corrector: Corrector, eps: float) -> None:
        super().__init__()
        inner = int(hidden * corrector.mlp_ratio)
        self.attn_norm, self.mlp_norm = (LlamaRMSNorm(hidden, eps) for _ in range(2))
        self.attn = LatticeAttention(hidden, corrector.num_heads)
        self.mlp = nn.Sequential(nn.Linear(hidden, inner), nn.SiLU(), nn.Linear(inner, hidden))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class LatticeCorrector(nn.Module):
    """The layers and what is around them; `width` is of the drafter's states, `block_size` includes the root's row."""

    def __init__(self, width: int, corrector: Corrector, block_size: int, eps: float) -> None:
        super().__init__()
        hidden, num = corrector.hidden_size or width, corrector.num_candidates
        self.sizes, self.block_size = corrector, block_size
        self.token_proj: nn.Module = nn.Identity() if hidden == width else nn.Linear(width, hidden)
        self.pass_hidden_proj, self.context_proj = (nn.Linear(width, hidden) for _ in range(2))
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(_NUM_FEATURES), nn.Linear(_NUM_FEATURES, hidden), nn.SiLU(), nn.Linear(hidden, hidden)
        )
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, block_size - 1, 1, hidden))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, num, hidden))
        self.relative_slot_bias = nn.Parameter(torch.empty(corrector.num_heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(corrector.num_heads))
        self.layers = nn.ModuleList(LatticeLayer(hidden, corrector, eps) for _ in range(corrector.num_layers))
        self.output_norm, self.anchor_norm = (LlamaRMSNorm(hidden, eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * hidden, hidden)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(hidden, corrector.factor_dim) for _ in range(3))

    def forward(
        self, embedded: torch.Tensor, log_probs: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Returns scores [batch, slots, candidates before, candidates]; all rows of slot 0 are alike.

        Args:
            embedded: [batch, slots, candidates, width], the target's embeddings of candidates, by falling probability.
            log_probs: [batch, slots, candidates], of the drafter's softmax over the whole vocabulary.
            hidden: [batch, slots, width], what the LM head reads.
            anchors: [batch, width], the feature of the newest position that the target has read.
        """
        slots, num = log_probs.shape[1:]
        x = self.token_proj(embedded) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(_features(log_probs)) + self.slot_embedding[0, :, :slots] + self.rank_embedding[0]
        bias = self._bias(slots)
        for layer in self.layers:
            x = layer(x, bias)
        x, anchor = self.output_norm(x), self.anchor_norm(self.context_proj(anchors))
        root_rows = anchor[:, None, None].expand_as(x)
        x = functional.silu(self.factor_input_proj(torch.cat((x, root_rows, x * root_rows), -1)))
        into = self._unit(self.in_head(x))
        out_of = self._unit(self.out_head(x))[:, :-1]
        root = self._unit(self.anchor_out_head(anchor))[:, None, None].expand(-1, -1, num, -1)
        return torch.cat((root, out_of), 1) @ into.transpose(2, 3) * self.sizes.logit_scale

    def _bias(self, slots: int) -> torch.Tensor:
        numbers = torch.arange(slots)
        apart = numbers[:, None] - numbers
        # Distances of a shorter block have the columns that they have in a whole one.
        return self.relative_slot_bias[:, apart + self.block_size - 1] + torch.where(
            apart == 0, self.same_slot_bias[:, None, None], 0.0
        )

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=self.sizes.vector_eps)


def _features(log_probs: torch.Tensor) -> torch.Tensor:
    """Returns [.., candidates, 5]: log probability, probability, log ratio to the best, rank, whether it is best."""
    num = log_probs.shape[-1]
    ranks = torch.arange(num) / max(num - 1, 1)
    is_first = (torch.arange(num) == 0).float()
    parts = (log_probs, log_probs.exp(), log_probs - log_probs[..., :1])
    fixed = (part.expand_as(log_probs) for part in (ranks, is_first))
    return torch.stack((*parts, *fixed), -1)


_GRU, _INNER, _OUTER = "prefix_gru.weight_{}h_l0", "embed_proj.0.weight", "embed_proj.2.weight"


class PathTerms(nn.Module):
    """What a block gives of the head."""

    def __init__(self, hidden: int, vocab: int, head: PathHead) -> None:
        super().__init__()
        self.num_plain = head.num_plain
        self.inner = nn.Linear(hidden, head.width, bias=False)
        self.rows = nn.Embedding(vocab, head.width)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `slot_terms` and `candidate_rows` of slots [batch, slots, hidden] and candidates; see `blocks`."""
        is_corrected = (torch.arange(tokens.shape[1]) >= self.num_plain)[:, None, None]
        return self.inner(hidden), self.rows(tokens) * is_corrected


class PathStep(nn.Module):
    """The module of the step: inputs as in `path_step_spec`, as one list."""

    def __init__(self, hidden: int, head: PathHead) -> None:
        super().__init__()
        self.token_gates = nn.Linear(hidden, 3 * head.state_size, bias=False)
        self.state_gates = nn.Linear(head.state_size, 3 * head.state_size, bias=False)
        self.inner = nn.Linear(head.state_size, head.width, bias=False)

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the states after each node, and the scores of the candidates that follow."""
        embedded, states, terms, rows, base = tensors
        reset, update, fresh = self.token_gates(embedded).chunk(3, -1)
        old_reset, old_update, old_fresh = self.state_gates(states).chunk(3, -1)
        kept = (update + old_update).sigmoid()
        made = (fresh + (reset + old_reset).sigmoid() * old_fresh).tanh()
        following = (1 - kept) * made + kept * states
        inner = functional.silu(terms[:, None] + self.inner(following))
        return following, base[:, None] + inner @ rows.transpose(1, 2)


def block_weights(weights: Mapping[str, torch.Tensor], hidden: int, name: str) -> dict[str, torch.Tensor]:
    """Returns the weights of `PathTerms` by names after `name`, of a checkpoint in the canonical layout."""
    return {f"{name}.inner.weight": weights[_INNER][:, :hidden].contiguous(), f"{name}.rows.weight": weights[_OUTER]}


def make_step(head: PathHead, hidden: int, weights: Mapping[str, torch.Tensor] | None) -> PathStep:
    """Returns the step with its weights. `weights`: by the names of the canonical layout; None: random ones."""
    own = None
    if weights is not None:
        gates = (("token_gates", "i"), ("state_gates", "h"))
        own = {f"{name}.weight": weights[_GRU.format(side)] for name, side in gates}
        own["inner.weight"] = weights[_INNER][:, hidden:].contiguous()
    with torch.device("meta"):
        step = PathStep(hidden, head)
    fill_weights(step, own)
    return step.eval()


def most_probable_path(
    step: PathStep,
    embedded: torch.Tensor,
    terms: torch.Tensor,
    rows: torch.Tensor,
    candidates: torch.Tensor,
    base: torch.Tensor,
) -> torch.Tensor:
    """Returns the tokens of the most probable walk over a block, [batch, slots].

    `candidates` are [batch, slots, candidates] int64, `base` their scores without the head.
    """
    batch, slots, num = candidates.shape
    each, columns = torch.arange(batch), torch.zeros(batch, dtype=torch.int64)
    state, tokens = embedded.new_zeros(batch, 1, step.state_gates.in_features), []
    for slot in range(slots):
        state, scores = step([embedded[each, columns][:, None], state, terms[:, slot], rows[:, slot], base[:, slot]])
        taken = scores[:, 0].argmax(-1)
        tokens.append(candidates[each, slot, taken])
        columns = 1 + slot * num + taken
    return torch.stack(tokens, 1)
