# SPDX-License-Identifier: Apache-2.0
"""Speculators in every public layout, with real names and shapes at tiny sizes, and their target.

The names are written out here, independent of the tables under test.
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.checkpoints.dflash_files import (
    dflash_one,
    dflash_speculators,
    dflash_two,
    domino,
    domino_first,
    dspark,
    lilicorr,
    lilicorr_as_wide,
)
from tests.checkpoints.gemma4_files import gemma4_assistant
from tests.checkpoints.lab_files import (  # noqa: F401
    DRAFT_VOCAB,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    LLAMA,
    SMALL,
    VOCAB,
    Tensors,
    draw,
    edit,
    layer_shapes,
    save,
    set_config,
    write_tables,
    write_target,
)
from tests.checkpoints.mask_files import pard, peagle_numbered, peagle_ours, peagle_qwen, peagle_speculators
from tests.checkpoints.mtp_files import mtp_glm, mtp_ours, mtp_qwen, mtp_speculators
from tests.checkpoints.vllm_files import VLLM_LAYOUTS


def medusa_tensors(num_heads: int = 3, num_layers: int = 1) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(num_heads):
        for j in range(num_layers):
            shapes |= {f"{i}.{j}.linear.weight": (HIDDEN, HIDDEN), f"{i}.{j}.linear.bias": (HIDDEN,)}
        shapes[f"{i}.{num_layers}.weight"] = (VOCAB, HIDDEN)
    return draw(shapes)


MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "someone/model"}


def medusa_ours(folder: Path) -> Path:
    return save(folder, MEDUSA, medusa_tensors())


def medusa_release(folder: Path) -> Path:
    return save(folder, MEDUSA, medusa_tensors(), "medusa_lm_head.safetensors")


def medusa_pickle(folder: Path) -> Path:
    return save(folder, MEDUSA, medusa_tensors(), "medusa_lm_head.pt")


def medusa_hf(folder: Path) -> Path:
    base = draw({"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN)})
    heads = {f"medusa_head.{k}": t for k, t in medusa_tensors().items()}
    return save(folder, {**LLAMA, **MEDUSA}, {**base, **heads})


def medusa_modelopt(folder: Path) -> Path:
    return save(folder, {**LLAMA, **MEDUSA}, {f"medusa_heads.{k}": t for k, t in medusa_tensors().items()})


def medusa_vllm(folder: Path) -> Path:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        shapes |= {f"blocks.{i}.layers.0.weight": (HIDDEN, HIDDEN), f"lm_heads.{i}.weight": (VOCAB, HIDDEN)}
    config = {
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": 3,
        "num_hidden_layers": 1,
    }
    return save(folder, config, draw(shapes))


def mlp_shapes(hidden: int, inner: int, vocab: int, num: int, *, first_only: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(num):
        if i == 0 or not first_only:
            shapes |= {f"speculator.emb.{i}.weight": (vocab, inner), f"speculator.head.{i}.weight": (vocab, inner)}
            shapes |= {f"speculator.ln.{i}.weight": (inner,), f"speculator.ln.{i}.bias": (inner,)}
        if i < 2 or not first_only:
            shapes[f"speculator.proj.{i}.weight"] = (inner, hidden if i == 0 else inner)
    return shapes


def mlp_config(hidden: int, inner: int, vocab: int, num: int, tie: bool = False, scale: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": hidden,
        "inner_dim": inner, "n_predict": num, "vocab_size": vocab, "tie_weights": tie, "scale_input": scale,
        "n_candidates": 5, "top_k_tokens_per_head": [max(3 - i, 1) for i in range(num)],
    }  # fmt: skip


def early_exit_ours(folder: Path) -> Path:
    rows = {"adapter_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,), "adapter.down_proj.weight": (HIDDEN, INNER)}
    rows |= {f"adapter.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "intermediate_size": INNER, "num_exit_layers": 1}
    return save(folder, {"model_type": "early_exit", **sizes}, draw(rows))


def mlp_plain(folder: Path) -> Path:
    shapes = mlp_shapes(HIDDEN, INNER, VOCAB, 3, first_only=False)
    return save(folder, mlp_config(HIDDEN, INNER, VOCAB, 3), draw(shapes))


def mlp_tied(folder: Path) -> Path:
    """Scaled, every copy stored."""
    tensors = draw(mlp_shapes(HIDDEN, INNER, VOCAB, 3, first_only=False))
    for i in (1, 2):
        for kind in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            tensors[f"speculator.{kind.format(i)}"] = tensors[f"speculator.{kind.format(0)}"]
    tensors["speculator.proj.2.weight"] = tensors["speculator.proj.1.weight"]
    return save(folder, mlp_config(HIDDEN, INNER, VOCAB, 3, tie=True, scale=True), tensors)


def mlp_first_copies(folder: Path) -> Path:
    tensors = draw(mlp_shapes(HIDDEN, INNER, VOCAB, 3, first_only=True))
    return save(folder, mlp_config(HIDDEN, INNER, VOCAB, 3, tie=True), tensors)


def mlp_tied_by_its_old_name(folder: Path) -> Path:
    """As IBM's own classes write it."""
    set_config(mlp_tied(folder), tie_weights=None, tie_wts=True)
    return folder


