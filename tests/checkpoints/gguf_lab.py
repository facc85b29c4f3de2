# SPDX-License-Identifier: Apache-2.0
"""GGUF files of tiny models: written from transformers' models by the names of the package `gguf`, as converters do."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

HIDDEN, HEADS, KV_HEADS, VOCAB = 256, 4, 2, 160
# Where blocks have their float16 numbers: random bytes there would be infinite or NaN.
_K_QUANTS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_HALVES = {**_K_QUANTS, "Q4_1": (0, 2), "Q5_1": (0, 2), "TQ1_0": (52,), "TQ2_0": (64,), **dict.fromkeys(
    ("Q4_0", "Q5_0", "Q8_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS"), (0,)
)}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 512,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
         "short_factor": [1.0 + 0.05 * n for n in range(32)], "long_factor": [2.0 + n for n in range(32)]}  # fmt: skip
# architecture in the file, transformers' type, changes of `SIZES`, by name.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("llama", "llama", {"rope_parameters": _LLAMA3}),
    "llama with biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": ("llama", "llama", {"head_dim": 128}),
    "mistral": ("llama", "mistral", {"sliding_window": 8}),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2 with yarn": ("qwen2", "qwen2", {"rope_parameters": _YARN}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 256, **_EXPERTS}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"num_experts": 4, "norm_topk_prob": True, **_EXPERTS}),
    "gemma": ("gemma", "gemma", {"head_dim": 64}),
    "gemma2": ("gemma2", "gemma2", {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8}),
    "gemma3": ("gemma3", "gemma3_text", {
        "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "num_hidden_layers": 7,
    }),
    "gemma3 with a scale": ("gemma3", "gemma3_text", {
        "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "num_hidden_layers": 7,
        "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL},
    }),
    "phi3": ("phi3", "phi3", {"sliding_window": 8, "pad_token_id": 0}),
    "phi3 with factors": ("phi3", "phi3", {"pad_token_id": 0, "rope_parameters": _LONG}),
    "granite": ("granite", "granite", {
        "attention_multiplier": 0.02, "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 4.0,
    }),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True, "pad_token_id": 0}),
    "olmo2": ("olmo2", "olmo2", {"pad_token_id": 0}),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None}),
    "gpt-oss": ("gpt-oss", "gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 64, "intermediate_size": 256,
        "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    }),
}  # fmt: skip
_IN_PAIRS = ("llama", "granite", "smollm3")
_GRANITE = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}  # fmt: skip
# Of a tokenizer with a token for each row of the embedding.
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", *(f"t{n}" for n in range(5, VOCAB))],
    "tokenizer.ggml.token_type": [3, 3, *[1] * (VOCAB - 2)],
    "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
}  # fmt: skip
Changes = Callable[[dict[str, Any]], None]


def make_model(name: str) -> Any:
    """Returns a model with random weights, norms and biases."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _, kind, changes = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def in_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows of halves of a head, as transformers rotates them, as neighbouring pairs."""
    return np.ascontiguousarray(rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2)).reshape(rows.shape)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Returns rows of blocks with random bytes and small scales."""
    rng = np.random.default_rng(seed)
    size, size_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, size_bytes)).astype(np.uint8)
    for start in _HALVES.get(kind, ()):
        halves = rng.uniform(1e-4, 1e-3, raw.shape[:-1]).astype(np.float16)
        raw[..., start : start + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def hub_tensors(model: Any) -> dict[str, np.ndarray]:
    """Returns the tensors under the names in a checkpoint's files."""
    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def gguf_tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    """Returns the tensors as llama.cpp's converter writes them, float32 or before their quantisation."""
    config, names = model.config, gguf.get_tensor_name_map(_arch(arch), model.config.num_hidden_layers)
    made: dict[str, Any] = {}
    for key, value in hub_tensors(model).items():
        stem, _, suffix = key.rpartition(".")
        if key.endswith(("_proj", "_proj_bias", "sinks")):
            stem, suffix = key.removesuffix("_bias"), "bias" if key.endswith("bias") else "weight"
        expert = next((part for part in stem.split(".") if part.isdigit() and f"experts.{part}" in stem), None)
        if arch == "gpt-oss" and "gate_up_proj" in stem:
            for way, part in enumerate(("gate", "up")):
                bare = names.get_name(stem.replace("gate_up_proj", f"{part}_proj"))
                made[f"{bare}.{suffix}"] = value[..., way::2] if suffix == "bias" else value[..., way::2].swapaxes(1, 2)
            continue
        bare = names.get_name(stem if expert is None else stem.replace(f"experts.{expert}", "experts"))
        assert bare is not None, key
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem.split(".")[-1], 0)
        if heads and arch in _IN_PAIRS:
            value = in_pairs(value, heads)
        if arch.startswith("gemma") and "norm" in stem:
            value = value + 1
        if arch == "gpt-oss" and stem.endswith("experts.down_proj") and suffix == "weight":
            value = value.swapaxes(1, 2)
        if expert is not None:
            made.setdefault(f"{bare}.{suffix}", []).append((int(expert), value))
        else:
            made[f"{bare}.{suffix}"] = value.squeeze(0) if value.shape[:1] == (1,) else value
    return {
        name: np.stack([v for _, v in sorted(value, key=lambda pair: pair[0])]) if isinstance(value, list) else value
        for name, value in made.items()
    }


