# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr's layers over candidates in plain torch, written from the public description; see `dflash_lab`."""

from typing import Any

import torch
from torch.nn import functional

# Layers narrower than the drafter over eight candidates, beside convolutions.
TOP = {"architectures": ["LiLiCorrDraftModel"], "block_size": 6}
NESTED = {
    "lilicorr_enabled": True, "lilicorr_candidate_topk": 8, "lilicorr_hidden_size": 24, "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 3, "lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": 10, "lilicorr_vector_eps": 1e-4,
    "lilicorr_logit_scale": 6.0, "conv_kernel_size": 2, "conv_group_size": 4,
}  # fmt: skip


def block_of(made: dict[str, Any]) -> int:
    """Returns the size of a block, which the config has at the top or nested."""
    return int(made.get("block_size") or made["dflash_config"]["block_size"])


def shapes(made: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of LiLiCorr's weights by key, after `lilicorr.`; none for another drafter."""
    own = {name.removeprefix("lilicorr_"): value for name, value in made["dflash_config"].items()}
    if "factor_dim" not in own:
        return {}
    outer, block = made["hidden_size"], block_of(made)
    width, heads = own["hidden_size"] or outer, own["num_heads"]
    inner = int(width * own["mlp_ratio"])
    linears = {
        "pass_hidden_proj": (width, outer), "context_proj": (width, outer), "feature_mlp.1": (width, 5),
        "feature_mlp.3": (width, width), "factor_input_proj": (width, 3 * width),
    }  # fmt: skip
    linears |= {f"{name}_head": (own["factor_dim"], width) for name in ("out", "in", "anchor_out")}
    if width != outer:
        linears["token_proj"] = (width, outer)
    made_shapes: dict[str, tuple[int, ...]] = {
        "feature_mlp.0.weight": (5,), "feature_mlp.0.bias": (5,), "output_norm.weight": (width,),
        "anchor_norm.weight": (width,), "slot_embedding": (1, 1, block - 1, 1, width),
        "rank_embedding": (1, 1, 1, own["candidate_topk"], width), "same_slot_bias": (heads,),
        "relative_slot_bias": (heads, 2 * block - 1),
    }  # fmt: skip
    for i in range(own["num_layers"]):
        stem = f"layers.{i}."
        linears |= {
            f"{stem}attn.out_proj": (width, width),
            f"{stem}mlp.0": (inner, width),
            f"{stem}mlp.2": (width, inner),
        }
        made_shapes |= {f"{stem}attn.in_proj_weight": (3 * width, width), f"{stem}attn.in_proj_bias": (3 * width,)}
        made_shapes |= {f"{stem}{name}_norm.weight": (width,) for name in ("attn", "mlp")}
    for name, shape in linears.items():
        made_shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return made_shapes


def corrected(
    twin: Any, streams: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first `num` candidates and their scores by LiLiCorr, one row of its lattice after the other."""
    made, own, rows = twin.made, twin.made["dflash_config"], []
    tops, block = own["lilicorr_candidate_topk"], block_of(made)
    logs = logits.log_softmax(-1) if "partition" not in twin.faults else logits
    chosen, candidates = logs.topk(tops)
    if "partition" in twin.faults:  # normalised over the candidates alone
        chosen = chosen.log_softmax(-1)
    last = twin.features(streams)[max(len(streams) - 2, 0) if "anchor" in twin.faults else -1]

    def part(x: torch.Tensor, name: str) -> torch.Tensor:
        return twin.linear(x, f"lilicorr.{name}") + twin.held[f"lilicorr.{name}.bias"]

    def plain(name: str) -> torch.Tensor:
        return twin.held[f"lilicorr.{name}"]

    for slot in range(len(hidden)):
        for rank in range(tops):
            log, first = chosen[slot, rank], chosen[slot, 0]
            told = torch.stack(
                (log, log.exp(), log - first, torch.tensor(rank / (tops - 1)), torch.tensor(float(rank == 0)))
            )
            told = functional.layer_norm(told, (5,), plain("feature_mlp.0.weight"), plain("feature_mlp.0.bias"))
            x = part(twin.embeddings[candidates[slot, rank]], "token_proj") + part(hidden[slot], "pass_hidden_proj")
            x = x + part(functional.silu(part(told, "feature_mlp.1")), "feature_mlp.3")
            rows.append(x + plain("slot_embedding")[0, 0, slot, 0] + plain("rank_embedding")[0, 0, 0, rank])
    x, slots = torch.stack(rows), torch.arange(len(hidden)).repeat_interleave(tops)
    apart = slots[:, None] - slots if "distances" not in twin.faults else slots - slots[:, None]
    bias = plain("relative_slot_bias")[:, apart + block - 1]
    bias = bias + plain("same_slot_bias")[:, None, None] * (apart == 0)
    for i in range(own["lilicorr_num_layers"]):
        stem, normed = f"layers.{i}.", twin.norm(x, f"lilicorr.layers.{i}.attn_norm")
        mixed, _ = functional.multi_head_attention_forward(
            *[normed[:, None]] * 3, x.shape[1], own["lilicorr_num_heads"], plain(f"{stem}attn.in_proj_weight"),
            plain(f"{stem}attn.in_proj_bias"), None, None, False, 0.0, plain(f"{stem}attn.out_proj.weight"),
            plain(f"{stem}attn.out_proj.bias"), training=False, need_weights=False, attn_mask=bias,
        )  # fmt: skip
        x = x + mixed[:, 0]
        inner = functional.silu(part(twin.norm(x, f"lilicorr.{stem}mlp_norm"), f"{stem}mlp.0"))
        x = x + part(inner, f"{stem}mlp.2")
    x = twin.norm(x, "lilicorr.output_norm")
    anchor = twin.norm(part(last, "context_proj"), "lilicorr.anchor_norm")
    factors = functional.silu(part(torch.cat((x, anchor.expand_as(x), x * anchor), -1), "factor_input_proj"))
    shape, eps = (len(hidden), tops, -1), own["lilicorr_vector_eps"]
    into, out = (functional.normalize(part(factors, f"{n}_head"), dim=-1, eps=eps).view(shape) for n in ("in", "out"))
    root = functional.normalize(part(anchor, "anchor_out_head"), dim=-1, eps=eps)
    scores = [torch.einsum("ar,br->ab", root.expand(tops, -1), into[0])]
    scores += [torch.einsum("ar,br->ab", out[t - 1], into[t]) for t in range(1, len(hidden))]
    made_scores = torch.stack(scores) * own["lilicorr_logit_scale"]
    if "unary" in twin.faults:  # as if the pair scores came beside the drafter's own
        made_scores = made_scores + chosen[:, None]
    return candidates[:, :num], made_scores[:, :num, :num]
