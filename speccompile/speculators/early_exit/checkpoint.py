# SPDX-License-Identifier: Apache-2.0
"""Early-exit heads (our layout: an adapter and a norm), and the target's first layers as a draft's source. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from speccompile.checkpoints.checkpoint import optional_number, read_config, stated_size
from speccompile.checkpoints.folders import digests_from_checkpoint, find_folder
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.doctor.doctor import check_method, check_speculator, read_speculator
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, finding, unchanged
from speccompile.errors import RecipeError
from speccompile.export.target_layers import TargetLayersSource
from speccompile.speculators.early_exit.config import MODEL_TYPE, ExitOptions


def _check_layers(case: Case) -> Iterator[Finding]:
    num_layers, target = case.sizes.get("num_exit_layers"), case.target
    if target is not None and num_layers is not None and not 1 <= num_layers < target.dims.num_layers:
        expected = f"1 to {target.dims.num_layers - 1}, the layers of {target.name} but its last"
        todo = "It was trained for another target: give the model that it belongs to."
        yield finding("error", case.where_in_config("num_exit_layers"), str(num_layers), expected, todo)


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
        config=unchanged,
        reads=("rms_norm_eps",),
        fixed={"hidden_act": ("silu", "swish")},
    ),
)


@dataclass(frozen=True)
class ExitDims(ModelDims):
    """Sizes of the first layers."""

    adapter_size: int = 0  # inner size of the head's adapter; 0: there is no head
    rms_norm_eps: float = 1e-5


class ExitSource(TargetLayersSource):
    """A `speccompile.core.protocols.GraphSource`. The job has `ExitOptions`."""

    dims: ExitDims

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        options: ExitOptions = job.options
        self.head_folder = find_folder(job, context.weights, SPECULATOR_FILES) if options.has_head else None
        if self.head_folder is not None and context.weights == "checkpoint":
            check_method(self.head_folder, FORMATS[0].method)
        head = {} if self.head_folder is None else _read_head(self.head_folder, self.of_target)
        self.dims = self._read_dims(options.num_exit_layers, head)
        self.layers = range(self.dims.num_layers)

    def _read_dims(self, of_recipe: int | None, head: dict[str, Any]) -> ExitDims:
        target = self.of_target
        trained, is_random = head.get("num_exit_layers"), self.context.weights == "random"
        if of_recipe is not None and trained is not None and of_recipe != trained and not is_random:
            todo = "Leave speculator.num_exit_layers out, or give another head."
            raise RecipeError("speculator.num_exit_layers", f"{of_recipe}", f"{trained}, as the head was trained", todo)
        num = of_recipe or trained or max(target.num_layers // 2, 1)
        if not 1 <= num < target.num_layers:
            expected = f"1 to {target.num_layers - 1}, the target's layers but its last"
            raise RecipeError("speculator.num_exit_layers", f"{num}", expected, "Lower it.")
        sizes = {f.name: getattr(target, f.name) for f in fields(ModelDims)}
        where, inner = str(self.head_folder), int(head.get("intermediate_size", 0))
        eps = optional_number(f"{where}/config.json", head, "rms_norm_eps", 1e-5)
        return ExitDims(**{**sizes, "num_layers": num, "num_params": 0}, adapter_size=inner, rms_norm_eps=eps)

    def check(self) -> None:
        if self.head_folder is not None:
            check_speculator(self.head_folder, FORMATS, self.of_target)

    def digests(self) -> dict[str, str]:
        made = super().digests()
        if self.head_folder is not None:
            made |= digests_from_checkpoint(self.head_folder, self.context.weights, SPECULATOR_FILES)
        return made

    def prepare(self, model: Any, dims: ModelDims) -> ModelDims:
        from speccompile.speculators.early_exit.model import ExitSizes, make_head, replace_norm

        made = self.dims
        if self.head_folder is not None:
            is_random = self.context.weights == "random"
            weights = None if is_random else read_speculator(self.head_folder, FORMATS)[1]
            sizes = ExitSizes(made.hidden_size, made.vocab_size, made.num_layers, made.adapter_size, made.rms_norm_eps)
            replace_norm(model, make_head(sizes, weights))
        return super().prepare(model, dims)


def _read_head(folder: Path, target: ModelDims) -> dict[str, Any]:
    config = read_config(folder)
    for name in ("hidden_size", "vocab_size", "num_exit_layers", "intermediate_size"):
        stated_size(folder, config, name, "Give the folder of an early-exit head.")
    for name, want in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config[name] != want:
            todo = "Choose the head that was trained for this target."
            raise RecipeError("speculator.model", f"{name} {config[name]}", f"{want}, as the target has", todo)
    return config
