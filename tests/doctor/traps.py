# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with one fault each, and the doctor's expected finding."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import checkpoint_lab as lab


@dataclass(frozen=True)
class Trap:
    """A checkpoint with one fault.

    Args:
        make: writes a sound one.
        check: that finds it.
        words: in the finding's line.
        plant: inserts the fault.
        target: changes of the target's config.
        severity: of the finding.
        also: checks that find it as well.
    """

    make: Callable[[Path], Path]
    check: str
    words: str
    plant: Callable[[Path], Any] = lambda folder: None
    target: dict[str, Any] = field(default_factory=dict)
    severity: str = "error"
    also: tuple[str, ...] = ()


def tensors(change: Callable[[lab.Tensors], Any]) -> Callable[[Path], None]:
    return lambda folder: lab.edit(folder, change)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: lab.set_config(folder, **changes)


def put(key: str, value: Any) -> Callable[[Path], None]:
    """Replace a tensor: by another, or by what a function makes of it."""
    return tensors(lambda held: held.update({key: value(held[key]) if callable(value) else value}))


def spoil(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


def two_layers(*, shared: bool, stored: bool) -> Callable[[Path], Path]:
    """Medusa heads of two blocks."""

    def make(folder: Path) -> Path:
        held = lab.medusa_tensors(num_layers=2)
        for key in [k for k in held if ".1.linear." in k]:
            if shared:
                held[key] = held[key.replace(".1.linear", ".0.linear")]
            if not stored:
                del held[key]
        return lab.save(folder, {**lab.MEDUSA, "medusa_num_layers": 2}, held)

    return make


def absolute(held: lab.Tensors, *, mask: bool) -> None:
    held["d2t"] = torch.tensor(lab.KEPT)
    if not mask:
        del held["t2d"]


def mlp_single(folder: Path) -> Path:
    shapes = lab.mlp_shapes(lab.HIDDEN, lab.INNER, lab.VOCAB, 1, first_only=False)
    return lab.save(folder, lab.mlp_config(lab.HIDDEN, lab.INNER, lab.VOCAB, 1, tie=True), lab.draw(shapes))


IDS = "eagle_aux_hidden_state_layer_ids"
TRAPS = {
    "two heads in the config, more stored": Trap(
        lab.medusa_ours, "config.sizes", r"got 2; expected 3, as many as are stored", config(medusa_num_heads=2)
    ),
    "a layer more in the config": Trap(
        lab.medusa_ours, "config.sizes", r"got 2; expected 1, as many", config(medusa_num_layers=2)
    ),
    "no number of heads": Trap(
        lab.mlp_plain, "config.sizes", "nothing; expected a whole number", config(n_predict=None), also=("keys.extra",)
    ),
    "a flag that is none": Trap(
        lab.mlp_plain, "config.sizes", r"\(tie_weights\): got 'no'; expected true or false", config(tie_weights="no")
    ),
    "blocks that are one, repeated": Trap(
        two_layers(shared=True, stored=True), "medusa.copies", "same weights", severity="warning"
    ),
    "blocks that are one, first copies only": Trap(
        two_layers(shared=True, stored=False),
        "medusa.copies",
        r"no 0\.1\.linear\.bias|no 0\.1\.linear\.weight",
        severity="warning",
    ),
    "a vocabulary cut without a token map": Trap(
        lab.medusa_vllm, "keys.missing", r"\(token_map\): got no such key", config(truncated_vocab_size=20)
    ),
    "a missing LM head": Trap(
        lab.medusa_ours,
        "keys.missing",
        r"\(1\.1\.weight\): got no such key; expected BF16 \[40, 16\]",
        tensors(lambda held: held.pop("1.1.weight")),
    ),
    "a key in silence": Trap(
        lab.medusa_ours,
        "keys.extra",
        "that the layout does not have, BF16 .3.",
        tensors(lambda held: held.update({"0.0.gate.weight": torch.zeros(3, dtype=torch.bfloat16)})),
        also=(),
    ),
    "a turned matrix": Trap(
        lab.mlp_plain,
        "keys.shape",
        r"got \[16, 24\]; expected \[24, 16\] = inner x hidden",
        put("speculator.proj.0.weight", lambda t: t.T.contiguous()),
    ),
    "weights of 8 bits": Trap(
        lab.medusa_ours,
        "keys.dtype",
        "got I8; expected BF16 or F16 or F32",
        put("0.1.weight", lambda t: t.to(torch.int8)),
    ),
    "weights of 64 bits": Trap(
        lab.mlp_plain,
        "keys.dtype",
        "got F64 and 2 more of its kind",
        tensors(lambda held: held.update({k: t.double() for k, t in held.items() if ".head." in k})),
    ),
    "tied heads that differ": Trap(
        lab.mlp_tied,
        "keys.shared",
        r"speculator\.head\.2\.weight\): got other values than speculator\.head\.0",
        put("speculator.head.2.weight", spoil(0.5)),
    ),
    "tied projections that differ": Trap(
        lab.mlp_tied,
        "keys.shared",
        r"other values than speculator\.proj\.1\.weight",
        put("speculator.proj.2.weight", spoil(0.5)),
    ),
    "first copies only, said to be untied": Trap(
        lab.mlp_first_copies,
        "mlp.first_copies",
        "--set tie_weights=true",
        config(tie_weights=False),
        also=("keys.missing",),
    ),
    "widths of fewer heads": Trap(
        lab.mlp_plain,
        "mlp.widths",
        r"\(top_k_tokens_per_head\): got 2 numbers, \[3, 2\]; expected a whole number from 1 on for each of 3 heads",
        config(top_k_tokens_per_head=[3, 2]),
    ),
    "widths that are no numbers": Trap(
        lab.mlp_tied, "mlp.widths", r"got \[3, True, 0\]", config(top_k_tokens_per_head=[3, True, 0])
    ),
    "one width for all heads": Trap(lab.mlp_plain, "mlp.widths", "got 4", config(top_k_tokens_per_head=4)),
    "one head that is tied": Trap(mlp_single, "mlp.number", "1 with tie_weights", also=("keys.missing",)),
    "a norm before the first layer": Trap(
        lab.eagle_ours,
        "eagle.first_norm",
        "a norm in the first layer",
        put("layers.0.input_layernorm.weight", torch.ones(lab.HIDDEN, dtype=torch.bfloat16)),
    ),
    "a bias that the config denies": Trap(lab.eagle_ours, "keys.extra", r"fc\.bias", config(bias=False)),
    "a bias that is not stored": Trap(
        lab.eagle_ours, "keys.missing", r"fc\.bias", tensors(lambda held: held.pop("fc.bias"))
    ),
    "token ids where offsets belong": Trap(
        lab.eagle3_ours,
        "eagle3.maps",
        "token ids of the target; expected offsets",
        tensors(lambda held: absolute(held, mask=True)),
    ),
    "token ids, and no mask to tell": Trap(
        lab.eagle3_speculators,
        "eagle3.maps",
        "token ids of the target; expected offsets",
        tensors(lambda held: absolute(held, mask=False)),
    ),
    "two maps that disagree": Trap(
        lab.eagle3_ours,
        "eagle3.maps",
        "t2d marks 12; 2 are in one of them only",
        put(
            "t2d",
            lambda t: t.clone().index_fill_(0, torch.tensor([39]), False).index_fill_(0, torch.tensor([38]), True),
        ),
    ),
    "a map that leads two tokens to one": Trap(
        lab.eagle3_ours,
        "eagle3.maps",
        "a map to 11 tokens, while t2d marks 12",
        put("d2t", lambda t: t.index_put((torch.tensor([11]),), t[10] - 1)),
    ),
    "a map that leads out of the vocabulary": Trap(
        lab.eagle3_ours,
        "eagle3.maps",
        r"lead to 0 \.\. 40, 0 of them twice; expected 12 tokens of the 40",
        tensors(
            lambda held: (
                held.pop("t2d"),
                held.update(d2t=held["d2t"].index_add(0, torch.tensor([11]), torch.tensor([1]))),
            )
        ),
    ),
    "a map of floats": Trap(
        lab.eagle3_ours, "keys.dtype", "got F32; expected I64 or I32", put("d2t", lambda t: t.float())
    ),
    "a mask of numbers": Trap(lab.eagle3_ours, "keys.dtype", "got I64; expected BOOL", put("t2d", lambda t: t.long())),
    "no map": Trap(lab.eagle3_ours, "keys.missing", r"\(d2t\)", tensors(lambda held: held.pop("d2t"))),
    "no size of the draft vocabulary": Trap(
        lab.eagle3_ours,
        "config.sizes",
        r"\(draft_vocab_size\): got nothing; expected 12, as the weights say",
        config(draft_vocab_size=None),
    ),
    "a head of another draft vocabulary": Trap(
        lab.eagle3_ours,
        "keys.shape",
        r"lm_head\.weight\): got \[10, 16\]; expected \[12, 16\] = draft_vocab x hidden",
        put("lm_head.weight", lambda t: t[:10].contiguous()),
    ),
    "two fused layers": Trap(
        lab.eagle3_specforge, "eagle3.layers", "expected 3 different layers", config(**{f"eagle_config__{IDS}": [1, 2]})
    ),
    "a truth value among the fused layers": Trap(
        lab.eagle3_speculators, "eagle3.layers", "expected 3 different layers", config(**{IDS: [True, 2, 3]})
    ),
    "a fused layer after the last": Trap(
        lab.eagle3_speculators, "eagle3.layers", "expected layers from 0 to 6", config(**{IDS: [1, 2, 9]})
    ),
    "a switch with two defaults": Trap(
        lab.eagle3_speculators,
        "eagle3.residual",
        "vLLM takes true, the speculators library false",
        config(norm_before_residual=None),
    ),
    "no verifier": Trap(
        lab.eagle3_speculators,
        "eagle3.config",
        "got nothing; expected the target's name",
        config(speculators_config__verifier__name_or_path=None),
    ),
    "no proposal": Trap(
        lab.eagle3_speculators,
        "eagle3.config",
        r"got \[\]; expected a method with its speculative_tokens",
        config(speculators_config__proposal_methods=[]),
    ),
    "a proposal of no tokens": Trap(
        lab.eagle3_speculators,
        "eagle3.config",
        "expected a method with its speculative_tokens",
        config(speculators_config__proposal_methods=[{"speculative_tokens": 0}]),
    ),
    "another algorithm": Trap(
        lab.eagle3_speculators,
        "eagle3.config",
        "got 'eagle'; expected 'eagle3'",
        config(speculators_config__algorithm="eagle"),
    ),
    "queries without their gates": Trap(
        lab.mtp_qwen,
        "mtp.layer",
        "got 16 rows; expected 32 rows: queries and their gates of 4 heads of 4",
        put("mtp.layers.0.self_attn.q_proj.weight", lambda t: t[:16].contiguous()),
    ),
    "a convention of its own": Trap(
        lab.mtp_ours, "mtp.conventions", "got 'sideways'; expected embedding_first or", config(concat="sideways")
    ),
    "norms in the other form": Trap(
        lab.mtp_ours,
        "mtp.norms",
        "got a mean of 1.*; expected weights read as 1.w",
        config(norms="1+w"),
        severity="warning",
    ),
    "heads of another kind of layer": Trap(
        lab.gemma4_assistant,
        "gemma4_assistant.heads",
        r"layers\.1\..*got a norm of \[4\] columns; expected \[8\], as the config says of its kind",
        put("model.layers.1.self_attn.q_norm.weight", lambda t: t[:4].contiguous()),
    ),
    "keys and values of its own": Trap(
        lab.glide_ours,
        "glide.own_keys",
        "keys and values of its own",
        put("model.layers.0.cross_attn.k_proj.weight", torch.ones(8, 8, dtype=torch.bfloat16)),
    ),
    "a target with other heads": Trap(
        lab.glide_ours,
        "glide.heads",
        r"large_num_attention_heads\): got 4; expected 8, as",
        target={"num_attention_heads": 8},
    ),
    "a target with wider heads": Trap(
        lab.glide_ours, "glide.heads", r"large_head_dim\): got 4; expected 8, as", target={"head_dim": 8}
    ),
    "grouped heads that the config is silent on": Trap(
        lab.glide_ours,
        "glide.groups",
        "got nothing; expected 2, the key heads of",
        config(large_num_key_value_heads=None),
        severity="warning",
    ),
    "a target with other groups": Trap(
        lab.glide_ours, "glide.groups", "got 2; expected 1, as", target={"num_key_value_heads": 1}
    ),
    "queries as wide as the target's keys": Trap(
        lab.glide_ours,
        "keys.shape",
        r"got \[8, 8\] and 1 more of its kind; expected \[16, 8\] = large_width x hidden",
        tensors(lambda held: held.update({k: t[:8].contiguous() for k, t in held.items() if "cross_attn.q_proj" in k})),
    ),
    "a target of another width": Trap(
        lab.eagle_ours, "target.width", "hidden states of 16; expected 32", target={"hidden_size": 32}
    ),
    "a target of another vocabulary": Trap(
        lab.medusa_ours, "target.vocabulary", "got a vocabulary of 40; expected 48", target={"vocab_size": 48}
    ),
    "not a number": Trap(
        lab.mlp_plain,
        "values.finite",
        "got 1 of 960 values NaN or infinite",
        put("speculator.head.1.weight", spoil(float("nan"))),
    ),
    "infinity in 16 bits": Trap(
        lab.medusa_ours,
        "values.finite",
        "got 1 of 16 values",
        put("0.0.linear.bias", lambda t: spoil(float("-inf"))(t.half())),
    ),
    "not a number in 32 bits": Trap(
        lab.glide_ours,
        "values.finite",
        "got 1 of 8 values",
        put("model.norm.weight", lambda t: spoil(float("nan"))(t.float())),
    ),
    "a matrix of zeros": Trap(
        lab.eagle3_ours,
        "values.zero",
        "zeros alone",
        put("fc.weight", lambda t: -torch.zeros_like(t)),
        severity="warning",
    ),
    "the target's embeddings in another width": Trap(
        lab.prophet_small,
        "prophet.width",
        "got 8 with the target's embeddings; expected 16",
        config(uses_target_embeddings=True),
        also=("keys.extra",),
    ),
    "a head that the config ties away": Trap(
        lab.prophet_small, "keys.extra", r"lm_head\.weight", config(tie_word_embeddings=True)
    ),
    "queries of other positions than the keys": Trap(
        lab.glide_ours,
        "glide.positions",
        r"got nothing; expected 500000\.0, the rope_theta of",
        target={"rope_theta": 500000.0},
        severity="warning",
    ),
    "queries of another target's positions": Trap(
        lab.glide_ours, "glide.positions", r"got 500000\.0; expected 10000\.0", config(large_rope_theta=500000.0)
    ),
    "a norm that the config denies": Trap(
        lab.eagle3_normed, "keys.extra", r"input_norm\.weight", config(norm_before_fc=False)
    ),
    "no embeddings of a drafter of another width": Trap(
        lab.eagle3_narrow,
        "keys.missing",
        r"\(embed_tokens\.weight\): got no such key; expected BF16 \[40, 8\]",
        tensors(lambda held: held.pop("embed_tokens.weight")),
    ),
    "an exit after the target's last layer": Trap(
        lab.early_exit_ours, "early_exit.layers", r"\(num_exit_layers\): got 6; expected 1", config(num_exit_layers=6)
    ),
}
