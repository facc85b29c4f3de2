# SPDX-License-Identifier: Apache-2.0
"""The module in torch, as its graph computes it and as it is trained.

h' = layer(fc(norm(embedding of the next token), norm(hidden state of this position))), and the target's LM head reads
norm(h'). The layer is transformers' class of the target's architecture. After DeepSeek-AI 2024, "DeepSeek-V3" (arXiv
2412.19437), section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from speccompile.checkpoints.config_values import plain_values
from speccompile.checkpoints.model_config import config_errors
from speccompile.checkpoints.target_tables import TargetTables
from speccompile.errors import ExportError
from speccompile.export import attention
from speccompile.export.adapted_models import adapt_model, is_adapted
from speccompile.export.draft_vocab import cut_linear
from speccompile.export.feature_draft import FeatureBody, fill_weights
from speccompile.export.heads_file import check_tensors
from speccompile.export.layer_changes import replace_layers
from speccompile.graph_kinds.features import FeatureDims
from speccompile.speculators.mtp.block_rows import FAMILY
from speccompile.speculators.mtp.layer_rows import EMBEDDINGS, LM_HEAD

_LAYER = "layer_config"


class MtpModule(nn.Module):
    """The module without embeddings and LM head, by the names of the `mtp.*` layout, with a registered attention."""

    def __init__(self, config: Mapping[str, Any], implementation: str) -> None:
        super().__init__()
        base = layer_model(config[_LAYER], implementation)
        made, norm_of = base.config, norm_class(base)
        self.is_hidden_first, self.is_raw = config["concat"] == "hidden_first", config["chaining"] == "raw"
        rotary = getattr(base, "rotary_emb", None)
        self.layer_config, self.rotary_class = made, None if rotary is None else type(rotary)
        norm, width = norm_of, made.hidden_size
        eps = made.layer_norm_epsilon if rotary is None else made.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(width, eps=eps), norm(width, eps=eps)
        self.layers = base.layers
        self.norm = norm(width, eps=eps)
        # A norm that multiplies by 1 + weight begins with weights of zero.
        with torch.device("cpu"):
            self.class_offset = 1.0 - float(norm(1, eps=eps).weight.detach())

    def make_rotary(self) -> nn.Module:
        return _NoRotary() if self.rotary_class is None else self.rotary_class(self.layer_config)

    def read(self, embedded: torch.Tensor, hidden: torch.Tensor, angles: Any) -> torch.Tensor:
        """Returns what the next draft of a chain reads as `hidden`.

        Args:
            embedded: [batch, nodes, hidden], of the tokens after the hidden states.
            hidden: [batch, nodes, hidden], the target's states, or own ones of the draft before.
            angles: cosines and sines of the hidden states' positions.
        """
        parts = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        x = self.fc(torch.cat(parts[::-1] if self.is_hidden_first else parts, -1))
        given = {} if angles is None else {"position_embeddings": angles}
        for layer in self.layers:
            out = layer(x, attention_mask=None, **given)
            x = out[0] if isinstance(out, tuple) else out
        own: torch.Tensor = x
        return own if self.is_raw else self.norm(own)

    def finish(self, own: torch.Tensor) -> torch.Tensor:
        return self.norm(own) if self.is_raw else own


class MtpBody(FeatureBody):
    """The module with embeddings and LM head."""

    target_tokens: torch.Tensor | None = None

    def __init__(self, config: Mapping[str, Any], dims: FeatureDims) -> None:
        module = MtpModule(config, attention.IMPLEMENTATION)
        super().__init__(module.layer_config)
        self.module = module
        self.embed_tokens = nn.Embedding(dims.vocab_size, dims.hidden_size)
        self.lm_head = nn.Linear(dims.hidden_size, dims.vocab_size, bias=False)

    def keep_tokens(self, tokens: Sequence[int]) -> None:
        self.target_tokens = torch.tensor(tokens)
        self.lm_head = cut_linear(self.lm_head, self.target_tokens)

    def make_rotary(self) -> nn.Module:
        rotary = self.module.make_rotary()
        replace_layers(rotary)  # positions of text are the same on all axes, so that the angles become tables
        return rotary

    def advance(self, tokens: torch.Tensor, features: torch.Tensor, angles: Any) -> torch.Tensor:
        return self.module.read(self.embed_tokens(tokens), features, angles)

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.module.finish(own))


class _NoRotary(nn.Module):
    """Stands for the rotary embedding of layers that do not rotate."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> None: ...


