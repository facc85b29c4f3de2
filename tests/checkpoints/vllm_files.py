# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1 and Medusa in vLLM's layouts, EAGLE-1 in the speculators format, EAGLE-3 as NVIDIA names its norms."""

from collections.abc import Callable
from pathlib import Path

import torch

from tests.checkpoints.lab_files import HIDDEN, LLAMA, VOCAB, Tensors, draw, layer_shapes, save

KEPT = [7, 0, 39, 1, 2, 30, 21, 5, 8, 9, 13, 34]  # the target's tokens, in the order of the LM head's rows
INNER_CONFIG = {**LLAMA, "num_hidden_layers": 1, "bias": True, "eagle_fc_bias": True}


def eagle_tensors() -> Tensors:
    shapes = {"embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    shapes |= {"lm_head.weight": (VOCAB, HIDDEN), **layer_shapes("layers.0", HIDDEN, HIDDEN, norm=False)}
    return draw(shapes)


def eagle_vllm(folder: Path) -> Path:
    """As vLLM's script converts them."""
    return save(folder, {"model_type": "eagle", "model": INNER_CONFIG}, eagle_tensors())


def eagle_vllm_cut(folder: Path) -> Path:
    """As vLLM's config class writes them: all keys twice; with a map to which the whole LM head is cut."""
    held = {k if k.startswith(("fc.", "lm_head.")) else f"model.{k}": t for k, t in eagle_tensors().items()}
    own = {"architectures": ["EAGLEModel"], "model_type": "eagle", "truncated_vocab_size": len(KEPT)}
    config = {**INNER_CONFIG, **own, "model": INNER_CONFIG, "num_lookahead_tokens": 5}
    return save(folder, config, {**held, "token_map": torch.tensor(KEPT)})


def eagle_speculators(folder: Path) -> Path:
    """Without embeddings and LM head."""
    held = {k: t for k, t in eagle_tensors().items() if k.startswith(("fc.", "layers."))}
    held = {k.replace("fc.", "fusion_fc.", 1).replace("layers.0.", "transformer."): t for k, t in held.items()}
    method = {"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "speculators_model_type": "eagle",
        "speculators_version": "0.1.0", "transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": False,
        "fusion_bias": True, "transformer_layer_config": {**LLAMA, "num_hidden_layers": 1},
        "speculators_config": {
            "algorithm": "eagle", "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]},
        },
    }  # fmt: skip
    return save(folder, config, held)


MEDUSA = {
    "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB,
    "num_heads": 3, "num_hidden_layers": 1, "max_paths": 64, "topk": 10, "truncated_vocab_size": VOCAB,
}  # fmt: skip


def medusa_tensors(**heads: int) -> Tensors:
    return draw({f"blocks.{i}.layers.0.weight": (HIDDEN, HIDDEN) for i in range(3)} | {
        f"{name}.weight": (num, HIDDEN) for name, num in heads.items()
    })  # fmt: skip


def medusa_vllm_shared(folder: Path) -> Path:
    """All heads end in one LM head, which is stored."""
    return save(folder, {**MEDUSA, "original_lm_head": True}, medusa_tensors(lm_head=VOCAB))


def medusa_vllm_cut(folder: Path) -> Path:
    held = medusa_tensors(**{f"lm_heads.{i}": len(KEPT) for i in range(3)})
    return save(folder, {**MEDUSA, "truncated_vocab_size": len(KEPT)}, {**held, "token_map": torch.tensor(KEPT)})


def eagle3_nvidia(folder: Path) -> Path:
    """Norms are named in an object, and the target's LM head is used."""
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "input_norm.weight": (3 * HIDDEN,), "norm.weight": (HIDDEN,)}
    shapes |= {"layers.0.hidden_norm.weight": (HIDDEN,), **layer_shapes("layers.0", HIDDEN, 2 * HIDDEN)}
    named: dict[str, object] = {"use_aux_hidden_state": True, "norm_before_fc": True, "return_hidden_post_norm": True}
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": None}
    named["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]
    return save(folder, {**config, "has_lm_head": False, "eagle_config": named}, draw(shapes))


VLLM_LAYOUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "medusa-vllm-shared": (medusa_vllm_shared, "medusa/vllm"),
    "medusa-vllm-cut": (medusa_vllm_cut, "medusa/vllm"),
    "eagle-vllm": (eagle_vllm, "eagle/vllm"),
    "eagle-vllm-cut": (eagle_vllm_cut, "eagle/vllm"),
    "eagle-speculators": (eagle_speculators, "eagle/speculators"),
    "eagle3-nvidia": (eagle3_nvidia, "eagle3/numbered"),
}