def mlp_square(folder: Path) -> Path:
    """As wide as its target, which inner_dim 0 says; keys without prefix."""
    tensors = draw(mlp_shapes(HIDDEN, HIDDEN, VOCAB, 2, first_only=False))
    bare = {key.removeprefix("speculator."): t for key, t in tensors.items()}
    return save(folder, mlp_config(HIDDEN, 0, VOCAB, 2), bare)


def eagle_ours(folder: Path, num_layers: int = 1) -> Path:
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN)}
    shapes["fc.bias"] = (HIDDEN,)
    for i in range(num_layers):
        shapes |= layer_shapes(f"layers.{i}", HIDDEN, HIDDEN, norm=i > 0)
    return save(folder, {**LLAMA, "num_hidden_layers": num_layers, "bias": True}, draw(shapes))


def eagle_pickle(folder: Path) -> Path:
    eagle_ours(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


KEPT = [0, 1, 2, 3, 5, 8, 9, 13, 21, 30, 34, 39]  # the target's tokens that EAGLE-3 drafts


def eagle3_tensors(layer: str = "midlayer", *, reduced: bool = True, embedding: bool = False) -> Tensors:
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        **layer_shapes(layer, HIDDEN, 2 * HIDDEN),
        f"{layer}.hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB if reduced else VOCAB, HIDDEN),
        **({"embed_tokens.weight": (VOCAB, HIDDEN)} if embedding else {}),
    }
    tensors = draw(shapes)
    if reduced:
        kept = torch.tensor(KEPT)
        tensors["d2t"] = kept - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, True)
    return tensors


EAGLE3 = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}


def eagle3_ours(folder: Path) -> Path:
    return save(folder, EAGLE3, eagle3_tensors(embedding=True))


def eagle3_specforge(folder: Path) -> Path:
    """No embedding, which is the target's; the layers whose states are fused are named."""
    config = {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}}
    return save(folder, config, eagle3_tensors())


def eagle3_whole(folder: Path) -> Path:
    return save(folder, {**EAGLE3, "draft_vocab_size": VOCAB}, eagle3_tensors(reduced=False, embedding=True))


def eagle3_numbered(folder: Path) -> Path:
    return save(folder, EAGLE3, eagle3_tensors("layers.0"))


def eagle3_deepspec(folder: Path) -> Path:
    """DeepSpec's: five layers by their outputs, norms of queries and keys, and the whole vocabulary unsaid."""
    held = eagle3_tensors("layers.0", reduced=False, embedding=True)
    more = {"fc.weight": (HIDDEN, 5 * HIDDEN), **{f"layers.0.self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"}}
    config = {
        **LLAMA, "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "num_hidden_layers": 1,
        "target_layer_ids": [0, 1, 2, 3, 4], "num_target_layers": LAYERS, "draft_num_hidden_layers": 1,
        "layer_types": ["full_attention"], "ttt_length": 7, "step_loss_decay": 0.9, "use_cache": None,
        "target_model_name_or_path": "someone/model", "sliding_window": None, "use_sliding_window": False,
    }  # fmt: skip
    return save(folder, config, {**held, **draw(more)})


