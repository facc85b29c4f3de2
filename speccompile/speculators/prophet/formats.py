# SPDX-License-Identifier: Apache-2.0
"""Layout of Prophet drafters, which is our own: there is no public one. Needs no torch but where weights are read.

A small causal transformer with Llama's keys. Its first input is the target's hidden state through `input_proj`; with
`uses_target_embeddings` it has neither embeddings nor an LM head of its own, and is as wide as its target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.doctor.decoder_rows import decoder_rows, decoder_sizes, derive_decoder
from speccompile.doctor.doctor import read_speculator
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, Target, finding, flag

if TYPE_CHECKING:
    import torch

MODEL_TYPE = "prophet"


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    sizes["has_tables"] = int(not sizes["uses_target"])
    sizes["has_head"] = int(not sizes["uses_target"] and not sizes["is_tied"])


def _check_width(case: Case) -> Iterator[Finding]:
    """The target's embeddings are read as they are."""
    width, wanted = case.sizes.get("hidden"), case.sizes.get("target_hidden")
    if case.sizes["uses_target"] and width != wanted:
        where, got = case.config_place("hidden_size"), f"{width} with the target's embeddings"
        todo = "Correct config.json: a narrower drafter has embeddings of its own."
        yield finding("error", where, got, f"{wanted}, the target's hidden size", todo)


def _ours(case: Case) -> dict[str, Any]:
    sizes = case.sizes
    return {
        **case.config,
        "model_type": MODEL_TYPE,
        "num_key_value_heads": sizes["num_kv_heads"],
        "head_dim": sizes["head_dim"],
        "uses_target_embeddings": bool(sizes["uses_target"]),
        "tie_word_embeddings": bool(sizes["is_tied"]),
    }


def _config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    return dict(config)


FORMATS = (
    Format(
        "prophet/ours",
        "Prophet drafter",
        "prophet",
        (
            *decoder_sizes(),
            Size("vocab", ("vocab_size",), stored=((r"^embed_tokens\.weight$", 0),)),
            Size("num_layers", ("num_hidden_layers",), count=r"^layers\.(\d+)\."),
            Size("target_hidden", ("target_hidden_size",), stored=((r"^input_proj\.weight$", 1),)),
            Size("horizon", ("horizon",)),
            flag("uses_target", "uses_target_embeddings"),
            flag("is_tied", "tie_word_embeddings"),
        ),
        (
            Row("input_proj.weight", ("hidden", "target_hidden")),
            *decoder_rows("layers.{layer}", (("layer", "num_layers", 0),)),
            Row("norm.weight", ("hidden",)),
            Row("embed_tokens.weight", ("vocab", "hidden"), need="has_tables"),
            Row("lm_head.weight", ("vocab", "hidden"), need="has_head"),
        ),
        (*COMMON, Check("prophet.width", _check_width)),
        marks=(r"^input_proj\.weight$",),
        config_marks=(("model_type", MODEL_TYPE),),
        derive=_derive,
        ours=_ours,
        config=_config,
    ),
)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and weights in our layout; see `doctor.doctor.read_speculator`."""
    return read_speculator(folder, FORMATS)
