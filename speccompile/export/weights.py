# SPDX-License-Identifier: Apache-2.0
"""A transformers model in float32 with our attention in place: a checkpoint's weights, or random ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.utils import logging

from speccompile.checkpoints.checkpoint import list_raw, read_config, read_dims
from speccompile.checkpoints.config_values import RENAMED, extra_keys, is_other_part, is_tower
from speccompile.checkpoints.folders import find_gguf, origin_of
from speccompile.checkpoints.lora import LoraAdapter
from speccompile.checkpoints.model_config import read_model_config
from speccompile.checkpoints.packed_schemes import MXFP4, method_of
from speccompile.checkpoints.safetensors import wrapper_prefix
from speccompile.checkpoints.tensor_files import TensorFiles, open_files
from speccompile.errors import CheckpointError, ExportError
from speccompile.export.adapted_models import adapt_model, is_adapted, set_attention
from speccompile.export.attention import IMPLEMENTATION
from speccompile.export.lora import merge_lora

Weights = Literal["checkpoint", "random"]
RANDOM_SEED = 0
# What the classes of models raise for values of a config; an AssertionError is torch's.
_REFUSALS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
# Buffers of older checkpoints that are computed from the config.
_COMPUTED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")


def load_model(source: Path, weights: Weights, lora: LoraAdapter | None = None) -> Any:
    """Loads the model in evaluation mode, float32, on the CPU.

    Args:
        source: a checkpoint folder that `check_checkpoint` accepts, or for random weights one with a config.json.
        weights: "checkpoint" or "random" (with a fixed seed).

    Raises:
        CheckpointError: transformers finds a weight missing, left over or of another shape; see `merge_lora`.
        ExportError: transformers does not support the architecture or cannot replace its attention.
    """
    with _build_errors(source), no_progress_bar():
        config = read_model_config(source)
        adapted = is_adapted(config.model_type)
        config._attn_implementation = "eager" if adapted else IMPLEMENTATION
        # An architecture without transformers' registry of attentions may fail here.
        model = _random_model(config) if weights == "random" else _checkpoint_model(source, config)
        if lora is not None:
            merge_lora(model, lora)
        if adapted:
            adapt_model(model)
            set_attention(model, IMPLEMENTATION)
    set_experts(model, "batched_mm")  # the default grouped matmul has no ONNX form; the batched one has
    _freeze_rope(model)
    _keep_eps(model)
    return model.eval()


def check_model(source: Path) -> None:
    """Makes the model without memory for its weights, which shows what its own class makes of the config."""
    with _build_errors(source), torch.device("meta"):
        AutoModelForCausalLM.from_config(read_model_config(source), trust_remote_code=False)


@contextmanager
def _build_errors(source: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise CheckpointError(
            str(source), str(fault).strip().splitlines()[0], "files that can be read", "Check the folder."
        ) from fault
    except (*_REFUSALS, ImportError, RuntimeError) as fault:
        raise ExportError(
            str(source),
            _what_failed(fault),
            "a causal language model that transformers builds with replaceable attention",
            "Correct config.json, use another model, or a transformers version that knows this one.",
        ) from fault


def set_experts(model: Any, implementation: str) -> None:
    """Sets how experts are computed, where there are any: one of transformers' implementations."""
    if any(hasattr(module, "experts") for module in model.modules()):
        model.set_experts_implementation(implementation)


def _what_failed(fault: Exception) -> str:
    if isinstance(fault, KeyError) and fault.args == (IMPLEMENTATION,):  # has its own table of attentions
        return "attention that does not go through transformers' attention interface"
    return f"{type(fault).__name__}: {(str(fault).strip().splitlines() or ['no message'])[0]}"


def _keep_eps(model: Any) -> None:
    """Moves an eps of 1e-8 up by a thousandth: torch's tracer takes an addend of 1e-8 for 0, and divides by 0 then."""
    for module in model.modules():
        if getattr(module, "eps", None) == 1e-8:
            module.eps = 1.001e-8


def _freeze_rope(model: Any) -> None:
    for module in model.modules():
        held = getattr(module, "rope_type", None)
        if held == "longrope":
            module.rope_type = "longrope (short)"
        elif isinstance(held, dict):
            module.rope_type = {k: "longrope (short)" if v == "longrope" else v for k, v in held.items()}


def check_positions(model: Any, max_seq_len: int) -> None:
    """Refuses a cache with more rows than the model's learned positions. Raises ExportError: it has."""
    tokens = model.get_input_embeddings()
    for name, module in model.named_modules():
        is_by_layer = name.endswith("embed_tokens_per_layer")  # of tokens, too
        if isinstance(module, torch.nn.Embedding) and module is not tokens and not is_by_layer:
            num_positions = module.num_embeddings - int(getattr(module, "offset", 0))
            if num_positions < max_seq_len:
                raise ExportError(
                    f"{type(model).__name__}.{name}",
                    f"max_seq_len {max_seq_len}",
                    f"at most {num_positions}, the length of its table of positions",
                    "Lower engine.max_seq_len.",
                )


def names_by_address(model: Any) -> dict[int, str]:
    return {p.data_ptr(): name for name, p in model.named_parameters()}


