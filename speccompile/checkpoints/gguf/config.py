# SPDX-License-Identifier: Apache-2.0
"""The keys of a GGUF file as a transformers config; a key that changes numbers and is not understood is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from speccompile.checkpoints.gguf.blocks import BLOCKS
from speccompile.checkpoints.gguf.families import EXPECTED, FAMILIES, KEYS, NEEDED, Family, family_of
from speccompile.checkpoints.gguf.header import GgufHeader
from speccompile.common.json_reader import finite_number, shown
from speccompile.errors import CheckpointError

TODO = "Use the transformers checkpoint that the file was made of."
_COUNTS = ("attention.head_count_kv", "attention.key_length")
_NO_MODEL = ("adapter.", "clip.", "controlvector.")
_CHECKED = ("vocab_size", "rope.scaling.finetuned")
ROPE_FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FREQS, SHORT, LONG)
_LOCAL_THETA = 10000.0  # of Gemma 3's layers with a window, where no key says it


def find_family(header: GgufHeader) -> Family:
    """Returns how the models of a file's architecture are stored."""
    kind = header.fields.get("general.type", "model")
    architecture = header.fields.get("general.architecture")
    if kind != "model" or not header.tensors:
        got = shown(kind) if kind != "model" else "no tensors"
        raise CheckpointError(str(header.path), got, "the weights of a model", "Give the file with the weights.")
    family = family_of(architecture, own_keys(header)) if isinstance(architecture, str) else None
    if family is None:
        where = f"{header.path} (general.architecture)"
        raise CheckpointError(where, shown(architecture), f"one of {', '.join(FAMILIES)}", TODO)
    return family


def own_keys(header: GgufHeader) -> dict[str, Any]:
    """Returns the values of the keys of the architecture, without its prefix; a list of equal numbers as one."""
    prefix = f"{header.fields.get('general.architecture')}."
    own = {k.removeprefix(prefix): v for k, v in header.fields.items() if k.startswith(prefix)}
    return {k: v[0] if isinstance(v, tuple) and len(set(v)) == 1 and k in KEYS else v for k, v in own.items()}


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """Returns the config.json of the model in a file."""
    return _Config(header, find_family(header)).make()


