# SPDX-License-Identifier: Apache-2.0
"""The frozen plan of a training run."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model

from speccompile.core import registry
from speccompile.core.registry import Method
from speccompile.errors import RecipeError
from speccompile.recipe.models import Recipe, Section
from speccompile.recipe.training import GeneratedSection, TrainingSection
from speccompile.training_contract import Trainer


@dataclass(frozen=True)
class TrainingPlan:
    """All decisions of a training run. `target`: checkpoint folder or hub id of the target."""

    target: str
    method: Method
    heads: Any
    output: Path
    section: TrainingSection

    @property
    def trainer(self) -> Trainer:
        return registry.trainer(self.method.name)

    def json_from_plan(self) -> dict[str, Any]:
        section = self.section.model_dump(mode="json", exclude={"output", "save_every", "threads"})
        return {"target": self.target, **section, "heads": dataclasses.asdict(self.heads)}

    def stage_settings(self, stages: Sequence[str]) -> list[dict[str, Any]]:
        """Returns what the weights after each stage depend on, besides the stages before it; JSON-ready."""
        settings = self.json_from_plan()
        own = {name: {name: settings.pop(name)} for name in ("plain", "generated")}
        del settings["measure_every"]
        return [{**own[name], **({} if index else settings)} for index, name in enumerate(stages)]


def resolve_training(recipe: Recipe, output: Path | None = None) -> TrainingPlan:
    """Decides everything, purely.

    Raises:
        RecipeError: no such section, a wrong key or value of `training.heads`, keys that contradict each other.
    """
    section = recipe.training
    if section is None:
        todo = "See docs/reference/training.md and recipes/train/."
        raise RecipeError("training", "no such section", "a recipe that says what to train", todo)
    if recipe.target.lora is not None:
        todo = "Merge it with PEFT (merge_and_unload, save_pretrained) and train for the merged checkpoint."
        raise RecipeError("target.lora", "an adapter in a training run", "a target as it is", todo)
    if section.joint is not None and section.outputs == "bundle":
        raise RecipeError("training.joint", "training.outputs: bundle", "outputs: weights", "Change one of them.")
    method = registry.trained_method(section.method)
    assert method.TrainingConfig is not None
    with naming_defaults(section):
        _check_steps(section)
        heads = _heads_config(method.TrainingConfig, section.heads)
    return TrainingPlan(recipe.target.model, method, heads, output or Path(section.output), section)


def _check_steps(section: TrainingSection) -> None:
    generated = section.generated
    if generated.steps and "prompt_tokens" in generated.model_fields_set:
        check_prompt_tokens(generated)
    if not section.plain.steps and not generated.steps:
        raise RecipeError("training.plain.steps", "0 in both stages", "at least one step", "Raise one of them.")


def check_prompt_tokens(generated: GeneratedSection) -> None:
    """Checks that prompts cut from texts leave room; those of conversations have their own length."""
    if generated.prompt_tokens >= generated.seq_len:
        got = f"{generated.prompt_tokens} with seq_len {generated.seq_len}"
        raise RecipeError("training.generated.prompt_tokens", got, "room for new tokens", "Lower it.")


@contextlib.contextmanager
def naming_defaults(section: TrainingSection) -> Iterator[None]:
    """Says in an error about a key of the section that nobody wrote that it is about its default."""
    try:
        yield
    except RecipeError as fault:
        node: Any = section
        first, *path = fault.where.split(".")
        for name in path if first == "training" else ():
            known = dict(node) if isinstance(node, BaseModel) else node
            written = node.model_fields_set if isinstance(node, BaseModel) else known
            if not isinstance(known, dict):
                break
            node = known.get(name)
            if name not in written:
                got = f"{fault.got}, by default: {fault.where} is not written"
                raise RecipeError(fault.where, got, fault.expected, fault.todo) from fault
        raise


def _heads_config(config: type[Any], given: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(config)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        fields[field.name] = (hints[field.name], Field(... if field.default is dataclasses.MISSING else field.default))
    model = create_model("heads", __base__=Section, **fields)
    try:
        checked = model.model_validate(given, strict=False)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(("training.heads", *(str(part) for part in fault["loc"])))
        got = "an unknown key" if fault["type"] == "extra_forbidden" else repr(fault.get("input"))
        expected = f"one of {', '.join(fields)}" if fault["type"] == "extra_forbidden" else str(fault["msg"])
        raise RecipeError(key, got, expected, "Correct the recipe.") from error
    return config(**{name: getattr(checked, name) for name in fields})