def eagle3_normed(folder: Path) -> Path:
    """Norms before the fusion: one over all states, and one for each."""
    norms = {"input_norm.weight": (3 * HIDDEN,), **{f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}}
    return save(folder, {**EAGLE3, "norm_before_fc": True}, {**eagle3_tensors(), **draw(norms)})


def eagle3_vicuna(folder: Path) -> Path:
    """With the target's number of layers, as a first release has it."""
    return save(folder, {**EAGLE3, "num_hidden_layers": LAYERS}, eagle3_tensors())


def eagle3_wrapped(folder: Path) -> Path:
    """A model inside another one, whose LM head and maps have no prefix; numbers that other readers need."""
    held = eagle3_tensors("layers.0", embedding=True)
    outside = ("lm_head.weight", "d2t", "t2d")
    config = {**EAGLE3, "num_aux_hidden_states": 3, "eagle_aux_hidden_state_layer_ids": []}
    return save(folder, config, {k if k in outside else f"model.{k}": tensor for k, tensor in held.items()})


def eagle3_low_rank(folder: Path) -> Path:
    """An LM head of two products."""
    head = {"lm_head_down.weight": (4, HIDDEN), "lm_head.weight": (DRAFT_VOCAB, 4)}
    return save(folder, {**EAGLE3, "head_rank": 4}, {**eagle3_tensors(), **draw(head)})


def eagle3_windowed(folder: Path) -> Path:
    """A layer whose attention has a window."""
    return save(folder, {**EAGLE3, "layer_types": ["sliding_attention"], "sliding_window": 8}, eagle3_tensors())


def eagle3_narrow(folder: Path) -> Path:
    """Half as wide as its target, so with embeddings of its own."""
    shapes = {
        "fc.weight": (SMALL, 3 * HIDDEN),
        **layer_shapes("midlayer", SMALL, 2 * SMALL),
        "midlayer.hidden_norm.weight": (SMALL,),
        "norm.weight": (SMALL,),
        "lm_head.weight": (VOCAB, SMALL),
        "embed_tokens.weight": (VOCAB, SMALL),
    }
    config = {**EAGLE3, "hidden_size": SMALL, "target_hidden_size": HIDDEN, "draft_vocab_size": VOCAB}
    return save(folder, config, draw(shapes))


def eagle3_speculators(folder: Path) -> Path:
    layer = {k: v for k, v in LLAMA.items() if k != "architectures"} | {"num_hidden_layers": 1}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "draft_vocab_size": DRAFT_VOCAB, "norm_before_residual": True, "norm_before_fc": False,
        "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
    }  # fmt: skip
    return save(folder, config, eagle3_tensors("layers.0", embedding=True))


def glide_ours(folder: Path, tied: bool = False) -> Path:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, SMALL), "model.norm.weight": (SMALL,)}
    shapes |= {} if tied else {"lm_head.weight": (VOCAB, SMALL)}
    for i in range(2):
        shapes |= layer_shapes(f"model.layers.{i}", SMALL, SMALL, heads=2, kv_heads=1)
        shapes[f"model.layers.{i}.cross_attn.q_proj.weight"] = (HEADS * HEAD_DIM, SMALL)
        shapes[f"model.layers.{i}.cross_attn.o_proj.weight"] = (SMALL, HEADS * HEAD_DIM)
    config = {
        **LLAMA, "hidden_size": SMALL, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "tie_word_embeddings": tied, "large_hidden_size": HIDDEN, "large_num_attention_heads": HEADS,
        "large_num_key_value_heads": KV_HEADS,
    }  # fmt: skip
    return save(folder, config, draw(shapes))


def glide_tied(folder: Path) -> Path:
    return glide_ours(folder, tied=True)


def prophet_ours(folder: Path, *, uses_target: bool = True, tied: bool = False) -> Path:
    width = HIDDEN if uses_target else SMALL
    shapes: dict[str, tuple[int, ...]] = {"input_proj.weight": (width, HIDDEN), "norm.weight": (width,)}
    shapes |= {} if uses_target else {"embed_tokens.weight": (VOCAB, width)}
    shapes |= {} if uses_target or tied else {"lm_head.weight": (VOCAB, width)}
    for i in range(2):
        shapes |= layer_shapes(f"layers.{i}", width, width)
    config = {
        "model_type": "prophet", "vocab_size": VOCAB, "target_hidden_size": HIDDEN, "hidden_size": width,
        "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "horizon": 8, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "uses_target_embeddings": uses_target, "tie_word_embeddings": tied,
    }  # fmt: skip
    return save(folder, config, draw(shapes))


