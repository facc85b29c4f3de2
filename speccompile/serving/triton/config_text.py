# SPDX-License-Identifier: Apache-2.0
"""config.pbtxt: Triton's text form of a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from speccompile.serving.triton.contract import TRITON_TYPES, Tensor

BACKEND = "speccompile"


@dataclass(frozen=True)
class Step:
    """One step of an ensemble."""

    model: str
    inputs: Mapping[str, str]  # the model's input -> the ensemble's tensor
    outputs: Mapping[str, str]  # the model's output -> the ensemble's tensor


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a model for Triton."""

    name: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    backend: str = BACKEND  # a backend's name; empty for an ensemble
    max_batch_size: int = 0  # 0: tensors have the dims that are declared; above: one more in front
    is_decoupled: bool = False  # an answer may have any number of responses
    parameters: Mapping[str, str] = field(default_factory=dict)
    steps: Sequence[Step] = ()
    kind: str = "KIND_CPU"  # where an instance lives: KIND_CPU or KIND_GPU; empty: left to the backend
    num_instances: int = 1
    num_profiles: int = 0  # of a TensorRT plan; an instance has the first alone unless they are named
    comment: Sequence[str] = ()


def text_from_config(config: ModelConfig) -> str:
    """Returns the file's contents."""
    lines = [f"# {line}" for line in config.comment]
    lines.append(f"name: {_quoted(config.name)}")
    lines.append('platform: "ensemble"' if config.steps else f"backend: {_quoted(config.backend)}")
    lines.append(f"max_batch_size: {config.max_batch_size}")
    if config.is_decoupled:
        lines.append("model_transaction_policy { decoupled: true }")
    if config.kind and not config.steps:
        # Without a list Triton starts an instance for each GPU of the server, and ours would all run on the first.
        gpus = " gpus: [ 0 ]" if (config.kind, config.backend) == ("KIND_GPU", BACKEND) else ""
        names = ", ".join(f'"{index}"' for index in range(config.num_profiles))
        profiles = f" profile: [ {names} ]" if names else ""
        lines.append(f"instance_group [ {{ count: {config.num_instances} kind: {config.kind}{gpus}{profiles} }} ]")
    lines += _tensors("input", config.inputs)
    lines += _tensors("output", config.outputs)
    for key, value in config.parameters.items():
        lines.append(f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}")
    if config.steps:
        lines += ["ensemble_scheduling {", *(line for step in config.steps for line in _step(step)), "}"]
    return "\n".join(lines) + "\n"


def _tensors(kind: str, tensors: Sequence[Tensor]) -> list[str]:
    rows = []
    for tensor in tensors:
        dims = ", ".join(str(dim) for dim in tensor.dims)
        optional = " optional: true" if kind == "input" and tensor.is_optional else ""
        rows.append(
            f"  {{ name: {_quoted(tensor.name)} data_type: {TRITON_TYPES[tensor.dtype]} dims: [ {dims} ]{optional} }}"
        )
    return [f"{kind} [", ",\n".join(rows), "]"]


def _step(step: Step) -> list[str]:
    lines = [f"  step {{ model_name: {_quoted(step.model)} model_version: -1"]
    for field_name, links in (("input_map", step.inputs), ("output_map", step.outputs)):
        lines += [f"    {field_name} {{ key: {_quoted(k)} value: {_quoted(v)} }}" for k, v in links.items()]
    return [*lines, "  }"]


def _quoted(text: str) -> str:
    # The escapes of protobuf's text format are JSON's for everything that names and paths hold.
    return json.dumps(text, ensure_ascii=False)
