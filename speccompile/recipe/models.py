# SPDX-License-Identifier: Apache-2.0
"""The sections of a recipe as pydantic models: types, bounds, defaults, and what each key means.

A speculator's own keys are not listed here: they are the fields of its method's `Config` dataclass.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from speccompile.core import registry

Quantization = Literal["none", "int8", "int4"]


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TargetSection(Section):
    """The model whose output law is preserved."""

    model: str = Field(
        min_length=1, description="Checkpoint folder (beside the recipe, or in the working directory) or hub id."
    )
    dtype: Literal["float32"] = Field("float32", description="Type of activations and caches.")
    quantization: Quantization = Field("none", description="Form of the weights of linear layers.")
    weights: Literal["checkpoint", "random"] = Field(
        "checkpoint", description="'random' builds from config.json alone, for sizing and speed."
    )
    config: str | None = Field(
        None, min_length=1, description="Folder with the config.json to use where the hub's is not at hand."
    )
    num_layers: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Build the first layers only; with random weights, for sizing."
    )


class EngineSection(Section):
    """How the graphs are compiled and what they are sized for."""

    backend: str = Field("onnxruntime", description="One of the registered backends.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the engines run.")
    max_batch_size: int = Field(1, ge=1, le=1024, description="Slots of the caches.")
    max_seq_len: int = Field(2048, ge=16, description="Rows of the caches: prompt, new tokens and one tree.")
    max_draft_nodes: int = Field(16, ge=1, le=1024, description="Most draft tokens scored in one step.")
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description="Threads of an engine; 'auto' measures at build time."
    )


class DecodingSection(Section):
    """Defaults of a request; each can be overridden by the request."""

    max_new_tokens: int = Field(128, ge=1, description="Most tokens to emit.")
    temperature: float = Field(0.0, ge=0.0, allow_inf_nan=False, description="0 is greedy.")
    top_k: int = Field(0, ge=0, description="Keep the k most probable tokens; 0 is off.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="Keep the smallest set with this mass; 1 is off.")
    seed: int = Field(0, ge=0, lt=2**64, description="Same seed, same text.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="End the text before these strings.")


class SpeculatorSection(Section):
    """The method and its own keys."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    method: str = Field("none", description="One of the registered methods.")


class Recipe(Section):
    """A whole recipe file. `speculator` is validated once its method is known."""

    target: TargetSection
    speculator: SpeculatorSection = Field(default_factory=lambda: SpeculatorSection(method="none"))
    engine: EngineSection = Field(default_factory=lambda: EngineSection.model_validate({}))
    decoding: DecodingSection = Field(default_factory=lambda: DecodingSection.model_validate({}))


def speculator_section(method: str) -> type[Section]:
    """The section of one method: `method` and the fields of its `Config`, as a pydantic model.

    Raises:
        RecipeError: there is no such method.
    """
    config = registry.method(method).Config
    hints = typing.get_type_hints(config)
    fields: dict[str, Any] = {"method": (Literal[method], Field(description="The method's name."))}
    for field in dataclasses.fields(config):
        default: Any = ...
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields[field.name] = (hints[field.name], Field(default))
    return create_model(f"{method}_speculator", __base__=Section, __doc__=config.__doc__, **fields)


def recipe_model(method: str) -> type[Recipe]:
    """`Recipe` with the speculator section of one method."""
    section: Any = speculator_section(method)
    required = any(field.is_required() for name, field in section.model_fields.items() if name != "method")
    default = Field() if required else Field(default_factory=lambda: section(method=method))
    return create_model(f"{method}_recipe", __base__=Recipe, speculator=(section, default))
