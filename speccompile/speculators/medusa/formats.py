# SPDX-License-Identifier: Apache-2.0
"""Layouts of Medusa heads: the first release (ours), inside a base model's files, ModelOpt's and vLLM's.

Head i has `num_layers` blocks x + SiLU(W x + b) and an LM head behind them. An old release builds the blocks of a head
as one module repeated, so that copies may be stored or left out. Needs no torch but where weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.doctor.doctor import read_speculator
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, Target, finding, flag

if TYPE_CHECKING:
    import torch

_OVER_HEADS = (("head", "num_heads", 0),)
_LATER = (*_OVER_HEADS, ("layer", "num_layers", 1))
_TARGET_HEAD = "lm_head.weight"  # not of the heads: the target has it
_NAMES = "{head}.{layer}.linear."  # of a block in our layout


def _derive(sizes: Sizes) -> None:
    sizes["target_hidden"] = sizes["hidden"]


def _check_copies(case: Case) -> Iterator[Finding]:
    """Blocks of a head that are one block repeated."""
    num_layers = case.sizes.get("num_layers") or 1
    later = [e for e in case.expected.values() if e.row.may_differ and e.name.endswith(".weight")]
    gone = [e for e in later if e.key not in case.files.headers]
    if gone:
        got = f"no {gone[0].key} ({len(gone)} missing)"
        todo = "Nothing, if the heads were trained by the first release, which repeats the first block."
        yield finding("warning", case.place(), got, f"{num_layers} blocks a head; the first stands in", todo)
    elif later and case.reads_values and all(_is_copy(case, e.key, e.fallback) for e in later):
        got, expected = f"{num_layers} blocks a head with the same weights", "blocks of their own"
        todo = "Nothing, if the heads were trained by the first release, which repeats the first block."
        yield finding("warning", case.place(later[0].key), got, expected, todo)


def _is_copy(case: Case, key: str, name: str) -> bool:
    first = case.key_of(name)
    return first is not None and case.files.array(key).tobytes() == case.files.array(first).tobytes()


def _check_map(case: Case) -> Iterator[Finding]:
    """A reduced vocabulary, which the heads' graph does not have."""
    if "token_map" in case.files.headers or case.config.get("truncated_vocab_size") not in (None, case.sizes["vocab"]):
        got = f"a vocabulary cut to {case.config.get('truncated_vocab_size')} tokens"
        todo = "Use heads over the target's whole vocabulary; a token map is not read yet."
        yield finding("error", case.config_place("truncated_vocab_size"), got, "no token_map", todo)


def _ours(case: Case) -> dict[str, Any]:
    sizes, config = case.sizes, case.config
    return {
        "model_type": "medusa",
        "medusa_num_heads": sizes["num_heads"],
        "medusa_num_layers": sizes["num_layers"],
        "hidden_size": sizes["hidden"],
        "vocab_size": sizes["vocab"],
        "original_lm_head": bool(sizes["uses_target_head"]),
        "base_model_name_or_path": config.get("base_model_name_or_path") or config.get("_name_or_path") or "",
    }


def _config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    return {**config, "base_model_name_or_path": target.name if target else config.get("base_model_name_or_path", "")}


def _drop_target_head(config: Mapping[str, Any], tensors: dict[str, Any]) -> None:
    tensors.pop(_TARGET_HEAD, None)


def _vllm_config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": config["medusa_num_heads"],
        "num_hidden_layers": config["medusa_num_layers"],
        "hidden_size": config["hidden_size"],
        "vocab_size": config["vocab_size"],
        "medusa_fc_bias": True,
        "original_lm_head": bool(config.get("original_lm_head", False)),
        "base_model_name_or_path": _config(config, target)["base_model_name_or_path"],
    }


def _sizes(head: str, block: str, lm_head: str, num_layers: Size) -> tuple[Size, ...]:
    """Sizes of a layout; the arguments are patterns of keys, `head` with its number as a group."""
    return (
        Size("num_heads", ("medusa_num_heads", "num_heads"), count=head),
        num_layers,
        Size("hidden", ("hidden_size",), stored=((block, 1), (lm_head, 1))),
        Size("vocab", ("vocab_size",), stored=((lm_head, 0),)),
        flag("uses_target_head", "original_lm_head"),
    )


