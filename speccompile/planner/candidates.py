# SPDX-License-Identifier: Apache-2.0
"""The speculation methods that a plan compares: those that need no other model, and the drafters that are given."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.core import registry
from speccompile.core.jobs import TargetOutputs
from speccompile.core.registry import SECTIONS, Method
from speccompile.errors import RecipeError
from speccompile.prepare import is_recipe, plan_from_source
from speccompile.recipe import load_recipe
from speccompile.recipe.model_recipe import ModelOptions
from speccompile.recipe.speculative_config import METHOD, MODEL, section_from_config

PLAIN = "none"


@dataclass(frozen=True)
class Candidate:
    """A method with its fields."""

    name: str
    section: Mapping[str, Any]  # the recipe's `speculator`

    @property
    def is_several(self) -> bool:
        return any(field.metadata.get(SECTIONS) for field in fields(registry.method(self.section[METHOD]).Config))

    @property
    def needs_graphs(self) -> bool:
        """Whether a bundle of the target alone lacks what it reads."""
        method = registry.method(self.section[METHOD])
        config = method.Config(**{key: value for key, value in self.section.items() if key != METHOD})
        return bool(method.graph_jobs(config)) or method.target_outputs(config) != TargetOutputs()

    def options(self, model: ModelOptions, *settings: str) -> ModelOptions:
        """Returns the options with which this method is built, with more settings."""
        return replace(model, settings=(*model.settings, *settings, f"speculator={json.dumps(dict(self.section))}"))


def candidates_of_source(
    source: str, model: ModelOptions, speculators: Sequence[str] = (), names: str | None = None
) -> list[Candidate]:
    """Returns the candidates for a model or a recipe's file; the recipe's own method is one; see `find_candidates`."""
    plain = Candidate(PLAIN, {METHOD: PLAIN})
    plan = plan_from_source(source, plain.options(model))
    folder = resolve_checkpoint(plan.target.model) if plan.weights == "checkpoint" else None
    own = load_recipe(source, model.settings).speculator.model_dump() if is_recipe(source) else None
    return find_candidates(folder, speculators, names, own)


def context_of_source(source: str, model: ModelOptions, wanted: int | None, usual: int) -> int:
    """Returns how many tokens of a sequence are looked at. Raises RecipeError: more are wanted than caches hold."""
    most = plan_from_source(source, Candidate(PLAIN, {METHOD: PLAIN}).options(model)).engine.max_seq_len
    if wanted is not None and wanted > most:
        expected, todo = f"at most {most}, which the caches hold", "Lower it, or raise --max-seq-len."
        raise RecipeError("--context", f"{wanted} tokens", expected, todo)
    return wanted or min(usual, most)


def find_candidates(
    folder: Path | None, speculators: Sequence[str] = (), names: str | None = None, own: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Returns what to compare; plain decoding is the first.

    These are: methods that need neither a model nor training, the target's own modules, the given speculators, and each
    of those with a graph beside the default method that has none.

    Args:
        folder: the target's checkpoint; None: it has no weights, so no modules of its own.
        names: comma-separated, of those above; None: all.
        own: the section of a recipe, which is one more; None: there is no recipe.

    Raises:
        RecipeError: one of the names is no candidate.
        CheckpointError: a speculator cannot be read.
    """
    found: dict[str, Candidate] = {}
    lookup = None
    for method in registry.all_methods():
        section = _own_section(method, folder)
        if section is not None:
            found[method.name] = Candidate(method.name, section)
            if method.default_section and not found[method.name].needs_graphs:
                lookup = found[method.name]
    for model in speculators:
        path = Path(model).expanduser()
        section = section_from_config({MODEL: os.path.abspath(path) if path.exists() else model})
        name = path.name if path.name not in found else model
        found[name] = Candidate(name, section)
    if lookup is not None:
        for one in [one for one in found.values() if one.needs_graphs]:
            name = f"{lookup.name}+{one.name}"
            found[name] = Candidate(name, registry.section_of([lookup.section, one.section]))
    if own is not None and own[METHOD] != PLAIN:
        found["recipe"] = Candidate("recipe", own)
    return list(found.values()) if names is None else _named(found, names)


def _own_section(method: Method, folder: Path | None) -> Mapping[str, Any] | None:
    """Returns the section with which a method drafts for a target without another model; None: it does not."""
    if any(f.default is MISSING and f.default_factory is MISSING for f in fields(method.Config)):
        return None
    section: Mapping[str, Any] | None = None if method.trainer else {}
    if method.trainer and method.default_section:
        section = None if folder is None else registry.find_class(method.default_section)(folder)
    return None if section is None else {METHOD: method.name, **section}


def _named(found: Mapping[str, Candidate], names: str) -> list[Candidate]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted or (unknown := [name for name in wanted if name not in found]):
        got = repr(names) if not wanted else repr(unknown[0])
        raise RecipeError("--methods", got, f"some of {', '.join(found)}", "Correct it; --speculator adds drafters.")
    chosen = [one for name, one in found.items() if name == PLAIN or name in wanted]
    if len(chosen) < 2:
        raise RecipeError("--methods", "plain decoding alone", "a method to compare it with", "Name another one.")
    return chosen
