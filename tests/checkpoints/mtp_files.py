# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction modules in every public layout, with real names at tiny sizes."""

from collections.abc import Mapping
from pathlib import Path

from tests.checkpoints.lab_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    LLAMA,
    SMALL,
    VOCAB,
    Tensors,
    draw,
    layer_shapes,
    save,
)


def mtp_shapes(layer: str, names: Mapping[str, str], hidden: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    """A dense layer of Qwen3 with the parts around it; `names` are those of the parts fc, e, h and norm."""
    sizes = {"fc": (hidden, 2 * hidden), "e": (hidden,), "h": (hidden,), "norm": (hidden,)}
    shapes = {f"{names[part]}.weight": size for part, size in sizes.items()}
    shapes |= layer_shapes(layer, hidden, hidden)
    return shapes | {f"{layer}.self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"}


def plain_norms(tensors: Tensors) -> Tensors:
    """Norms that multiply by their weights scatter around 1."""
    return {k: t + 1 if t.dim() == 1 and "norm" in k else t for k, t in tensors.items()}


BESIDE = {"fc": "mtp.fc", "e": "mtp.pre_fc_norm_embedding", "h": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm"}
QWEN = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def mtp_ours(folder: Path) -> Path:
    layer = {k: v for k, v in QWEN.items() if k != "architectures"} | {"num_hidden_layers": 1}
    fields = {"norms": "w", "concat": "embedding_first", "chaining": "normed", "target_hidden": "after_norm"}
    config = {"model_type": "mtp", "architectures": ["MtpModule"], "layer_config": layer, **fields}
    return save(folder, config, plain_norms(draw(mtp_shapes("mtp.layers.0", BESIDE))))


def mtp_speculators(folder: Path) -> Path:
    stem = "mtp_layers.0"
    parts = {"fc": "input_proj", "e": "token_layernorm", "h": "hidden_layernorm", "norm": "final_layernorm"}
    config = {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
        "speculators_config": {"algorithm": "mtp", "verifier": {"name_or_path": "someone/model"}},
        "transformer_layer_config": {k: v for k, v in QWEN.items() if k != "architectures"},
    }  # fmt: skip
    return save(folder, config, plain_norms(draw(mtp_shapes(stem, {k: f"{stem}.{v}" for k, v in parts.items()}))))


def target_rows(stem: str = "model.") -> dict[str, tuple[int, ...]]:
    """Some keys of the target in whose files a module is."""
    shapes = {f"{stem}embed_tokens.weight": (VOCAB, HIDDEN), f"{stem}norm.weight": (HIDDEN,)}
    return shapes | layer_shapes(f"{stem}layers.0", HIDDEN, HIDDEN)


def mtp_qwen(folder: Path) -> Path:
    """A multimodal Qwen3.5's files: gates beside the queries, norms by 1 + w."""
    text = {k: v for k, v in LLAMA.items() if k != "architectures"} | {
        "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4,
    }  # fmt: skip
    shapes = mtp_shapes("mtp.layers.0", BESIDE) | target_rows("model.language_model.")
    shapes["mtp.layers.0.self_attn.q_proj.weight"] = (2 * HEADS * HEAD_DIM, HIDDEN)
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    return save(folder, config, draw(shapes))


def mtp_glm(folder: Path) -> Path:
    """GLM's files: the module is a layer after the last, a mixture with biases, and copies of the tables."""
    stem = f"model.layers.{LAYERS}"
    parts = {"fc": "eh_proj", "e": "enorm", "h": "hnorm", "norm": "shared_head.norm"}
    shapes = mtp_shapes(stem, {k: f"{stem}.{v}" for k, v in parts.items()})
    shapes = {k: size for k, size in shapes.items() if ".mlp." not in k} | target_rows()
    for i in range(3):
        shapes |= {f"{stem}.mlp.experts.{i}.{p}_proj.weight": (SMALL, HIDDEN) for p in ("gate", "up")}
        shapes[f"{stem}.mlp.experts.{i}.down_proj.weight"] = (HIDDEN, SMALL)
    shapes |= {f"{stem}.mlp.shared_experts.{p}_proj.weight": (SMALL, HIDDEN) for p in ("gate", "up")}
    shapes |= {f"{stem}.mlp.shared_experts.down_proj.weight": (HIDDEN, SMALL)}
    shapes |= {f"{stem}.mlp.gate.weight": (3, HIDDEN), f"{stem}.mlp.gate.e_score_correction_bias": (3,)}
    shapes |= {f"{stem}.self_attn.{p}_proj.bias": (h * HEAD_DIM,) for p, h in (("q", HEADS), ("k", 2), ("v", 2))}
    shapes |= {f"{stem}.embed_tokens.weight": (VOCAB, HIDDEN), f"{stem}.shared_head.head.weight": (VOCAB, HIDDEN)}
    config = {
        **LLAMA, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1,
        "n_routed_experts": 3, "moe_intermediate_size": SMALL, "first_k_dense_replace": 1,
    }  # fmt: skip
    return save(folder, config, plain_norms(draw(shapes)))
