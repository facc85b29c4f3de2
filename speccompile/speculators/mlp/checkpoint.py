# SPDX-License-Identifier: Apache-2.0
"""IBM's MLP speculators on disk, and as the source of the heads' graph. Needs no torch before the export.

With `tie_weights` the heads share all weights but the first projection; files may hold the first copies only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.specs import GraphSpec
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, Target, config_of_sizes, finding, flag
from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.checks import check_heads
from speccompile.export.speculator_source import SpeculatorSource, check_room
from speccompile.graph_kinds.heads import DraftForm
from speccompile.speculators.mlp.config import MODEL_TYPE, WEIGHTS, HeadsSizes

if TYPE_CHECKING:
    import torch

PREFIX = "speculator."


def sizes_of(case: Case) -> HeadsSizes:
    """Returns the sizes of a checkpoint."""
    case.check_type(MODEL_TYPE)
    if fault := next(_check_number(case), None):
        raise CheckpointError(fault.where, fault.got, fault.expected, fault.todo)
    return HeadsSizes(
        model_type=MODEL_TYPE,
        vocab_size=case.size("vocab"),
        hidden_size=case.size("hidden"),
        inner_size=case.size("inner"),
        num_heads=case.size("num_heads"),
        num_drafts=case.size("num_heads"),
        is_tied=bool(case.sizes["is_tied"]),
        scales_input=bool(case.sizes["scales_input"]),
    )


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
    if case.sizes.get("is_tied") and case.sizes.get("num_heads") == 1:
        where = case.where_in_config("n_predict")
        yield finding("error", where, "1 with tie_weights", "at least 2", "Fetch the folder again.")


def _check_widths(case: Case) -> Iterator[Finding]:
    widths, num = case.config.get(_WIDTHS), case.sizes.get("num_heads")
    if widths is None or num is None:
        return
    is_list = isinstance(widths, list) and all(type(width) is int and width >= 1 for width in widths)
    if not is_list or len(widths) != num:
        got = f"{len(widths)} numbers, {widths!r}"[:80] if is_list else repr(widths)[:80]
        todo = f"Fetch the folder again, or give the list with --set {_WIDTHS}=[...]."
        expected = f"a whole number from 1 on for each of {num} heads"
        yield finding("error", case.where_in_config(_WIDTHS), got, expected, todo)


def _check_first_copies(case: Case) -> Iterator[Finding]:
    if not case.sizes.get("is_tied") and (case.sizes.get("num_heads") or 0) > 1:
        names = {k[len(case.prefix) :] for k in case.files.headers}
        stored = sorted(k for k in names if k.startswith(("emb.", "head.")))
        if stored == ["emb.0.weight", "head.0.weight"]:
            got = "false, and the files hold the weights of the first head only"
            todo = "Use --set tie_weights=true if the heads share their weights; else fetch the folder again."
            yield finding("error", case.where_in_config("tie_weights"), got, "true", todo)


_SIZES = (
    Size("hidden", ("emb_dim",), stored=((r"^proj\.0\.weight$", 1),)),
    Size("inner", ("inner_dim",), default=0, least=0),
    Size("num_heads", ("n_predict",)),
    Size("vocab", ("vocab_size",), stored=((r"^head\.0\.weight$", 0),)),
    flag("is_tied", "tie_weights", "tie_wts"),
    flag("scales_input", "scale_input"),
)


def _canonical_config(case: Case) -> dict[str, Any]:
    kept = ("architectures", _WIDTHS, "n_candidates", "base_model_name_or_path")
    others = {k: case.config[k] for k in kept if k in case.config}
    return {**others, "model_type": MODEL_TYPE, **config_of_sizes(_SIZES, case.sizes)}


def _config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
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
        _SIZES,
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
        ours=_canonical_config,
        config=_config,
        reads=(_WIDTHS, "n_candidates"),
        probe="speccompile.speculators.mlp.probe:MlpProbe",
    ),
)


class HeadsSource(SpeculatorSource):
    """A `GraphSource` for a target of the sizes that the speculator was made for; the job has `FormOptions`."""

    role = "heads"
    formats = FORMATS
    output_check = staticmethod(check_heads)

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        sizes = sizes_of(self.case)
        self.form = DraftForm.from_options(job.options, sizes.num_heads)
        self.dims: HeadsSizes = replace(sizes, num_drafts=self.form.depth)
        self._check_sizes()

    def _check_sizes(self) -> None:
        sizes = self.dims
        self.check_target("a hidden size of {}", sizes.hidden_size)
        if sizes.num_drafts > sizes.num_heads:
            expected = f"at most {sizes.num_heads}, the heads of {self.job.model}"
            if self.form.choices:
                got, todo = f"a depth of {sizes.num_drafts}", "Take deeper nodes out."
                raise RecipeError("speculator.tree", got, expected, todo)
            raise RecipeError("speculator.num_draft_tokens", str(sizes.num_drafts), expected, "Lower it.")
        check_room(sizes.num_drafts, self.context)

    def spec(self) -> GraphSpec:
        return self.form.spec(self.job.name, self.dims.hidden_size, self.dims.vocab_size)

    def part_of(self, name: str) -> str:
        kind, head, _ = name.split(".")
        return "" if int(head) >= self.dims.num_drafts else "table" if kind == "emb" else "linear"

    def make_module(self) -> torch.nn.Module:
        from speccompile.export.tree_drafters import drafter_from_form
        from speccompile.speculators.mlp.model import MlpExpander, make_heads

        heads = make_heads(self.dims, self.read_weights())
        for part in (heads.emb, heads.proj, heads.head, heads.ln):
            del part[self.dims.num_drafts :]
        return drafter_from_form(MlpExpander(heads), self.form)
