# SPDX-License-Identifier: Apache-2.0
"""Predicts every candidate in every form of the weights that its backend has, and the settings of the chosen one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from speccompile.backends.base import Backend
from speccompile.checkpoints.folders import find_config
from speccompile.checkpoints.tensor_files import has_grids
from speccompile.core import registry
from speccompile.core.jobs import STORED
from speccompile.errors import RecipeError, SpecCompileError
from speccompile.planner.acceptance import NOTHING
from speccompile.planner.candidates import PLAIN, Candidate, candidates_of_source
from speccompile.planner.costs import Graphs, graphs_of_plan
from speccompile.planner.machine import Machine
from speccompile.planner.outlook import Row, rows_of
from speccompile.planner.traffic import Traffic
from speccompile.prepare import is_recipe, plan_from_source
from speccompile.recipe import load_recipe
from speccompile.recipe.model_recipe import ModelOptions
from speccompile.recipe.plan import AUTO
from speccompile.recipe.speculative_config import METHOD

_QUANTIZATION = "target.quantization"
GPU_BACKEND = "engine.backend=tensorrt"


def settings_for(machine: Machine, source: str, model: ModelOptions) -> ModelOptions:
    """Returns the options with the backend of a GPU, unless the user names one, or a recipe's is for GPUs."""
    if machine.kind != "gpu" or any(setting.startswith("engine.backend=") for setting in model.settings):
        return model
    if is_recipe(source) and load_recipe(source, model.settings).engine.device == "cuda":
        return model
    return replace(model, settings=(*model.settings, GPU_BACKEND))


def forecast(
    source: str,
    model: ModelOptions,
    machine: Machine,
    traffic: Traffic,
    batches: Sequence[int],
    context: int,
    speculators: Sequence[str] = (),
    names: str | None = None,
    leave_out: Callable[[str, SpecCompileError], None] = lambda name, fault: None,
) -> list[tuple[Row, ModelOptions]]:
    """Returns the rows by batch and speed, each with the options that build it.

    Args:
        context: number of cache rows in use of each sequence.
        leave_out: is called with the name of a candidate that this target cannot have, and why.
    """
    model = settings_for(machine, source, model)
    candidates = candidates_of_source(source, model, speculators, names)
    names_known = {name for one in candidates for name in (one.name, one.section[METHOD])}
    for name in traffic.given:
        if name and name not in names_known:
            expected = f"a candidate or its method: {', '.join(sorted(names_known))}"
            raise RecipeError("--acceptance", name, expected, "Correct the name.")
    known = {one.name: NOTHING if one.name == PLAIN else traffic.acceptance(one) for one in candidates}
    for name in [name for name, found in known.items() if found is None]:
        todo = f"Give --acceptance {name}=RATES, or --traffic with a record."
        leave_out(name, RecipeError("acceptance", "none that is known for such text", "rates by position", todo))
    acceptance = {name: found for name, found in known.items() if found is not None}
    candidates = [one for one in candidates if one.name in acceptance]
    rows: dict[tuple[str, str, int], tuple[Row, ModelOptions]] = {}
    for form in forms(source, model):
        setting = f"{_QUANTIZATION}={form}"
        graphs: dict[str, Graphs] = {}
        for one in candidates:
            try:
                graphs[one.name] = graphs_of_plan(plan_from_source(source, one.options(model, setting)))
            except SpecCompileError as fault:
                leave_out(f"{one.name} ({form})", fault)
        by_name = {one.name: one for one in candidates}
        for row in rows_of(graphs, machine, acceptance, batches, context):
            sizes = f"engine.max_batch_size={row.batch}"
            found = row, by_name[row.method].options(model, setting, sizes)
            rows.setdefault((row.method, row.precision, row.batch), found)  # `none` may be another form's name
    return sorted(rows.values(), key=lambda found: (found[0].batch, -found[0].speed))


def forms(source: str, model: ModelOptions) -> list[str]:
    """Returns the quantisations to compare: the user's, that of quantised weights, or all that the backend has."""
    given = [setting.partition("=")[2] for setting in model.settings if setting.startswith(f"{_QUANTIZATION}=")]
    if is_recipe(source):
        target = load_recipe(source, model.settings).target
        is_chosen = "quantization" in target.model_fields_set and target.quantization != AUTO
        given += [target.quantization] * is_chosen
    if given:
        return given[-1:]
    plan = plan_from_source(source, Candidate(PLAIN, {"method": PLAIN}).options(model))
    backend: Backend = registry.backend(plan.engine.backend, plan.engine.device)
    if plan.weights == "checkpoint" and has_grids(find_config(plan.target)):
        return [STORED]
    return [form for form in backend.quantizations if form not in (STORED, AUTO)]