class _Config:
    """Takes keys off the file until none is left."""

    def __init__(self, header: GgufHeader, family: Family) -> None:
        self.header, self.family, self.left = header, family, own_keys(header)
        self.keys = dict(self.left)

    def make(self) -> dict[str, Any]:
        family = self.family
        made: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.class_name], **family.fixed}
        for key in NEEDED:
            if type(self.keys.get(key)) is not int or self.keys[key] < 1:
                raise self.wrong(key, shown(self.keys.get(key)), "a positive whole number")
        layers = {name.split(".")[1] for name in self.header.tensors if name.startswith("blk.")}
        if self.keys["block_count"] > max(len(layers), 1):
            expected = f"at most {len(layers)}, the layers that have tensors"
            raise self.wrong("block_count", str(self.keys["block_count"]), expected)
        for key, name in {**KEYS, **self.family.keys}.items():
            if (value := self.number(key)) is not None:
                if key in _COUNTS and (type(value) is not int or value < 1):
                    raise self.wrong(key, shown(value), "a positive whole number")
                made[name] = _short(value)
        made.setdefault("head_dim", made["hidden_size"] // made["num_attention_heads"])
        if made["head_dim"] < 1:
            raise self.wrong("attention.head_count", str(made["num_attention_heads"]), f"at most {made['hidden_size']}")
        made.setdefault("num_key_value_heads", made["num_attention_heads"])
        if (width := self.take("attention.value_length")) not in (None, made["head_dim"]):
            raise self.wrong("attention.value_length", shown(width), f"{made['head_dim']}, as keys have")
        self.add_sizes(made)
        self.add_scales(made)
        self.add_window(made)
        made["rope_parameters"] = self.rope(made)
        made["dtype"] = self.dtype()
        self.add_tokens(made)
        self.check_left(made)
        return made

    def add_sizes(self, made: dict[str, Any]) -> None:
        """Adds what the tensors say: vocabulary, tied head, biases."""
        tensors = self.header.tensors
        if "token_embd.weight" not in tensors:
            raise CheckpointError(str(self.header.path), "no token_embd.weight", "a model's embedding", TODO)
        if len(shape := tensors["token_embd.weight"].shape) != 2:
            raise CheckpointError(f"{self.header.path} (token_embd.weight)", f"shape {list(shape)}", "a matrix", TODO)
        made["vocab_size"] = shape[0]
        made["tie_word_embeddings"] = "output.weight" not in tensors
        if self.family.model_type in ("llama", "granite", "smollm3"):
            made["attention_bias"] = "blk.0.attn_q.bias" in tensors
            made["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
        experts = {"moe_intermediate_size": "ffn_up_exps", "shared_expert_intermediate_size": "ffn_up_shexp"}
        for name, part in experts.items():
            tensor = tensors.get(f"blk.0.{part}.weight")
            if name in self.family.keys.values() and tensor is not None and len(tensor.shape) > 1:
                made.setdefault(name, tensor.shape[-2])
        if (stated := self.take("vocab_size")) not in (None, made["vocab_size"]):
            raise self.wrong("vocab_size", shown(stated), f"{made['vocab_size']}, the rows of token_embd.weight")

    def add_scales(self, made: dict[str, Any]) -> None:
        """Adds the scale of queries; llama.cpp knows the model with another one by its number of layers."""
        if self.family.big_layers:
            is_big = made["num_hidden_layers"] == self.family.big_layers
            made["query_pre_attn_scalar"] = (
                made["hidden_size"] // made["num_attention_heads"] if is_big else made["head_dim"]
            )
            made.setdefault("attn_logit_softcapping", None)
            made.setdefault("final_logit_softcapping", None)
        scale = made["head_dim"] ** -0.5
        if self.family.model_type == "granite":
            made["attention_multiplier"] = made.get("attention_multiplier") or scale
        elif (given := self.number("attention.scale")) and not math.isclose(given, scale, rel_tol=1e-6):
            raise self.wrong("attention.scale", shown(given), f"{scale}, of heads of {made['head_dim']}")

    def add_window(self, made: dict[str, Any]) -> None:
        num, pattern = made["num_hidden_layers"], self.family.window_pattern
        if not pattern:
            return
        given = self.take("attention.sliding_window_pattern")
        if isinstance(given, tuple) and len(given) == num:
            has_window = [bool(one) for one in given]
        else:
            if given is not None and (type(given) is not int or given < 1):
                raise self.wrong("attention.sliding_window_pattern", shown(given), f"a number, or {num} of them")
            has_window = [bool((layer + 1) % (given or pattern)) for layer in range(num)]
        if not made.get("sliding_window"):
            raise self.wrong("attention.sliding_window", shown(made.get("sliding_window")), "the size of the window")
        made["layer_types"] = ["sliding_attention" if one else "full_attention" for one in has_window]

    def rope(self, made: dict[str, Any]) -> dict[str, Any]:
        """Returns transformers' rotary parameters."""
        theta, head_dim = float(_short(self.number("rope.freq_base") or 10000.0)), made["head_dim"]
        found: dict[str, Any] = {"rope_theta": theta, **self.scaling(made)}
        rotated = self.number("rope.dimension_count") or head_dim
        if rotated != head_dim:
            if not self.family.is_partly_rotated:
                raise self.wrong("rope.dimension_count", shown(rotated), f"{head_dim}, the width of heads")
            found["partial_rotary_factor"] = rotated / head_dim
        local = self.number("rope.freq_base_swa")
        if self.family.model_type != "gemma3_text":
            if local not in (None, theta):
                raise self.wrong("rope.freq_base_swa", shown(local), f"{theta}, as in the other layers")
            return found
        sliding = {"rope_type": "default", "rope_theta": float(local or _LOCAL_THETA)}
        return {"full_attention": found, "sliding_attention": sliding}

    def scaling(self, made: dict[str, Any]) -> dict[str, Any]:
        kind, linear = self.take("rope.scaling.type"), self.number("rope.scale_linear")
        factor, original = self.number("rope.scaling.factor"), self.number("rope.scaling.original_context_length")
        attention = self.number("rope.scaling.attn_factor")
        betas = {name: self.number(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        factors = {name: self.factors(name) for name in ROPE_TENSORS if name in self.header.tensors}
        if factors:
            if kind not in (None, "none", "longrope"):
                raise self.wrong("rope.scaling.type", shown(kind), f"none beside {min(factors)}")
            return self.factored(made, factors, original, attention)
        if attention not in (None, 1.0) and kind != "longrope":
            raise self.wrong("rope.scaling.attn_factor", shown(attention), "1.0, or factors of frequencies beside it")
        if kind in (None, "none") and linear is None and factor in (None, 0.0, 1.0):
            return {"rope_type": "default"}
        if kind in (None, "linear"):
            return {"rope_type": "linear", "factor": float(factor or linear or 1.0)}
        if kind != "yarn" or not factor:
            raise self.wrong("rope.scaling.type", shown(kind), "none, linear or yarn with its factor")
        yarn = {"rope_type": "yarn", "factor": float(factor)} | {k: float(v) for k, v in betas.items() if v is not None}
        yarn["original_max_position_embeddings"] = original or made["max_position_embeddings"]
        return yarn | ({"truncate": False} if self.family.model_type == "gpt_oss" else {})

    def factored(
        self, made: dict[str, Any], factors: Mapping[str, list[float]], original: Any, attention: Any
    ) -> dict[str, Any]:
        """Returns longrope's parameters: frequencies divided by factors, those of Llama 3.1 as well."""
        if ROPE_FREQS in factors:
            short = long = factors[ROPE_FREQS]
            original, attention = made["max_position_embeddings"], attention or 1.0
        elif len(factors) == 2 and original:
            short, long = factors[SHORT], factors[LONG]
            made["original_max_position_embeddings"] = original
        else:
            got = f"{' and '.join(factors)}, original_context_length {shown(original)}"
            raise CheckpointError(str(self.header.path), got, f"{SHORT}, {LONG} and the original length", TODO)
        given = {} if attention is None else {"attention_factor": float(attention)}
        sizes = {"original_max_position_embeddings": original}
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **sizes, **given}

    def factors(self, name: str) -> list[float]:
        tensor = self.header.tensors[name]
        if BLOCKS[tensor.kind].dtype != "F32" or len(tensor.shape) != 1:
            got = f"{BLOCKS[tensor.kind].name} of shape {list(tensor.shape)}"
            raise CheckpointError(f"{self.header.path} ({name})", got, "a list of F32", TODO)
        held = np.memmap(tensor.file, "<f4", "r", tensor.start_bytes, tensor.shape)
        return [float(value) for value in held]

    def dtype(self) -> str:
        """Returns the plain type of the matrices, or the one that holds the scales of most grids."""
        kinds = Counter(BLOCKS[t.kind].dtype for t in self.header.tensors.values() if len(t.shape) > 1)
        return {"F32": "float32", "BF16": "bfloat16"}.get(kinds.most_common(1)[0][0], "float16")

    def add_tokens(self, made: dict[str, Any]) -> None:
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            field = f"tokenizer.ggml.{key}_token_id"
            token = self.header.fields.get(field)
            if token is not None and (type(token) is not int or token < 0):
                raise CheckpointError(f"{self.header.path} ({field})", shown(token), "a token id", TODO)
            made[f"{name}_token_id"] = token if token is not None and token < made["vocab_size"] else None

    def check_left(self, made: Mapping[str, Any]) -> None:
        """Refuses keys that are left, of the architecture or of something beside the model."""
        for key, expected in {**EXPECTED, **self.family.expected}.items():
            if (value := self.take(key)) is not None and value != expected:
                raise self.wrong(key, shown(value), shown(expected))
        prefix = f"{self.header.fields['general.architecture']}."
        for key, value in self.header.fields.items():
            name = key.removeprefix(prefix) if key.startswith(prefix) else key
            if (key.startswith(prefix) and name in self.left and name not in _CHECKED) or key.startswith(_NO_MODEL):
                raise CheckpointError(f"{self.header.path} ({key})", shown(value), "keys that are read", TODO)

    def take(self, key: str) -> Any:
        return self.left.pop(key, None)

    def number(self, key: str) -> Any:
        value = self.take(key)
        if value is not None and finite_number(value) is None:
            raise self.wrong(key, shown(value), "one number for all layers")
        return value

    def wrong(self, key: str, got: str, expected: str) -> CheckpointError:
        where = f"{self.header.path} ({self.header.fields['general.architecture']}.{key})"
        return CheckpointError(where, got, expected, TODO)


def _short(value: float) -> float:
    """Returns the shortest decimal of a float32, which is what the file was made of."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
