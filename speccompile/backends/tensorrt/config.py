# SPDX-License-Identifier: Apache-2.0
"""Recipe fields that only the TensorRT backend reads: `engine.variant`, `engine.plugins` and `engine.tensorrt`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from speccompile.common.parameters import parameter
from speccompile.core.jobs import CompileOptions

SizeRange = tuple[int, int, int] | Literal["auto"]
_CAPABILITY = re.compile(r"[0-9]+\.[0-9]")


def _check_range(value: SizeRange) -> SizeRange:
    if not isinstance(value, str) and not value[0] <= value[1] <= value[2]:
        raise ValueError("three sizes in rising order: min, opt, max")
    return value


def _check_capabilities(values: tuple[str | float, ...]) -> tuple[str, ...]:
    texts = tuple(str(value) for value in values)  # YAML reads 12.0 as a number
    if not all(_CAPABILITY.fullmatch(text) for text in texts):
        raise ValueError("compute capabilities, e.g. 8.9")
    return texts


@dataclass(frozen=True)
class ProfileConfig:
    """Sizes that one TensorRT optimization profile serves: [min, opt, max], or 'auto' from the model."""

    batch: SizeRange = parameter("auto", ge=1, check=_check_range, description="Sequences of a step.")
    nodes: SizeRange = parameter("auto", ge=1, check=_check_range, description="Tokens of a step, per sequence.")
    kv: SizeRange = parameter("auto", ge=1, check=_check_range, description="Cache rows that a step attends to.")


@dataclass(frozen=True)
class Config:
    """The fields that only the TensorRT backend reads."""

    variant: Literal["auto", "tensorrt", "tensorrt_rtx"] = parameter(
        "auto", beside_section=True, description="Which TensorRT builds; 'auto' is the one that is installed."
    )
    plugins: Literal["auto", "native", "none"] = parameter(
        "auto",
        beside_section=True,
        description="Custom kernels in TensorRT's plans: 'native', or 'none' for standard operators alone.",
    )
    compute_capabilities: tuple[str | float, ...] = parameter(
        (), check=_check_capabilities, description="GPUs the plans are for, e.g. [12.0]; empty: as the variant chooses."
    )
    prefill: ProfileConfig = parameter(ProfileConfig(), description="The profile that reads prompts.")
    decode: ProfileConfig = parameter(ProfileConfig(), description="The profile that scores drafts.")
    workspace_gib: float | Literal["auto"] = parameter(
        "auto",
        gt=0.0,
        lt=float("inf"),
        description="Most GPU memory for the scratch space of kernels; 'auto' leaves it to TensorRT.",
    )
    weight_streaming: bool = parameter(False, description="Stream weights from host memory where the GPU has no room.")
    optimization_level: int | Literal["auto"] = parameter(
        "auto", ge=0, le=5, description="How long the builder searches, 0 to 5; full TensorRT only."
    )
    timing_cache: bool = parameter(True, description="Keep measured kernels for the next build; full TensorRT only.")
    max_build_gib: float | Literal["auto"] = parameter(
        "auto",
        gt=0.0,
        lt=float("inf"),
        description="End a builder that holds more memory than this; 'auto' sets no limit but the machine's.",
    )
    keep_onnx: bool = parameter(False, description="Keep the lowered ONNX beside each plan.")

    @property
    def has_plugins(self) -> bool:
        return self.plugins != "none"


def config_from_options(options: CompileOptions) -> Config:
    """Returns the recipe's fields of a build; the defaults where the options hold none."""
    config = Config() if options.backend is None else options.backend
    assert isinstance(config, Config)
    return config
