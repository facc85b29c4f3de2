# SPDX-License-Identifier: Apache-2.0
"""The sections of a recipe as pydantic models: types, bounds, defaults, and what each key means.

A speculator's own keys are not listed here: they are the fields of its method's `Config` dataclass.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from speccompile.core import registry
from speccompile.core.parameters import Parameter, parameters
from speccompile.core.sampling import SamplingParams
from speccompile.recipe.training import TrainingSection

Quantization = Literal["none", "int8", "int4", "fp8"]
Range = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]


def _check_range(value: Range | str) -> Range | str:
    if not isinstance(value, str) and not value[0] <= value[1] <= value[2]:
        raise ValueError("three sizes in rising order: min, opt, max")
    return value


SizeRange = Annotated[Range | Literal["auto"], AfterValidator(_check_range)]
# YAML reads 12.0 as a number.
ComputeCapability = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if isinstance(value, float) else value),
    Field(pattern=r"^[0-9]+\.[0-9]$", json_schema_extra={"type": ["string", "number"]}),
]


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TargetSection(Section):
    """The model whose output law is preserved."""

    model: str = Field(
        min_length=1, description="Checkpoint folder (beside the recipe, or in the working directory) or hub id."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of activations and caches; 'auto' is the backend's own."
    )
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


class ProfileSection(Section):
    """Sizes that one TensorRT optimization profile serves: [min, opt, max], or 'auto' from the model."""

    batch: SizeRange = Field("auto", description="Sequences of a step.")
    nodes: SizeRange = Field("auto", description="Tokens of a step, per sequence.")
    kv: SizeRange = Field("auto", description="Cache rows that a step attends to.")


class TensorRTSection(Section):
    """What the TensorRT backend alone reads."""

    compute_capabilities: tuple[ComputeCapability, ...] = Field(
        (), description="GPUs the plans are for, e.g. [12.0]; empty: as the flavour chooses."
    )
    prefill: ProfileSection = Field(
        default_factory=lambda: ProfileSection.model_validate({}), description="The profile that reads prompts."
    )
    decode: ProfileSection = Field(
        default_factory=lambda: ProfileSection.model_validate({}), description="The profile that scores drafts."
    )
    workspace_gib: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | Literal["auto"] = Field(
        "auto", description="Most GPU memory for the scratch space of kernels; 'auto' leaves it to TensorRT."
    )
    weight_streaming: bool = Field(False, description="Stream weights from host memory where the GPU has no room.")
    optimization_level: Annotated[int, Field(ge=0, le=5)] | Literal["auto"] = Field(
        "auto", description="How long the builder searches, 0 to 5; full TensorRT only."
    )
    timing_cache: bool = Field(True, description="Keep measured kernels for the next build; full TensorRT only.")
    max_build_gib: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | Literal["auto"] = Field(
        "auto", description="End a builder that holds more memory than this; 'auto' sets no limit but the machine's."
    )
    keep_onnx: bool = Field(False, description="Keep the lowered ONNX beside each plan.")


class EngineSection(Section):
    """How the graphs are compiled and what they are sized for."""

    backend: str = Field("onnxruntime", description="One of the registered backends.")
    flavour: Literal["auto", "tensorrt", "tensorrt_rtx"] = Field(
        "auto", description="Which TensorRT builds; 'auto' is the one that is installed."
    )
    plugins: Literal["auto", "native", "aot", "none"] = Field(
        "auto",
        description="Custom kernels in TensorRT's plans: 'native', 'aot' to embed them as PTX (full TensorRT only), or "
        "'none' for standard operators alone.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the engines run; 'auto' is the backend's first."
    )
    max_batch_size: int = Field(1, ge=1, le=1024, description="Slots of the caches.")
    max_seq_len: int = Field(2048, ge=16, description="Rows of the caches: prompt, new tokens and one tree.")
    max_draft_nodes: int = Field(16, ge=1, le=1024, description="Most draft tokens scored in one step.")
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description="Threads of an engine; 'auto' measures at build time."
    )
    logits: bool | Literal["auto"] = Field(
        "auto",
        description="The target gives its logits, which requests with min_p, penalties or logit_bias need; 'auto': "
        "where that costs nothing.",
    )
    tensorrt: TensorRTSection = Field(
        default_factory=lambda: TensorRTSection.model_validate({}), description="What the TensorRT backend alone reads."
    )


def decoding_section(params: type[SamplingParams] = SamplingParams) -> type[Section]:
    """Returns the recipe's `decoding` section: the sampling parameters that are declared for the recipe.

    Args:
        params: where they are declared.
    """
    hints = typing.get_type_hints(params)
    fields: dict[str, Any] = {
        name: _decoding_field(hints[name], getattr(params, name), declared)
        for name, declared in parameters(params).items()
        if declared.in_recipe
    }
    doc = "Defaults of a request; each can be overridden by the request."
    return create_model("DecodingSection", __base__=Section, __module__=__name__, __doc__=doc, **fields)


def _decoding_field(hint: Any, default: Any, declared: Parameter) -> tuple[Any, Any]:
    bounds = {"ge": declared.ge, "gt": declared.gt, "le": declared.le, "lt": declared.lt}
    given: dict[str, Any] = {key: bound for key, bound in bounds.items() if bound not in (None, float("inf"))}
    if declared.lt == float("inf"):
        given["allow_inf_nan"] = False
    hint = tuple[Annotated[str, Field(min_length=1)], ...] if hint == tuple[str, ...] else hint
    return hint, Field(default, description=declared.description, **given)


DecodingSection: Any = decoding_section()


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
    training: TrainingSection | None = Field(None, description="How a speculator is trained for the target.")


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