def prophet_small(folder: Path) -> Path:
    return prophet_ours(folder, uses_target=False)


def prophet_tied(folder: Path) -> Path:
    return prophet_ours(folder, uses_target=False, tied=True)


def write_sparse(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Weights in bfloat16 of which only the header takes disk space."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    header, end = {}, 0
    for key, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


LAYOUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "early_exit": (early_exit_ours, "early_exit/ours"),
    "medusa": (medusa_ours, "medusa/ours"),
    "medusa-release": (medusa_release, "medusa/ours"),
    "medusa-pickle": (medusa_pickle, "medusa/ours"),
    "medusa-hf": (medusa_hf, "medusa/hf"),
    "medusa-modelopt": (medusa_modelopt, "medusa/modelopt"),
    "medusa-vllm": (medusa_vllm, "medusa/vllm"),
    "mlp": (mlp_plain, "mlp/ours"),
    "mlp-tied": (mlp_tied, "mlp/ours"),
    "mlp-old-name": (mlp_tied_by_its_old_name, "mlp/ours"),
    "mlp-square": (mlp_square, "mlp/ours"),
    "mlp-first-copies": (mlp_first_copies, "mlp/ours"),
    "eagle": (eagle_ours, "eagle/ours"),
    "eagle-two-layers": (lambda folder: eagle_ours(folder, 2), "eagle/ours"),
    "eagle-pickle": (eagle_pickle, "eagle/ours"),
    "eagle3": (eagle3_ours, "eagle3/ours"),
    "eagle3-specforge": (eagle3_specforge, "eagle3/ours"),
    "eagle3-whole": (eagle3_whole, "eagle3/ours"),
    "eagle3-deepspec": (eagle3_deepspec, "eagle3/numbered"),
    "eagle3-normed": (eagle3_normed, "eagle3/ours"),
    "eagle3-wrapped": (eagle3_wrapped, "eagle3/numbered"),
    "eagle3-low-rank": (eagle3_low_rank, "eagle3/ours"),
    "eagle3-windowed": (eagle3_windowed, "eagle3/ours"),
    "eagle3-narrow": (eagle3_narrow, "eagle3/ours"),
    "eagle3-numbered": (eagle3_numbered, "eagle3/numbered"),
    "eagle3-speculators": (eagle3_speculators, "eagle3/speculators"),
    "dflash": (dflash_one, "dflash/ours"),
    "dflash-two": (dflash_two, "dflash/ours"),
    "dflash-spark": (dspark, "dflash/ours"),
    "dflash-lilicorr": (lilicorr, "dflash/ours"),
    "dflash-lilicorr-wide": (lilicorr_as_wide, "dflash/ours"),
    "dflash-domino": (domino, "dflash/ours"),
    "dflash-domino-first": (domino_first, "dflash/ours"),
    "dflash-speculators": (dflash_speculators, "dflash/speculators"),
    "mtp": (mtp_ours, "mtp/ours"),
    "mtp-speculators": (mtp_speculators, "mtp/speculators"),
    "mtp-qwen": (mtp_qwen, "mtp/in_target"),
    "mtp-glm": (mtp_glm, "mtp/numbered"),
    "gemma4-assistant": (gemma4_assistant, "gemma4_assistant/ours"),
    "pard": (pard, "draft_model/pard"),
    "peagle": (peagle_ours, "eagle3/ours"),
    "peagle-numbered": (peagle_numbered, "eagle3/numbered"),
    "peagle-speculators": (peagle_speculators, "eagle3/speculators"),
    "peagle-qwen": (peagle_qwen, "eagle3/speculators"),
    **VLLM_LAYOUTS,
    "glide": (glide_ours, "glide/ours"),
    "glide-tied": (glide_tied, "glide/ours"),
    "prophet": (prophet_ours, "prophet/ours"),
    "prophet-small": (prophet_small, "prophet/ours"),
    "prophet-tied": (prophet_tied, "prophet/ours"),
}