def name_weights(graph: ir.Model, names: Mapping[int, str]) -> None:
    """Give initializers the names of the parameters whose memory they are (views transposed included)."""
    held = graph.graph.initializers
    for value in list(held.values()):
        tensor = value.const_value
        name = names.get(_address(tensor))
        if name is None or tensor is None or tensor.size <= 1 or value.name == name:
            continue
        while name in held:
            name = f"{name}.transposed"
        value.name = name


def share_weights(graph: ir.Model) -> int:
    """Merges initializers that are the same view of the same memory, as torch makes them; returns their number."""
    kept: dict[tuple[Any, ...], ir.Value] = {}
    before = len(graph.graph.initializers)
    for name, value in list(graph.graph.initializers.items()):
        tensor = value.const_value
        address = _address(tensor)
        if tensor is None or not address or value.is_graph_output():
            continue
        first = kept.setdefault((address, tuple(tensor.shape), _strides(tensor), tensor.dtype), value)
        if first is not value:
            value.replace_all_uses_with(first)
            del graph.graph.initializers[name]
    return before - len(graph.graph.initializers)


def _address(tensor: ir.TensorProtocol | None) -> int:
    raw = getattr(tensor, "raw", None)
    if isinstance(raw, torch.Tensor):
        return int(raw.data_ptr())
    return int(raw.ctypes.data) if isinstance(raw, np.ndarray) else 0


def _strides(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    raw = getattr(tensor, "raw", None)
    if isinstance(raw, torch.Tensor):
        return tuple(step * raw.element_size() for step in raw.stride())
    return raw.strides if isinstance(raw, np.ndarray) else ()


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disables transformers' own progress bar, which would interfere with the caller's."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _random_model(config: Any) -> Any:
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(RANDOM_SEED)
        model.init_weights()
    return model


def _checkpoint_model(source: Path, config: Any) -> Any:
    model, info = read_weights(source, config)
    left = set(info["unexpected_keys"])
    if is_tower(read_config(source)):
        left = {key for key in left if not is_other_part(key)}
    check_loading(source, {**info, "unexpected_keys": left - extra_keys(left, read_dims(source).num_layers)})
    _check_finite(source, model)
    return model


def read_weights(source: Path, config: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """Returns a model with the weights of a checkpoint, and transformers' loading info.

    Packed weights (whose mark is taken off `config`) and GGUF files are read by us, one tensor at a time.
    """
    whole = read_config(source)
    settings = {
        "config": config,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # see `check_loading`
    }
    is_ours = method_of(whole) not in (None, MXFP4) or find_gguf(source) is not None
    prefix = "" if is_ours else wrapper_prefix(list_raw(source))
    renamed = {**({f"^{re.escape(prefix)}": ""} if prefix else {}), **(RENAMED if is_tower(whole) else {})}
    if renamed:
        settings["key_mapping"] = renamed
    if not is_ours:
        folder = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
        if method_of(whole) == MXFP4:
            # Without `dequantize` transformers may keep the experts for kernels of its own.
            settings["quantization_config"] = Mxfp4Config(dequantize=True)
        model, info = AutoModelForCausalLM.from_pretrained(source, **folder, **settings)
        return model, info
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    files = open_files(source)
    model, info = kind.from_pretrained(None, state_dict={k: _Unread(files, k) for k in files.headers}, **settings)
    return model, info


def write_plain(source: Path, folder: Path) -> str:
    """Writes a checkpoint with the float32 weights that another one means; returns its model type."""
    with no_progress_bar():
        model = _checkpoint_model(source, read_model_config(source))
        model.save_pretrained(folder)
    return str(model.config.model_type)


@dataclass(frozen=True)
class _Unread:
    """A tensor that transformers reads when it comes to it, as it does the slices of safetensors."""

    files: TensorFiles
    key: str

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.files.tensor(self.key)[index]


def _check_finite(source: Path, model: Any) -> None:
    for name, weight in model.named_parameters():
        if weight.numel() and not all(bound.isfinite() for bound in torch.aminmax(weight.detach())):
            todo = "Training diverged or the file was damaged: take an earlier checkpoint."
            where = f"{origin_of(source)} ({name})"
            raise CheckpointError(where, "values that are NaN or infinite", "finite weights", todo)


def check_loading(source: Path, info: Mapping[str, Any]) -> None:
    """Refuse a model of which transformers did not find every weight in the checkpoint."""
    todo = "The weights do not belong to this config.json, or the download is incomplete: fetch the folder again."
    mismatched = sorted(str(m) for m in info.get("mismatched_keys", ()))
    missing = sorted(info.get("missing_keys", ()))
    unexpected = [k for k in sorted(info.get("unexpected_keys", ())) if not k.endswith(_COMPUTED)]
    for keys, got, expected in (
        (missing, "missing weights", "every weight of the architecture"),
        (mismatched, "weights of another shape", "the shapes that config.json implies"),
        (unexpected, "weights that the architecture does not have", "only weights that it uses"),
    ):
        if keys:
            some = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
            raise CheckpointError(str(origin_of(source)), f"{len(keys)} {got} ({some})", expected, todo)