def _arch(name: str) -> Any:
    return {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[name]


def model_keys(config: Any, arch: str) -> dict[str, Any]:
    """Returns the keys that a converter writes for a config, without the architecture's prefix."""
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    made: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim, "vocab_size": config.vocab_size,
    }  # fmt: skip
    eps = "layer_norm_epsilon" if arch == "starcoder2" else "layer_norm_rms_epsilon"
    made[f"attention.{eps}"] = float(getattr(config, "norm_epsilon", None) or config.rms_norm_eps)
    if arch == "gemma3":
        rope = rope["full_attention"]
    made["rope.freq_base"] = float(rope["rope_theta"])
    if arch in ("llama", "phi3"):
        made["rope.dimension_count"] = head_dim
    if rope["rope_type"] in ("linear", "yarn"):
        made |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] in ("yarn", "longrope"):
        made["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if getattr(config, "sliding_window", None) and (arch != "qwen2" and not hasattr(config, "use_sliding_window")):
        made["attention.sliding_window"] = config.sliding_window
    if (num := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)) is not None:
        made |= {"expert_count": num, "expert_used_count": config.num_experts_per_tok}
    if (width := getattr(config, "moe_intermediate_size", None)) is not None:
        made["expert_feed_forward_length"] = width
    if arch == "gpt-oss":
        made["expert_feed_forward_length"] = config.intermediate_size
    if arch == "granite":
        made |= {key: float(getattr(config, name)) for key, name in _GRANITE.items()}
    if arch == "gemma2":
        made |= {f"{n}_logit_softcapping": getattr(config, f"{n}_logit_softcapping") for n in ("attn", "final")}
    return made


def rope_tensors(config: Any, arch: str) -> dict[str, np.ndarray]:
    """Returns the factors of frequencies that a converter writes as tensors."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{n}.weight": np.array(rope[f"{n}_factor"], np.float32) for n in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = config.hidden_size // config.num_attention_heads
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (rope["original_max_position_embeddings"] / waves - low) / (high - low)
    return {"rope_freqs.weight": (1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))).astype(np.float32)}


def write_file(path: Path, arch: str, keys: Mapping[str, Any], tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """Writes a file.

    Args:
        path: of it.
        arch: its architecture.
        keys: all others, as they are written.
        tensors: block type and stored array (of blocks: their bytes) by name.
    """
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            whole = writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32
            add = {bool: writer.add_bool, str: writer.add_string, int: whole, float: writer.add_float32}
            add[type(value)](key, value)
    for name, (kind, stored) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_as(kind: str, value: np.ndarray) -> tuple[str, np.ndarray]:
    """Returns what is stored of a tensor: its matrices in a block type, of K quants random ones; vectors in float32."""
    if value.ndim < 2 or kind == "F32":
        return "F32", value.astype(np.float32)
    if kind in _K_QUANTS:
        return kind, random_blocks(kind, value.shape, value.size % 97)
    return kind, quantize(value.astype(np.float32), GGMLQuantizationType[kind])


def write_model(
    path: Path,
    name: str,
    kind: str | Mapping[str, str] = "F32",
    *,
    keys: Mapping[str, Any] | None = None,
    change: Changes | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> Any:
    """Writes a file of a model in `MODELS`; returns the model with the values that the file has.

    Args:
        path: of the file.
        name: of the model.
        kind: block type of its matrices; or by a part of their names, "" for the others.
        keys: added or in the place of its own ones, without the architecture's prefix; None leaves one out.
        change: changes the stored tensors before they are written.
        tokenizer: keys of a tokenizer, as they are written.
    """
    import torch

    model, arch = make_model(name), MODELS[name][0]
    tensors = gguf_tensors(model, arch)
    stored = {n: stored_as(_kind_of(kind, n), v) for n, v in tensors.items()}
    values = {n: dequantize(raw, GGMLQuantizationType[k]).reshape(tensors[n].shape) for n, (k, raw) in stored.items()}
    with torch.no_grad():
        for parameter, value in zip(*_aligned(model, arch, values), strict=True):
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    all_tensors: dict[str, Any] = {**stored, **{n: ("F32", v) for n, v in rope_tensors(model.config, arch).items()}}
    if change is not None:
        change(all_tensors)
    own = {f"{arch}.{k}": v for k, v in {**model_keys(model.config, arch), **(keys or {})}.items() if v is not None}
    write_file(path, arch, {**own, **(tokenizer or {"tokenizer.ggml.model": "none"})}, all_tensors)
    return model


def _kind_of(kind: str | Mapping[str, str], name: str) -> str:
    return kind if isinstance(kind, str) else next(k for part, k in kind.items() if part in name)


def _aligned(model: Any, arch: str, values: Mapping[str, np.ndarray]) -> tuple[list[Any], list[np.ndarray]]:
    """Returns the parameters that a file's tensors set, and their values, by a probe that numbers every element."""
    import torch

    held = {name: p.detach().clone() for name, p in model.named_parameters()}
    order: list[Any] = []
    made: list[np.ndarray] = []
    flat = np.concatenate([v.ravel() for v in values.values()])
    starts = dict(zip(values, np.cumsum([0, *(v.size for v in values.values())]), strict=False))
    with torch.no_grad():
        total = 0
        for p in model.parameters():
            p.copy_((torch.arange(p.numel()) + total).reshape(p.shape))
            total += p.numel()
        assert total < 1 << 23, "the probe's numbers are exact in float32 up to here"
        offset = 1 if arch.startswith("gemma") else 0
        numbered = gguf_tensors(model, arch)
        source = np.empty(total, np.float32)
        for name, numbers in numbered.items():
            shift = offset if "norm" in name else 0
            where = np.rint(numbers - shift).astype(np.int64).ravel()
            source[where] = flat[starts[name] : starts[name] + numbers.size] - shift
        total = 0
        for name, p in model.named_parameters():
            order.append(p)
            made.append(source[total : total + p.numel()].reshape(p.shape))
            total += p.numel()
            p.copy_(held[name])
    return order, made
