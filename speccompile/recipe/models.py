# SPDX-License-Identifier: Apache-2.0
"""The sections of a recipe as pydantic models: types, bounds, defaults, the meaning of each key, the JSON schema.

The keys of a speculator and of a backend are not listed here: they are the fields of their `Config` dataclasses.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from speccompile.common.parameters import METADATA_KEY, Parameter, parameters, sampling_parameters
from speccompile.core import registry
from speccompile.core.registry import SECTIONS
from speccompile.core.sampling_params import SamplingParams
from speccompile.recipe.training import TrainingSection

KeyPath = tuple[str, ...]
Quantization = Literal["none", "bf16", "int8", "int4", "fp8", "stored", "auto"]
AUTO_TEXTS, NO_TEXTS = "auto", "none"  # values of target.calibration that are no file


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TargetSection(Section):
    """The model whose output distribution is preserved."""

    model: str = Field(
        min_length=1, description="Checkpoint folder (beside the recipe, or in the working directory) or hub id."
    )
    lora: str | None = Field(
        None, min_length=1, description="LoRA adapter in PEFT's layout, folder or hub id, merged into the weights."
    )
    adapters: dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]] = Field(
        {}, description="LoRA adapters by name, folders or hub ids, of which each request chooses one or none."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Type of activations and caches; 'auto' is the backend's own, with TensorRT the checkpoint's.",
    )
    quantization: Quantization = Field(
        "stored",
        description="Form of the weights of linear layers: 'stored' keeps them as they are, floats or levels; 'auto' "
        "does so with levels, and keeps the fastest form that is close to float32 of floats.",
    )
    calibration: str = Field(
        AUTO_TEXTS,
        min_length=1,
        description="Text over which int4 weights are chosen and forms are compared with float32: a text file or JSONL "
        "prompts; 'auto' is the model's own answers to prompts, 'none' the same with weights that are rounded.",
    )
    weights: Literal["checkpoint", "random"] = Field(
        "checkpoint", description="'random' builds from config.json alone, for sizing and speed."
    )
    config: str | None = Field(
        None, min_length=1, description="Folder with the config.json to use where the hub's is not at hand."
    )
    num_layers: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Build the first layers only; with random weights, for sizing."
    )
    vision: bool = Field(
        False, description="Build the checkpoint's vision tower too: prompts may have images. Gemma 3."
    )


class EngineSection(Section):
    """How the graphs are compiled, and their sizes."""

    # `engine_section` adds the fields of one backend only, as declared by its `Config`.

    backend: str = Field("onnxruntime", description="One of the registered backends.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the engines run; 'auto' is the backend's first."
    )
    max_batch_size: int = Field(1, ge=1, le=1024, description="Slots of the caches.")
    max_seq_len: int = Field(2048, ge=16, description="Rows of the caches: prompt, new tokens and one tree.")
    max_draft_nodes: int = Field(16, ge=1, le=1024, description="Most draft tokens scored in one step.")
    kv_cache: Literal["auto", "int8"] = Field(
        "auto",
        description="Rows of the target's caches: 'auto' has target.dtype, 'int8' a scale for 32 columns of a head.",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description="Threads of an engine; 'auto' measures at build time."
    )
    logits: bool | Literal["auto"] = Field(
        "auto",
        description="The target gives its logits, which requests with min_p, penalties or logit_bias need; 'auto': "
        "where that costs nothing.",
    )
    synthetic_acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (),
        description="For benchmarks: probabilities that the draft at depth 1, 2, ... is kept, given those before it; "
        "draws decide in the target's place, and texts are not the target's.",
    )


def decoding_section(params: type[SamplingParams] = SamplingParams) -> type[Section]:
    """Returns the recipe's `decoding` section: the sampling parameters that are declared for the recipe."""
    declared = {name: p for name, p in sampling_parameters(params).items() if p.in_recipe}
    doc = "Defaults of a request; each can be overridden by the request."
    section: type[Section] = _section("DecodingSection", doc, _declared_fields(params, declared))
    return section


def _section(name: str, doc: str | None, fields: dict[str, Any], base: type[Section] = Section) -> Any:
    return create_model(name, __base__=base, __module__=__name__, __doc__=doc, **fields)