def norm_class(base: Any) -> type[nn.Module]:
    return type(base.norm_f if hasattr(base, "norm_f") else base.norm)


def layer_model(layer: Mapping[str, Any], implementation: str) -> Any:
    """Returns transformers' decoder of one layer, of which only that layer and the classes are of use."""
    family = str(layer.get("model_type"))
    try:
        with config_errors("config.json", layer):
            made = AutoConfig.for_model(**{**plain_values(layer), "model_type": family})
        made._attn_implementation = implementation
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, trust_remote_code=False)
        base = model.get_decoder()
        if any(hasattr(m, "experts") for m in model.modules()):
            # The default grouped matmul has no ONNX form; the batched one has.
            model.set_experts_implementation("batched_mm")
        if implementation == attention.IMPLEMENTATION and is_adapted(family):
            adapt_model(model)
        is_of_blocks = family == FAMILY and len(base.layers) == 2
        if is_of_blocks or (len(base.layers) == 1 and base.rotary_emb is not None and base.norm is not None):
            return base
        got = "no decoder of one layer with rotary positions and a norm"
    except (TypeError, ValueError, KeyError, AttributeError) as fault:
        got = f"{type(fault).__name__}: {(str(fault).strip().splitlines() or ['no message'])[0]}"
    todo = "Modules of this architecture cannot be exported."
    raise ExportError(f"a layer of {family}", got, "an architecture that transformers builds", todo)


def make_body(
    where: str,
    config: Mapping[str, Any],
    dims: FeatureDims,
    weights: Mapping[str, torch.Tensor] | None,
    tables: TargetTables | None,
) -> MtpBody:
    """Returns the module with its weights, by canonical names, None: random; `tables` where it stores none."""
    attention.register()
    with torch.device("meta"):
        body = MtpBody(config, dims)
    shared = {} if tables is None else {EMBEDDINGS: tables.embeddings, LM_HEAD: tables.lm_head}
    if weights is None:
        fill_weights(body, None, shared)
        _zero_buffers(body)
        return body.eval()
    own = fitted_weights(where, body.module, config, weights)
    tables_and_head = {**shared, **{name: weights[name] for name in (EMBEDDINGS, LM_HEAD) if name in weights}}
    fill_weights(body, {f"module.{name}": tensor for name, tensor in own.items()}, tables_and_head)
    for name, buffer in body.module.named_buffers():
        buffer.copy_(own[name])
    return body.eval()


def _zero_buffers(body: nn.Module) -> None:
    for buffer in body.buffers():
        buffer.zero_()


def fitted_weights(
    where: str, module: MtpModule, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the weights of a module in float32, those of norms as its classes read them; by canonical names."""
    stored = {name: tensor for name, tensor in weights.items() if name not in (EMBEDDINGS, LM_HEAD)}
    todo = "Config and weights are of different models: fetch the folder again, or correct config.json."
    expected = f"the weights of a layer of {config[_LAYER].get('model_type')}"
    check_tensors(where, module.state_dict(), stored, expected, todo)
    shift = stored_offset(config) - module.class_offset
    return {n: t.float() + shift if shift and is_norm(n) else t.float() for n, t in stored.items()}


def stored_offset(config: Mapping[str, Any]) -> float:
    return 1.0 if config["norms"] == "1+w" else 0.0


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight") or name.startswith("pre_fc_norm")
