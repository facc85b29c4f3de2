# SPDX-License-Identifier: Apache-2.0
"""Layout of IBM's MLP speculators, which is ours. Needs no torch but where weights are read.

With `tie_weights` the heads share embedding, LM head and norm, and the projections from the second on are one; the
files may hold the first copies only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.doctor.doctor import read_speculator
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, Target, finding, flag
from speccompile.speculators.mlp.sizes import MODEL_TYPE, PREFIX, WEIGHTS

if TYPE_CHECKING:
    import torch

_WIDTHS = "top_k_tokens_per_head"


def _derive(sizes: Sizes) -> None:
    sizes["inner"] = sizes["inner"] or sizes["hidden"]
    sizes["target_hidden"] = sizes["hidden"]


def _rows() -> tuple[Row, ...]:
    rows = [Row("proj.0.weight", ("inner", "hidden"))]
    for kind, dims, first in WEIGHTS:
        own, template = kind.format(first), kind.format("{head}")
        rows.append(Row(template, dims, (("head", "num_heads", first),), need="!is_tied"))
        rows.append(Row(own, dims, need="is_tied"))
        rows.append(Row(template, dims, (("head", "num_heads", first + 1),), need="is_tied", fallback=own))
    return tuple(rows)


def _check_number(case: Case) -> Iterator[Finding]:
    """Heads that are tied are at least two: the tied projections begin with the second."""
    if case.sizes.get("is_tied") and case.sizes.get("num_heads") == 1:
        where = case.config_place("n_predict")
        yield finding("error", where, "1 with tie_weights", "at least 2", "Fetch the folder again.")


def _check_widths(case: Case) -> Iterator[Finding]:
    """Candidates by head, where the config gives them: other loaders index the list by the head's number."""
    widths, num = case.config.get(_WIDTHS), case.sizes.get("num_heads")
    if widths is None or num is None:
        return
    is_list = isinstance(widths, list) and all(type(width) is int and width >= 1 for width in widths)
    if not is_list or len(widths) != num:
        got = f"{len(widths)} numbers, {widths!r}"[:80] if is_list else repr(widths)[:80]
        todo = f"Fetch the folder again, or give the list with --set {_WIDTHS}=[...]."
        expected = f"a whole number from 1 on for each of {num} heads"
        yield finding("error", case.config_place(_WIDTHS), got, expected, todo)


def _check_first_copies(case: Case) -> Iterator[Finding]:
    """A config that denies sharing beside files with the first copies only."""
    if not case.sizes.get("is_tied") and (case.sizes.get("num_heads") or 0) > 1:
        held = {k[len(case.prefix) :] for k in case.files.headers}
        stored = sorted(k for k in held if k.startswith(("emb.", "head.")))
        if stored == ["emb.0.weight", "head.0.weight"]:
            got = "false, and the files hold the weights of the first head only"
            todo = "Use --set tie_weights=true if the heads share their weights; else fetch the folder again."
            yield finding("error", case.config_place("tie_weights"), got, "true", todo)


def _ours(case: Case) -> dict[str, Any]:
    sizes, config = case.sizes, case.config
    known = {
        "model_type": MODEL_TYPE,
        "emb_dim": sizes["hidden"],
        "inner_dim": sizes["inner"],
        "n_predict": sizes["num_heads"],
        "vocab_size": sizes["vocab"],
        "tie_weights": bool(sizes["is_tied"]),
        "scale_input": bool(sizes["scales_input"]),
    }
    kept = ("architectures", _WIDTHS, "n_candidates", "base_model_name_or_path")
    return {**{k: config[k] for k in kept if k in config}, **known}


def _config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    """What IBM publishes, and vLLM reads."""
    num, widths = config["n_predict"], config.get(_WIDTHS)
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "n_candidates": num,
        **config,
        _WIDTHS: widths or [1] * num,
    }


FORMATS = (
    Format(
        "mlp/ours",
        "MLP speculator (IBM)",
        "mlp",
        (
            Size("hidden", ("emb_dim",), stored=((r"^proj\.0\.weight$", 1),)),
            Size("inner", ("inner_dim",), default=0, least=0),
            Size("num_heads", ("n_predict",)),
            Size("vocab", ("vocab_size",), stored=((r"^head\.0\.weight$", 0),)),
            flag("is_tied", "tie_weights"),
            flag("scales_input", "scale_input"),
        ),
        _rows(),
        (
            *COMMON,
            Check("mlp.number", _check_number),
            Check("mlp.widths", _check_widths),
            Check("mlp.first_copies", _check_first_copies),
        ),
        marks=(r"^(emb|proj|head|ln)\.\d+\.(weight|bias)$",),
        config_marks=(("model_type", MODEL_TYPE),),
        prefixes=(PREFIX, ""),
        derive=_derive,
        ours=_ours,
        config=_config,
    ),
)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and weights in our layout, without the prefix; see `doctor.doctor.read_speculator`."""
    return read_speculator(folder, FORMATS)
