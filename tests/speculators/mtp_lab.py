# SPDX-License-Identifier: Apache-2.0
"""Tiny targets with multi-token prediction modules in every layout, and transformers' own module as the oracle."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from speccompile.speculators.mtp.checkpoint import config_of_layer
from speccompile.speculators.mtp.model import MtpModule
from tests.pipeline import fakes
from tests.speculators.eagle_lab import HIDDEN, VOCAB, fitted, texts_of

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True, "num_hidden_layers": 2},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "decoder_sparse_step": 2},
    "glm4_moe": {  # a dense layer, one of experts
        **EXPERTS,
        "n_routed_experts": 4,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_hidden_layers": 2,
    },
    "deepseek_v3": {
        **EXPERTS,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "head_dim": 4,
    },
    "glm4_moe_lite": {
        **EXPERTS,
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "head_dim": 4,
    },
    "nemotron_h": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        "mtp_layers_block_type": ["full_attention", "moe"],
        "num_nextn_predict_layers": 1,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 12,
    },
    "qwen3_5_text": {**LINEAR, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {
        **EXPERTS,
        **LINEAR,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
Tensors = dict[str, torch.Tensor]


def write_target(folder: Path, family: str, seed: int = 3, **fields: Any) -> Path:
    """Writes a target of two or three layers with random weights, every part of which affects its output."""
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **fields})
    model = AutoModelForCausalLM.from_config(config)
    draw(model, seed)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    return folder


def draw(model: nn.Module, seed: int) -> None:
    """Fills all weights with random numbers; vectors scatter around their initial values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if not weight.is_floating_point() or "inv_freq" in name:
                continue
            scale = 1.0 if "embed" in name else 0.35 if weight.dim() > 1 else 0.2
            drawn = torch.randn(weight.shape, generator=generator) * scale
            weight.copy_(drawn if weight.dim() > 1 else weight + drawn)


def random_module(target: Path, seed: int = 7, **fields: Any) -> tuple[dict[str, Any], MtpModule]:
    """Returns our config and a module for a target; fields replace those of the config."""
    config = {**config_of_layer(json.loads((target / "config.json").read_text())), **fields}
    module = MtpModule(config, "sdpa")
    module.to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in [*module.named_parameters(), *module.named_buffers()]:
            weight.fill_(1 - module.class_offset if name.endswith("weight") and weight.dim() == 1 else 0)
    draw(module, seed)
    return config, module.eval()