def _rows(block: str, lm_head: str) -> tuple[Row, ...]:
    """Rows of a layout; the arguments are templates of the beginnings of keys."""
    parts: tuple[tuple[str, tuple[str, ...], bool], ...] = (
        ("weight", ("hidden", "hidden"), False),
        ("bias", ("hidden",), True),
    )
    first, ours = block.replace("{layer}", "0"), _NAMES.replace("{layer}", "0")
    return (
        *(Row(first + tail, dims, _OVER_HEADS, ours + tail, is_zero=zero) for tail, dims, zero in parts),
        *(
            Row(block + tail, dims, _LATER, _NAMES + tail, fallback=ours + tail, may_differ=True)
            for tail, dims, _ in parts
        ),
        Row(lm_head, ("vocab", "hidden"), _OVER_HEADS, "{head}.{num_layers}.weight", need="!uses_target_head"),
    )


_HEAD, _BLOCK, _LM_HEAD = r"^(\d+)\.\d+\.", r"^\d+\.\d+\.linear\.weight$", r"^\d+\.\d+\.weight$"
# An LM head is numbered behind its blocks, whether their copies are stored or not.
_V1_SIZES = _sizes(
    _HEAD,
    _BLOCK,
    _LM_HEAD,
    Size("num_layers", ("medusa_num_layers",), count=r"^\d+\.(\d+)\.weight$", count_first=1, default=1),
)
_V1_ROWS = _rows(_NAMES, "{head}.{num_layers}.weight")
_CHECKS = (*COMMON, Check("medusa.copies", _check_copies))


def _v1(name: str, label: str, prefixes: tuple[str, ...], *, has_others: bool) -> Format:
    """The first release's keys behind a prefix."""
    return Format(
        f"medusa/{name}",
        label,
        "medusa",
        _V1_SIZES,
        _V1_ROWS,
        _CHECKS,
        marks=(_BLOCK, _LM_HEAD),
        prefixes=prefixes,
        has_others=has_others,
        derive=_derive,
        ours=_ours,
        config=_config,
    )


_VLLM_BLOCK, _VLLM_HEAD = r"^blocks\.\d+\.layers\.\d+\.weight$", r"^lm_heads\.\d+\.weight$"
FORMATS = (
    _v1("ours", "Medusa heads (first release)", ("",), has_others=False),
    _v1("hf", "Medusa heads inside a base model's files", ("medusa_head.", "model.medusa_head."), has_others=True),
    _v1("modelopt", "Medusa heads (ModelOpt)", ("medusa_heads.",), has_others=True),
    Format(
        "medusa/vllm",
        "Medusa heads (vLLM)",
        "medusa",
        _sizes(
            r"^blocks\.(\d+)\.",
            _VLLM_BLOCK,
            _VLLM_HEAD,
            Size(
                "num_layers",
                ("num_hidden_layers", "medusa_num_layers"),
                count=r"^blocks\.\d+\.layers\.(\d+)\.weight$",
                default=1,
            ),
        ),
        (
            *_rows("blocks.{head}.layers.{layer}.", "lm_heads.{head}.weight"),
            # vLLM wants the target's head beside them.
            Row("lm_heads.0.weight", ("vocab", "hidden"), name=_TARGET_HEAD, need="uses_target_head"),
        ),
        (*_CHECKS, Check("medusa.token_map", _check_map)),
        marks=(_VLLM_BLOCK, _VLLM_HEAD),
        prefixes=("", "medusa_heads."),
        derive=_derive,
        ignored=(r"^token_map$",),
        ours=_ours,
        config=_vllm_config,
        complete=_drop_target_head,
    ),
)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and weights in our layout; see `doctor.doctor.read_speculator`."""
    return read_speculator(folder, FORMATS)