def _declared_fields(owner: type, declared: Mapping[str, Parameter]) -> dict[str, Any]:
    hints = typing.get_type_hints(owner)
    defaults = {field.name: field.default for field in dataclasses.fields(owner)}
    return {name: _declared_field(hints[name], defaults[name], rule) for name, rule in declared.items()}


def _declared_field(hint: Any, default: Any, declared: Parameter) -> tuple[Any, Any]:
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        section = _section(hint.__name__, hint.__doc__, _declared_fields(hint, parameters(hint)))
        return section, Field(default_factory=section, description=declared.description)
    bounds = {"ge": declared.ge, "gt": declared.gt, "le": declared.le, "lt": declared.lt}
    given: dict[str, Any] = {key: bound for key, bound in bounds.items() if bound not in (None, float("inf"))}
    if declared.lt == float("inf"):
        given["allow_inf_nan"] = False
    hint = tuple[Annotated[str, Field(min_length=1)], ...] if hint == tuple[str, ...] else _bounded(hint, given)
    if declared.check is not None:
        hint = Annotated[hint, AfterValidator(declared.check)]
    return hint, Field(default, description=declared.description)


def _bounded(hint: Any, bounds: Mapping[str, Any]) -> Any:
    if not bounds:
        return hint
    if hint in (int, float):
        return Annotated[hint, Field(**bounds)]
    args: Any = tuple(_bounded(arg, bounds) for arg in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return tuple[args]
    return typing.Union[args] if typing.get_origin(hint) in (typing.Union, types.UnionType) else hint  # noqa: UP007


DecodingSection: Any = decoding_section()


class SpeculatorSection(Section):
    """The method and its own keys."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    method: str = Field("none", description="One of the registered methods.")


class Recipe(Section):
    """A whole recipe file. `speculator` is validated when its method is known."""

    target: TargetSection
    speculator: SpeculatorSection = Field(default_factory=lambda: SpeculatorSection(method="none"))
    engine: EngineSection = Field(default_factory=lambda: EngineSection.model_validate({}))
    decoding: DecodingSection = Field(default_factory=lambda: DecodingSection.model_validate({}))
    training: TrainingSection | None = Field(None, description="How a speculator is trained for the target.")


def speculator_section(method: str) -> type[Section]:
    """Returns the section of one method: `method` and the fields of its `Config`, as a pydantic model."""
    config: Any = registry.method(method).Config
    return _speculator_section(method, config)


# Sections are kept by the classes that declare them: pydantic takes 30 ms to make those of one recipe.
@functools.cache
def _speculator_section(method: str, config: type[Any]) -> type[Section]:
    hints = typing.get_type_hints(config)
    fields: dict[str, Any] = {"method": (Literal[method], Field(description="The method's name."))}
    for field in dataclasses.fields(config):
        default: Any = ...
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        hint: Any = hints[field.name]
        if field.metadata.get(SECTIONS):
            hint = types.GenericAlias(tuple, (_any_section(), ...))
        fields[field.name] = (hint, Field(default, json_schema_extra=_bounds_of(field)))
    return create_model(f"{method}_speculator", __base__=Section, __doc__=config.__doc__, **fields)


def _bounds_of(field: dataclasses.Field[Any]) -> dict[str, Any] | None:
    rule = field.metadata.get(METADATA_KEY, Parameter())
    bounds = {"minimum": rule.ge, "exclusiveMinimum": rule.gt, "maximum": rule.le, "exclusiveMaximum": rule.lt}
    return {name: bound for name, bound in bounds.items() if bound is not None} or None


def _any_section() -> Any:
    configs: dict[str, Any] = {found.name: found.Config for found in registry.all_methods()}
    names = [n for n, c in configs.items() if not any(f.metadata.get(SECTIONS) for f in dataclasses.fields(c))]
    sections = tuple(_speculator_section(name, configs[name]) for name in names)
    return Annotated[typing.Union[sections], Field(discriminator="method")]  # noqa: UP007


def backend_section(name: str) -> type[Section] | None:
    """Returns the section `engine.NAME` of a backend, from the fields of its `Config`; None: it has none."""
    config = registry.backend(name).Config
    return None if config is None else _backend_section(name, config)


@functools.cache
def _backend_section(name: str, config: type[Any]) -> type[Section]:
    declared = {key: rule for key, rule in parameters(config).items() if not rule.beside_section}
    section: type[Section] = _section(f"{name}_engine", config.__doc__, _declared_fields(config, declared))
    return section


def engine_section(*plugins: str) -> type[EngineSection]:
    """Returns `EngineSection` with the sections of registered backends and of `plugins`, and their keys beside them."""
    names = dict.fromkeys((*registry.BACKENDS, *plugins))
    return _engine_section(tuple((name, registry.backend(name).Config) for name in names))


@functools.cache
def _engine_section(configs: tuple[tuple[str, Any], ...]) -> type[EngineSection]:
    fields: dict[str, Any] = {}
    for name, config in configs:
        if config is not None:
            section = _backend_section(name, config)
            beside = {key: rule for key, rule in parameters(config).items() if rule.beside_section}
            fields |= _declared_fields(config, beside)
            fields[name] = section, Field(default_factory=section, description=section.__doc__)
    model: type[EngineSection] = _section("EngineSection", EngineSection.__doc__, fields, EngineSection)
    return model


def backend_config(config: type[Any], values: Mapping[str, Any]) -> Any:
    """Returns the `Config` of a backend."""
    hints = typing.get_type_hints(config)
    names = [field.name for field in dataclasses.fields(config)]
    return config(
        **{n: backend_config(hints[n], values[n]) if dataclasses.is_dataclass(hints[n]) else values[n] for n in names}
    )


def recipe_model(method: str, *plugins: str) -> type[Recipe]:
    return _recipe_model(method, speculator_section(method), engine_section(*plugins))


@functools.cache
def _recipe_model(method: str, section: Any, engine: Any) -> type[Recipe]:
    required = any(field.is_required() for name, field in section.model_fields.items() if name != "method")
    default = Field() if required else Field(default_factory=lambda: section(method=method))
    return create_model(
        f"{method}_recipe",
        __base__=Recipe,
        speculator=(section, default),
        engine=(engine, Field(default_factory=engine)),
    )


def schema_from_registry() -> dict[str, Any]:
    """Returns the schema of a recipe file; `speculator` is one of the sections of the registered methods."""
    engine: Any = engine_section()
    model = create_model("Recipe", __base__=Recipe, engine=(engine, Field(default_factory=engine)))
    schema = model.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    definitions.pop("SpeculatorSection")
    sections = []
    for name in sorted(registry.METHODS):
        section = speculator_section(name).model_json_schema()
        definitions.update(section.pop("$defs", {}))
        section["required"] = sorted({"method", *section.get("required", ())})
        definitions[section["title"]] = section
        sections.append({"$ref": f"#/$defs/{section['title']}"})
    for name in ("speculator", "engine", "decoding"):
        schema["properties"][name].pop("default", None)
    schema["properties"]["speculator"] = {"oneOf": sections, "description": "The method and its own keys."}
    backend = definitions["EngineSection"]["properties"]["backend"]
    backend["enum"] = sorted(registry.BACKENDS)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "speccompile recipe",
        **{k: v for k, v in schema.items() if k not in ("title", "description")},
    }


def text_from_schema() -> str:
    return json.dumps(schema_from_registry(), indent=2, sort_keys=False) + "\n"


def known_keys(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yields the paths of all keys of a recipe's model, sections included."""
    for name, info in model.model_fields.items():
        yield (*prefix, name)
        for kind in (info.annotation, *typing.get_args(info.annotation)):  # a section, or a section or none
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from known_keys(kind, (*prefix, name))


def hint_for_key(path: KeyPath, known: set[KeyPath], siblings: Sequence[str]) -> str:
    """Returns the advice for an unknown key: the one that it may stand for, or those of its section."""
    near = difflib.get_close_matches(path[-1], siblings, n=1)
    elsewhere = sorted((".".join(k) for k in known if k[-1] == path[-1]), key=_is_not_of_target)
    if near:
        return f"Did you mean {'.'.join((*path[:-1], near[0]))!r}?"
    if elsewhere:
        return f"Did you mean {elsewhere[0]!r}?"
    able = sorted(k for k in known if len(k) > 1 or len(path) == 1)  # a section is not suggested inside another one
    far = difflib.get_close_matches(path[-1], [k[-1] for k in able], n=1)
    if far:
        dotted = next(".".join(k) for k in able if k[-1] == far[0])
        return f"Did you mean {dotted!r}?"
    return f"Known keys: {', '.join(siblings)}." if siblings else "See docs/reference/recipe.md."


def _is_not_of_target(name: str) -> tuple[bool, str]:
    return not name.startswith("target."), name
