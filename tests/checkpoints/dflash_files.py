# SPDX-License-Identifier: Apache-2.0
"""Block drafters in every public layout, with real names at tiny sizes."""

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.lab_files import DRAFT_VOCAB, HEAD_DIM, HIDDEN, LLAMA, VOCAB, draw, layer_shapes, save

READ, RANK, BLOCK = (1, 2, 3), 4, 4
QWEN = {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "max_position_embeddings": 64}


def shapes(vocab: int = VOCAB) -> dict[str, tuple[int, ...]]:
    """The part that all have."""
    made = {"fc.weight": (HIDDEN, len(READ) * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(2):
        made |= layer_shapes(f"layers.{i}", HIDDEN, HIDDEN)
        made |= {f"layers.{i}.self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"}
    return made if vocab == VOCAB else {**made, "lm_head.weight": (vocab, HIDDEN)}


def convolutions() -> dict[str, tuple[int, ...]]:
    stems = [f"layers.{i}.{part}_conv" for i in range(2) for part in ("attention", "mlp")]
    made = {f"{stem}.base_kernel": (2, 2, HIDDEN) for stem in stems}
    return made | {f"{stem}.kernel_projection.weight": (4 * HIDDEN // 8, HIDDEN) for stem in stems}


def selector() -> dict[str, tuple[int, ...]]:
    books = {f"candidate_selector.{kind}_codebook": (VOCAB, RANK) for kind in ("predecessor", "successor")}
    return {**books, "candidate_selector.hidden_projection.weight": (RANK, HIDDEN)}


def own(**fields: Any) -> dict[str, Any]:
    return {"block_size": BLOCK, "mask_token_id": 39, "target_layer_ids": list(READ), **fields}


def dflash_one(folder: Path) -> Path:
    config = {**QWEN, "architectures": ["DFlashDraftModel"], "num_target_layers": 6, "dflash_config": own()}
    return save(folder, config, draw(shapes()))


def dflash_two(folder: Path) -> Path:
    numbers = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 8}
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32, "use_sliding_window": True}
    config = {**QWEN, **windows, "architectures": ["DFlash2DraftModel"], "is_causal": False}
    tensors = draw({**shapes(), **convolutions(), **selector()})
    return save(folder, {**config, "dflash_config": own(**numbers)}, tensors)


def dspark(folder: Path) -> Path:
    head = {f"markov_head.markov_w{i}.weight": (VOCAB, RANK) for i in (1, 2)}
    tables = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    head |= {"confidence_head.proj.weight": (1, HIDDEN + RANK), "confidence_head.proj.bias": (1,)}
    config = {
        **QWEN,
        "architectures": ["Qwen3DSparkModel"],
        **own(),
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
    }
    return save(folder, config, draw({**shapes(), **tables, **head}))


def lilicorr(folder: Path) -> Path:
    """Narrower than the drafter, beside convolutions."""
    from tests.speculators.lilicorr_lab import shapes as corrector_shapes

    numbers = {
        "lilicorr_enabled": True, "lilicorr_candidate_topk": 8, "lilicorr_hidden_size": 12, "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 3, "lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": 6, "lilicorr_vector_eps": 1e-4,
        "lilicorr_logit_scale": 8.0, "conv_kernel_size": 2, "conv_group_size": 8,
    }  # fmt: skip
    config = {**QWEN, "architectures": ["LiLiCorrDraftModel"], "dflash_config": own(**numbers)}
    head = {f"lilicorr.{key}": shape for key, shape in corrector_shapes(config).items()}
    return save(folder, config, draw({**shapes(), **convolutions(), **head}))


def lilicorr_as_wide(folder: Path) -> Path:
    """As wide as the drafter: without a projection of tokens, and known by its architecture alone."""
    from tests.speculators.lilicorr_lab import shapes as corrector_shapes

    numbers = {
        "lilicorr_candidate_topk": 8, "lilicorr_hidden_size": 0, "lilicorr_num_layers": 1, "lilicorr_num_heads": 2,
        "lilicorr_mlp_ratio": 2, "lilicorr_factor_dim": 6, "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 8,
    }  # fmt: skip
    config = {**QWEN, "architectures": ["LiLiCorrDraftModel"], "dflash_config": own(**numbers)}
    head = {f"lilicorr.{key}": shape for key, shape in corrector_shapes(config).items()}
    return save(folder, config, draw({**shapes(), **head}))


def domino(folder: Path, prefix: str = "") -> Path:
    """With the keys of the first releases where there is a prefix."""
    numbers = {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 10, "pure_draft_prefix_len": 1}
    config = {**QWEN, "architectures": ["DFlashDraftModel"], "dflash_config": own(**numbers, shift_label=True)}
    head = {
        "prefix_gru.weight_ih_l0": (30, HIDDEN), "prefix_gru.weight_hh_l0": (30, 10),
        "embed_proj.0.weight": (6, HIDDEN + 10), "embed_proj.2.weight": (VOCAB, 6),
    }  # fmt: skip
    return save(folder, config, draw({**shapes(), **{prefix + key: shape for key, shape in head.items()}}))


def domino_first(folder: Path) -> Path:
    return domino(folder, "logit_head.")


def dflash_speculators(folder: Path) -> Path:
    """With a vocabulary of its own."""
    config = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
            "verifier": {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {k: v for k, v in QWEN.items() if k != "architectures"},
        "draft_vocab_size": DRAFT_VOCAB, "block_size": BLOCK, "mask_token_id": 39, "sample_from_anchor": False,
        "aux_hidden_state_layer_ids": [i + 1 for i in READ], "sliding_window_non_causal": False,
    }  # fmt: skip
    kept = torch.arange(DRAFT_VOCAB) * 3
    maps = {"d2t": kept - torch.arange(DRAFT_VOCAB), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, 1)}
    return save(folder, config, {**draw(shapes(DRAFT_VOCAB)), **maps})