def single_experts(tensors: Tensors) -> Tensors:
    """Returns the weights with experts one by one, as released files have them."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                made |= {f"{stem}{i}.gate_proj.weight": gate, f"{stem}{i}.up_proj.weight": up}
        elif name.endswith(("experts.down_proj", "experts.up_proj")):
            stem, _, part = name.rpartition(".")
            made |= {f"{stem}.{i}.{part}.weight": one for i, one in enumerate(tensor)}
        else:
            made[name] = tensor
    return made


def weights_of(module: MtpModule) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def save(folder: Path, tensors: Tensors) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def write_alone(folder: Path, config: dict[str, Any], module: MtpModule) -> Path:
    """Writes our own layout, in float32."""
    folder.mkdir()
    save(folder, {f"mtp.{name}": tensor for name, tensor in weights_of(module).items()})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_speculators(folder: Path, target: Path, module: MtpModule) -> Path:
    """Writes vLLM's speculators format."""
    names = {
        "fc.": "input_proj.", "pre_fc_norm_embedding.": "token_layernorm.", "pre_fc_norm_hidden.": "hidden_layernorm.",
        "norm.": "final_layernorm.", "layers.0.": "",
    }  # fmt: skip
    folder.mkdir()
    held = {}
    for name, tensor in weights_of(module).items():
        first = next(n for n in names if name.startswith(n))
        held[f"mtp_layers.0.{names[first]}{name.removeprefix(first)}"] = tensor
    save(folder, held)
    layer = json.loads((target / "config.json").read_text())
    config = {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "mtp", "verifier": {"name_or_path": str(target)}},
        "transformer_layer_config": layer, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_to_target(folder: Path, module: MtpModule, *, numbered: bool = False) -> Path:
    """Adds a module to a target's own files: beside the model, or as a further layer."""
    held, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    own = single_experts(weights_of(module))
    if numbered:
        names = {
            "fc.weight": "eh_proj.weight", "pre_fc_norm_embedding.weight": "enorm.weight",
            "pre_fc_norm_hidden.weight": "hnorm.weight", "norm.weight": "shared_head.norm.weight",
        }  # fmt: skip
        stem = f"model.layers.{config['num_hidden_layers']}."
        held |= {stem + names.get(n, n.removeprefix("layers.0.")): t for n, t in own.items()}
        held[f"{stem}embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
        held[f"{stem}shared_head.head.weight"] = held["lm_head.weight"].clone()
        config["num_nextn_predict_layers"] = 1
    elif config["model_type"] == "nemotron_h":
        names = {
            "fc.weight": "layers.0.eh_proj.weight", "pre_fc_norm_embedding.weight": "layers.0.enorm.weight",
            "pre_fc_norm_hidden.weight": "layers.0.hnorm.weight", "norm.weight": "layers.1.final_layernorm.weight",
        }  # fmt: skip
        held |= {f"mtp.{names.get(name, name)}": tensor for name, tensor in own.items()}
    else:
        held |= {f"mtp.{name}": tensor for name, tensor in own.items()}
        config["mtp_num_hidden_layers"] = 1
    save(folder, held)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Oracle:
    """transformers' target and module, which drafts one token after the other for one text.

    Args:
        target: folder of the model.
        module: whose weights are copied; None: those in the target's files, read by transformers.
        sizes: of the module's layer where they are not the target's.
    """

    def __init__(self, target: Path, module: MtpModule | None = None, **sizes: int) -> None:
        plain = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, **plain).eval()
        config = self.model.config
        config.num_mtp_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.mtp_layer_types = ["full_attention"]
        if getattr(config, "mlp_layer_types", None) is not None:
            config.mtp_mlp_layer_types = ["sparse"]
        if module is None:
            # Which layer is a module is told by these patterns; GLM's are those of its released sizes.
            if config.model_type == "glm4_moe":
                self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}.*"]
            self.own: Any = MtpModel.from_pretrained(self.model).eval()
        else:
            # Models that are mixtures in some layers alone: modules are mixtures.
            if hasattr(config, "decoder_sparse_step"):
                config.decoder_sparse_step = 1
            before = {name: getattr(config, name) for name in sizes}
            for name, value in sizes.items():
                setattr(config, name, value)
            self.own = MtpModel(self.model, 1).eval()
            for name, value in before.items():
                setattr(config, name, value)
            names = {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm."}
            names |= {"norm.": "post_norm.", "layers.0.": "mtp_block."}
            own = {}
            for name, tensor in weights_of(module).items():
                first = next(n for n in names if name.startswith(n))
                own[f"layers.0.{names[first]}{name.removeprefix(first)}"] = tensor
            missing = self.own.load_state_dict(own, strict=False)
            assert not missing.unexpected_keys, missing
            assert not [k for k in missing.missing_keys if k.startswith("layers")], missing

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Returns what the target's LM head reads: [1, tokens, hidden]."""
        with torch.no_grad():
            states: torch.Tensor = self.model.get_decoder()(input_ids=torch.tensor([tokens])).last_hidden_state
        return states

    def begin(self) -> MtpCache:
        return MtpCache(config=self.model.config.get_mtp_config())

    def read(self, tokens: list[int], hidden: torch.Tensor, cache: MtpCache, start: int) -> torch.Tensor:
        """Returns own states of tokens after hidden states, whose positions begin at `start`."""
        positions = torch.arange(start + 1, start + 1 + len(tokens))[None]
        with torch.no_grad():
            return self.own.forward_layer(0, hidden, positions, cache, input_ids=torch.tensor([tokens]))

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model.lm_head(own)

    def drafts(self, text: list[int], num: int) -> list[int]:
        """Returns the drafts after a text, whose last token is the root."""
        cache, found = self.begin(), []
        own = self.read(text[1:], self.hidden(text[:-1]), cache, 0)[:, -1:]
        for step in range(num):
            found.append(int(self.logits(own).argmax()))
            if step + 1 < num:
                own = self.read(found[-1:], own, cache, len(text) - 1 + step)
        return found

    def best_after(self, text: list[int], path: list[int], num: int) -> list[int]:
        """Returns the best tokens after a path of drafts, which follows a text whose last token is the root."""
        cache = self.begin()
        own = self.read(text[1:], self.hidden(text[:-1]), cache, 0)[:, -1:]
        for step, token in enumerate(path):
            own = self.read([token], own, cache, len(text) - 1 + step)
        best: list[int] = self.logits(own)[0, -1].topk(num).indices.tolist()
        return best


@torch.no_grad()
def write_learnt(folder: Path, target: Path) -> Path:
    """Writes a module fitted to a Llama target's texts: its last projection is the best for the next hidden state."""
    config, module = random_module(target)
    # Norms whose weights are the target's own, and a wide layer: the more features, the better the fit.
    config["layer_config"]["intermediate_size"] = 224
    wide, rotary = MtpModule(config, "sdpa"), module.make_rotary()
    wide.to_empty(device="cpu")
    for weight in wide.parameters():
        weight.fill_(1) if weight.dim() == 1 else weight.zero_()
    draw_matrices(wide)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    wide.norm.weight.copy_(model.model.norm.weight)
    texts, states = texts_of(target)
    down, inputs, wanted = wide.layers[0].mlp.down_proj, [], []
    for text, seen in zip(texts, states, strict=True):
        kept: dict[str, torch.Tensor] = {}
        hooks = (
            down.register_forward_hook(lambda m, args, out, kept=kept: kept.update(inner=args[0], out=out)),
            wide.layers[0].register_forward_hook(lambda m, args, out, kept=kept: kept.update(layer=out)),
        )
        angles = rotary(seen[-1], torch.arange(text.shape[1] - 1)[None])
        wide.read(model.model.embed_tokens(text[:, 1:]), seen[-1][:, :-1], angles)
        for hook in hooks:
            hook.remove()
        inputs.append(kept["inner"][0])
        wanted.append((seen[-1][:, 1:] / wide.norm.weight - (kept["layer"] - kept["out"]))[0])
    down.weight.copy_(fitted(inputs, wanted, 0.03))
    return write_alone(folder, config, wide)


def draw_matrices(module: nn.Module) -> None:
    """Fills matrices alone with random numbers."""
    generator = torch.Generator().manual_seed(5)
    for weight in module.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.3, generator=generator)
