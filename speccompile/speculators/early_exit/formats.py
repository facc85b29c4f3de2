# SPDX-License-Identifier: Apache-2.0
"""Layout of early-exit heads, which is our own: an adapter and a norm. Needs no torch but where weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.doctor.doctor import read_speculator
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Target, finding

if TYPE_CHECKING:
    import torch

MODEL_TYPE = "early_exit"


def _check_layers(case: Case) -> Iterator[Finding]:
    """The head stands behind a layer that the target has, and not behind its last."""
    asked, target = case.sizes.get("num_exit_layers"), case.target
    if target is not None and asked is not None and not 1 <= asked < target.dims.num_layers:
        expected = f"1 to {target.dims.num_layers - 1}, the layers of {target.name} but its last"
        todo = "It was trained for another target: give the model that it belongs to."
        yield finding("error", case.config_place("num_exit_layers"), str(asked), expected, todo)


def _config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    return dict(config)


FORMATS = (
    Format(
        "early_exit/ours",
        "Early-exit head",
        "early_exit",
        (
            Size("hidden", ("hidden_size",), stored=((r"^norm\.weight$", 0),)),
            Size("vocab", ("vocab_size",)),
            Size("inner", ("intermediate_size",), stored=((r"^adapter\.up_proj\.weight$", 0),)),
            Size("num_exit_layers", ("num_exit_layers",)),
        ),
        (
            Row("adapter_norm.weight", ("hidden",)),
            Row("adapter.gate_proj.weight", ("inner", "hidden")),
            Row("adapter.up_proj.weight", ("inner", "hidden")),
            Row("adapter.down_proj.weight", ("hidden", "inner")),
            Row("norm.weight", ("hidden",)),
        ),
        (*COMMON, Check("early_exit.layers", _check_layers)),
        marks=(r"^adapter_norm\.weight$",),
        config_marks=(("model_type", MODEL_TYPE),),
        config=_config,
    ),
)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and weights in our layout; see `doctor.doctor.read_speculator`."""
    return read_speculator(folder, FORMATS)
