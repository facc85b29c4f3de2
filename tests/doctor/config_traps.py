# SPDX-License-Identifier: Apache-2.0
"""Keys of a config that are not read; see `tests.doctor.traps`. And keys and values that change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import checkpoint_lab as lab
from tests.checkpoints import vllm_files
from tests.doctor.traps import Trap, config, put, tensors


def unread(make: Callable[[Path], Path], words: str, **changes: Any) -> Trap:
    return Trap(make, "config.keys", words, config(**changes))


TWO_KINDS = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
CONFIG_TRAPS: dict[str, Trap] = {
    "a token map of another model": Trap(
        vllm_files.eagle_vllm_cut,
        "token_map",
        r"got a map to 12 tokens from 0 to 40; expected 12 different tokens of the 40",
        put("token_map", lambda t: torch.where(t == 39, 40, t)),
    ),
    "a token map that repeats one": Trap(
        vllm_files.medusa_vllm_cut,
        "token_map",
        "got a map to 11 tokens from 0 to 34",
        put("token_map", lambda t: torch.where(t == 39, 0, t)),
    ),
    "norms that vLLM adds to a drafter": Trap(
        vllm_files.eagle_vllm,
        "config.keys",
        r"\(model\.add_para_norm\): got True; expected False",
        config(model__add_para_norm=True),
    ),
    "norms that the speculators library adds": Trap(
        vllm_files.eagle_speculators,
        "config.keys",
        r"\(layernorms\): got True; expected False",
        config(layernorms=True),
    ),
    "rotated pairs": unread(
        lab.eagle3_ours, r"\(rope_is_neox_style\): got False; expected True", rope_is_neox_style=False
    ),
    "rotated pairs of a block": unread(lab.dflash_one, "is_neox_style", dflash_config__is_neox_style=False),
    "another activation": unread(lab.eagle_ours, "hidden_activation", hidden_activation="gelu_pytorch_tanh"),
    "an activation that is fixed": unread(lab.glide_ours, r"\(hidden_act\): got 'gelu'", hidden_act="gelu"),
    "angles by kind of layer": unread(lab.eagle3_ours, "got angles that differ", rope_parameters=TWO_KINDS),
    "a part of each head": unread(lab.eagle3_ours, r"\(partial_rotary_factor\): got 0.5", partial_rotary_factor=0.5),
    "a part of each head, inside": unread(
        lab.dflash_two, r"rope_parameters\.partial_rotary_factor", rope_parameters=PARTIAL
    ),
    "scaled embeddings": unread(lab.eagle3_ours, "input_embedding_scale", input_embedding_scale=8.0),
    "capped logits": unread(lab.eagle3_speculators, "final_logit_softcapping", final_logit_softcapping=30.0),
    "scaled attention": unread(lab.eagle3_whole, "query_pre_attn_scalar", query_pre_attn_scalar=256),
    "rope at the wrong place": unread(lab.eagle3_speculators, r"\(rope_theta\)", rope_theta=5e5),
    "a key of nobody": unread(lab.eagle3_numbered, r"\(residual_dropout_scale\): got 0.9", residual_dropout_scale=0.9),
    "a key of nobody in an object": unread(lab.eagle3_specforge, r"eagle_config\.twice", eagle_config__twice=True),
    "a last state alone": unread(
        lab.eagle3_specforge, "use_aux_hidden_state", eagle_config__use_aux_hidden_state=False
    ),
    "scaled states of an MLP speculator": unread(lab.mlp_plain, "state_scale", state_scale=0.5),
    "biases that Prophet does not have": Trap(
        lab.prophet_ours, "config.keys", "attention_bias", config(attention_bias=True), also=("keys.missing",)
    ),
    "scaled positions of Prophet": unread(lab.prophet_ours, "rope_scaling", rope_scaling={"rope_type": "yarn"}),
    "a key beside a layer's config": unread(lab.mtp_ours, "norm_scale", norm_scale=2.0),
    "an eps as text": unread(lab.eagle3_ours, r"\(rms_norm_eps\): got '1e-5'", rms_norm_eps="1e-5"),
    "an eps as text, inside": unread(
        lab.eagle3_speculators, r"\(rms_norm_eps\): got '1e-5'", transformer_layer_config__rms_norm_eps="1e-5"
    ),
    "more centroids are chosen than there are": Trap(
        lab.gemma4_assistant,
        "gemma4_assistant.heads",
        "got 4 centroids of 40 tokens; expected at least the 5 that are chosen",
        config(centroid_intermediate_top_k=5),
    ),
    "layers named twice": Trap(
        lab.eagle3_deepspec,
        "eagle3.layers",
        r"got \[1, 2, 3, 4, 5\] and \[0, 1, 2, 3, 4\]; expected one of them",
        config(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4, 5]),
    ),
    "outputs of three layers where five are read": Trap(
        lab.eagle3_deepspec, "eagle3.layers", "expected 5 different layers", config(target_layer_ids=[1, 2, 3])
    ),
    "an output after the last layer": Trap(
        lab.eagle3_deepspec, "eagle3.layers", "expected layers from 0 to 5", config(target_layer_ids=[1, 2, 3, 4, 6])
    ),
    "five layers that are not named": Trap(
        lab.eagle3_deepspec, "eagle3.layers", "got nothing; expected 5 layers", config(target_layer_ids=None)
    ),
    "an anchor with two defaults": Trap(
        lab.dflash_speculators,
        "dflash.numbers",
        r"\(sample_from_anchor\): got None; expected true or false",
        config(speculators_model_type="dspark", sample_from_anchor=None, speculators_config__algorithm="dspark"),
    ),
}  # fmt: skip
ONE_KIND = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
IMAGES = {"type": "mrope", "mrope_section": [1, 1]}
TAKEN: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "positions of images": (lab.eagle3_ours, {"rope_scaling": IMAGES}),
    "positions of images, named default": (lab.eagle3_ours, {"rope_scaling": {**IMAGES, "rope_type": "default"}}),
    "the same angles of each kind": (lab.eagle3_whole, {"rope_parameters": ONE_KIND}),
    "one name of the activation": (lab.eagle3_ours, {"hidden_act": None, "hidden_activation": "silu"}),
    "neutral values": (
        lab.eagle3_specforge,
        {"is_neox_style": True, "partial_rotary_factor": 1.0, "query_pre_attn_scalar": 4, "mlp_bias": False,
         "logit_scale": 1.0, "final_logit_softcapping": None, "eagle_config__use_mtp_layernorm": False},
    ),
    "values of another kind": (lab.eagle3_ours, {"rms_norm_eps": 0, "bos_token_id": [1]}),
    "what trainers write": (
        lab.eagle3_ours,
        {"ttt_length": 7, "initializer_range": 0.02, "num_experts": 8, "_commit_hash": "x", "auto_map": {"": "a.B"},
         "attention_dropout": 0.1, "begin_suppress_tokens": None, "id2label": {"0": "a"}, "use_cache": False},
    ),
    "as many key heads as query heads": (lab.dflash_one, {"dflash_config__attention_mode": "mha"}),
    "DSpark of ModelOpt": (
        lab.dspark, {"dflash_config": {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True}}
    ),
}  # fmt: skip


def untrained_embeddings(folder: Path) -> None:
    """Gives a drafter embeddings that are not those of the target beside it."""
    lab.write_tables(folder.parent / "target")
    lab.edit(folder, lambda held: held.update({"embed_tokens.weight": torch.eye(lab.VOCAB, lab.HIDDEN).bfloat16()}))


MASK_TRAPS: dict[str, Trap] = {
    "a head of two products without its first": Trap(
        lab.eagle3_low_rank,
        "keys.missing",
        r"\(lm_head_down\.weight\): got no such key; expected BF16 \[4, 16\]",
        tensors(lambda held: held.pop("lm_head_down.weight")),
    ),
    "a head of two products of different ranks": Trap(
        lab.eagle3_low_rank,
        "keys.shape",
        r"lm_head_down\.weight\): got \[3, 16\]; expected \[4, 16\] = head_rank x hidden",
        put("lm_head_down.weight", lambda t: t[:3].contiguous()),
    ),
    "a mask token beyond the embedding": Trap(
        lab.pard, "pard.token", r"\(pard_token\): got 40; expected a token below 40", config(pard_token=40)
    ),
    "a mask token as text": Trap(
        lab.pard, "pard.token", r"got '<mask>'; expected a token", config(pard_token="<mask>")
    ),
    "a draft model without a layer": Trap(
        lab.pard,
        "pard.model",
        "layer",
        tensors(lambda held: [held.pop(key) for key in list(held) if ".layers.3." in key]),
    ),
    "masks without their states": Trap(
        lab.peagle_ours,
        "keys.missing",
        r"\(mask_hidden\): got no such key; expected BF16 \[1, 1, 48\]",
        tensors(lambda held: held.pop("mask_hidden")),
    ),
    "a mask token alone, without states": Trap(
        lab.eagle3_ours, "keys.missing", r"\(mask_hidden\): got no such key", config(mask_token_id=3)
    ),
    "states of masks of another target": Trap(
        lab.peagle_ours,
        "keys.shape",
        r"mask_hidden\): got \[1, 1, 32\]; expected \[1, 1, 48\]",
        put("mask_hidden", lambda t: t[:, :, :32].contiguous()),
    ),
    "no token of masks": Trap(
        lab.peagle_speculators,
        "eagle3.mask",
        r"\(ptd_token_id or pard_token or mask_token_id\): got nothing; expected the token of masks",
        config(mask_token_id=None),
    ),
    "neither token nor states of masks": Trap(
        lab.peagle_speculators,
        "eagle3.mask",
        "got nothing; expected the token of masks",
        lambda folder: (config(mask_token_id=None)(folder), tensors(lambda held: held.pop("mask_hidden"))(folder)),
    ),
    "a mask of P-EAGLE beyond the embedding": Trap(
        lab.peagle_ours, "eagle3.mask", "got 40; expected a token below 40", config(ptd_token_id=40)
    ),
    "a mask of P-EAGLE as text": Trap(
        lab.peagle_numbered,
        "config.sizes",
        r"\(pard_token\): got '<mask>'",
        config(pard_token="<mask>"),
        also=("eagle3.mask",),
    ),
    "a window without the kinds of layers": Trap(
        lab.eagle3_ours, "eagle3.windows", "layer_types None and sliding_window 8", config(sliding_window=8)
    ),
    "kinds of layers of another model": Trap(
        lab.eagle3_ours,
        "eagle3.windows",
        "expected 1 of full_attention and sliding_attention",
        config(layer_types=["sliding_attention"] * 6, sliding_window=8),
    ),
    "layers that slide without a window": Trap(
        lab.eagle3_ours, "eagle3.windows", "sliding_window None", config(layer_types=["sliding_attention"])
    ),
    "P-EAGLE by another algorithm": Trap(
        lab.peagle_speculators,
        "eagle3.config",
        "got 'eagle3'; expected 'peagle'",
        config(speculators_config__algorithm="eagle3"),
    ),
    "the number of layers of the target": Trap(
        lab.eagle3_vicuna,
        "eagle3.layers",
        r"\(num_hidden_layers\): got 6; expected 1, as many as are stored",
        severity="warning",
    ),
    "a number of states that fc does not read": Trap(
        lab.eagle3_ours,
        "eagle3.layers",
        r"\(num_aux_hidden_states\): got 5; expected 3, as fc reads",
        config(num_aux_hidden_states=5),
    ),
    "embeddings that were never trained": Trap(
        lab.eagle3_ours,
        "target.tables",
        r"\(embed_tokens\.weight\): got a table unlike the target's embeddings: mean cosine of their rows -?0\.0",
        untrained_embeddings,
        severity="warning",
    ),
}
