# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a transformers checkpoint: transformers and the package `gguf` read it, every block type they know.

transformers passes over keys and tensors that it does not know, and fills weights that are missing with random ones:
here every one is compared with the config that transformers makes, or refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speccompile.checkpoints.gguf_header import GgufHeader, read_gguf_header
from speccompile.checkpoints.model_config import config_errors
from speccompile.common.extras import install_command
from speccompile.errors import CheckpointError

_TOKENS = "tokenizer.ggml.tokens"
_TODO = "Use the transformers checkpoint that the file was made of."
# Keys that describe the file, and those of sizes that the tensors' shapes show, which are compared.
_DESCRIPTIONS = ("GGUF.", "general.", "tokenizer.", "quantize.", "split.", "mradermacher.")
_SIZES = (
    "context_length", "block_count", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "expert_count", "expert_feed_forward_length", "expert_shared_feed_forward_length", "rope.scaling.finetuned",
)  # fmt: skip
# The config's names for the keys that no shape shows.
_SAME = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("global_head_dim", "d_kv", "head_dim"),
    "attention.value_length": ("global_head_dim", "d_kv", "head_dim"),
    "attention.key_length_swa": ("head_dim",),
    "attention.value_length_swa": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_used_count": ("num_experts_per_tok",),
    "rope.freq_base": ("rope_theta",),
    "rope.dimension_count": ("rotary_dim",),
    "rope.scaling.original_context_length": ("max_position_embeddings",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.state_size": ("state_size",),
    "ssm.time_step_rank": ("time_step_rank",),
    "ssm.inner_size": ("intermediate_size",),
    "shortconv.l_cache": ("conv_L_cache",),
}
_NONE = {"rope.scaling.type": "none", "attention.causal": True}


def write_checkpoint(source: Path, folder: Path) -> dict[str, Any]:
    """Writes config, weights (float32, as the blocks mean them) and tokenizer of a GGUF file.

    Args:
        source: the file; of a model in several files, the first is not enough.
        folder: exists, and is empty.

    Returns:
        {"model_type": of the config, "block_types": {name: number of tensors}, "has_tokenizer"}.

    Raises:
        CheckpointError: no such file, no GGUF file, an architecture or a block type that transformers does not read;
            a key or tensor that it would not use, or one that it needs and the file does not have.
    """
    header = read_gguf_header(source)
    if not header.tensors:
        raise CheckpointError(str(source), "no tensors", "the weights of a model", "Give the file with the weights.")
    has_tokenizer = _TOKENS in header.fields
    try:
        from gguf import GGMLQuantizationType
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from speccompile.export.weights import check_loading, no_progress_bar

        counts = Counter(GGMLQuantizationType(kind).name for kind in header.tensors.values())
        where = {"gguf_file": source.name, "local_files_only": True, "trust_remote_code": False}
        with no_progress_bar():
            with config_errors(str(source), header.fields):
                config = AutoConfig.from_pretrained(source.parent, **where)
            _check_keys(str(source), header, config)
            _check_tensors(str(source), header, config)
            model, info = AutoModelForCausalLM.from_pretrained(
                source.parent, dtype="float32", output_loading_info=True, ignore_mismatched_sizes=True, **where
            )
        check_loading(source, info, "the keys of the file", _TODO)
        if has_tokenizer:
            AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(folder)
    except ImportError as fault:
        raise CheckpointError(
            str(source), str(fault), "the package gguf", f"Run: {install_command('build')}."
        ) from fault
    except (ValueError, KeyError, IndexError, OSError, NotImplementedError, RuntimeError) as fault:
        got = f"{type(fault).__name__}: {(str(fault).strip().splitlines() or ['no message'])[0]}"
        raise CheckpointError(str(source), got, "a GGUF file that transformers reads", _TODO) from fault
    _plain(model).save_pretrained(folder)
    return {
        "model_type": model.config.model_type,
        "block_types": dict(sorted(counts.items())),
        "has_tokenizer": has_tokenizer,
    }


def _check_keys(where: str, header: GgufHeader, config: Any) -> None:
    """Refuses a key that says something else than the config that transformers made of the file."""
    prefix = f"{header.fields.get('general.architecture')}."
    made = dict(_values(config))
    for key, value in header.fields.items():
        name = key.removeprefix(prefix)
        if key.startswith(_DESCRIPTIONS) or (key.startswith(prefix) and name in _SIZES):
            continue
        known = (_NONE[name],) if name in _NONE else [made[n] for n in _SAME.get(name, ()) if n in made][:1]
        if not key.startswith(prefix) or not any(_is_same(value, other) for other in known):
            expected = f"{known[0]}, as transformers reads this file" if known else "keys that transformers reads"
            raise CheckpointError(f"{where} ({key})", str(value)[:80], expected, _TODO)
    stated = f"{prefix}attention.sliding_window" in header.fields
    if not stated and made.get("sliding_window") and made.get("use_sliding_window", True):
        got = f"none, which means full attention, where transformers takes {made['sliding_window']}"
        raise CheckpointError(f"{where} ({prefix}attention.sliding_window)", got, "the window", _TODO)
    if made.get("query_pre_attn_scalar", made["head_dim"]) != made["head_dim"]:
        # No key holds it: llama.cpp takes it from the heads' width, or knows the largest model by its layers.
        got = f"heads of {made['head_dim']} numbers, where transformers scales by {made['query_pre_attn_scalar']}"
        raise CheckpointError(f"{where} (the scale of queries)", got, "the same of both", _TODO)


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values of a config, those of its rotary embedding and the width of heads where it is not stated."""
    held = config.to_dict()
    heads = getattr(config, "num_attention_heads", None)
    head_dim = held.get("head_dim") or (config.hidden_size // heads if heads else None)
    yield "rotary_dim", head_dim
    rope = held.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # the file has the base of these layers alone
    yield "rope_theta", rope.get("rope_theta")
    yield "rotary_dim", (head_dim or 0) * rope.get("partial_rotary_factor", 1)
    for name in ("num_attention_heads", "hidden_size", "max_position_embeddings"):
        yield name, getattr(config, name, None)
    yield from ((name, value) for name, value in held.items() if value is not None)
    yield "head_dim", head_dim


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, bool | str) or isinstance(other, bool | str | list | None):
        return bool(value == other)
    return math.isclose(value, other, rel_tol=1e-6)  # the file has float32


def _check_tensors(where: str, header: GgufHeader, config: Any) -> None:
    """Refuses a tensor that transformers would pass over."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    kind = TENSOR_PROCESSORS.get(header.fields["general.architecture"], TensorProcessor)
    known = get_gguf_hf_weights_map(model, kind(config=config.to_dict()))
    if unknown := sorted(name for name in header.tensors if name not in known):
        some = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
        got = f"{len(unknown)} tensors that the model of transformers does not have ({some})"
        raise CheckpointError(where, got, "only tensors that it uses", _TODO)


def _plain(model: Any) -> Any:
    """Returns the same model without the mark of its quantisation, with which it could not be saved."""
    import torch

    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain
