# SPDX-License-Identifier: Apache-2.0
"""Layout of Prophet drafters, which is our own: there is no public one. Needs no torch but where weights are read.

A small causal transformer with Llama's keys. Its first input is the target's hidden state through `input_proj`, which
a drafter as wide as its target may leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.frontend.decoder_rows import decoder_rows, decoder_sizes, derive_decoder
from speccompile.frontend.doctor import read_speculator
from speccompile.frontend.key_checks import COMMON
from speccompile.frontend.layouts import Case, Format, Row, Size, Sizes, Target, flag

if TYPE_CHECKING:
    import torch

_LAYER, _OVER = "layers.{layer}", (("layer", "num_layers", 0),)


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    sizes["is_wide"] = int(sizes["hidden"] == sizes["target_hidden"])


def _ours(case: Case) -> dict[str, Any]:
    return dict(case.config)


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
            flag("is_tied", "tie_word_embeddings"),
        ),
        (
            Row("input_proj.weight", ("hidden", "target_hidden"), need="!is_wide"),
            Row("input_proj.weight", ("hidden", "target_hidden"), need="is_wide", is_optional=True),
            Row("embed_tokens.weight", ("vocab", "hidden")),
            *decoder_rows(_LAYER, _OVER),
            Row("norm.weight", ("hidden",)),
            Row("lm_head.weight", ("vocab", "hidden"), need="!is_tied"),
            Row("lm_head.weight", ("vocab", "hidden"), need="is_tied", fallback="embed_tokens.weight"),
        ),
        COMMON,
        config_marks=(("model_type", "prophet"),),
        derive=_derive,
        ours=_ours,
        config=_config,
    ),
)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and weights in our layout; see `frontend.doctor.read_speculator`."""
    return read_speculator(folder, FORMATS)
