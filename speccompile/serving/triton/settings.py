# SPDX-License-Identifier: Apache-2.0
"""What a model reads from its config.pbtxt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from speccompile.errors import BundleError

PARTS = ("engine", "preprocessing", "postprocessing", "bls")


@dataclass(frozen=True)
class Settings:
    """Parameters of a model: strings in the file, one for each field that differs from its default.

    Args:
        rules: `speccompile`, or `trtllm`: requests are read by the rules of the removed TensorRT-LLM backend.
        ignored_parameters: a regular expression; a request may have parameters of these names, all others are refused.
    """

    part: str = "engine"
    bundle: str = "bundle"  # the bundle's folder; a relative one is looked for in the version's folder
    tokenizer: str = "tokenizer.json"  # of the parts without an engine: tokenizer.json, as `bundle`
    rules: str = "speccompile"
    backend: str = ""  # another engine backend than the bundle's
    method: str = ""  # another speculation method than the recipe's
    threads: int = 0  # threads of the target's engine; 0: as measured when it was built
    max_queue: int = 256
    timeout_s: float = 0.0  # seconds a request may take; 0: no limit
    drain_s: float = 30.0  # seconds that running requests get when the model is unloaded
    speculation: str = "auto"  # `auto`, `on` or `off` where a request says nothing
    ignored_parameters: str = ""
    engine_model: str = "tensorrt_llm"
    preprocessing_model: str = "preprocessing"

    def parameters(self) -> dict[str, str]:
        """Returns the parameters as in config.pbtxt."""
        plain = Settings()
        changed = {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        }
        return {"part": self.part, **{name: str(value) for name, value in changed.items()}}


def settings_from_args(args: Mapping[str, str]) -> tuple[Settings, dict[str, Any]]:
    """Returns (settings, the model's whole configuration) of the arguments that Triton initialises a model with."""
    config: dict[str, Any] = json.loads(args["model_config"])
    given = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    version = Path(args["model_repository"]) / args["model_version"]
    values: dict[str, Any] = {}
    for f in fields(Settings):
        if f.name not in given:
            continue
        kind = {"int": int, "float": float, "str": str}[str(f.type)]
        try:
            values[f.name] = kind(given[f.name])
        except ValueError as fault:
            where = f"{args['model_name']}/config.pbtxt (parameters.{f.name})"
            raise BundleError(where, repr(given[f.name]), f"a value of type {f.type}", "Correct the file.") from fault
    settings = Settings(**values)
    _check_choices(settings, args["model_name"])
    paths = {name: str(version / getattr(settings, name)) for name in ("bundle", "tokenizer")}
    return Settings(**{**values, **paths}), config


def _check_choices(settings: Settings, model: str) -> None:
    choices = {"part": PARTS, "rules": ("speccompile", "trtllm"), "speculation": ("auto", "on", "off")}
    for name, allowed in choices.items():
        value = getattr(settings, name)
        if value not in allowed:
            where = f"{model}/config.pbtxt (parameters.{name})"
            raise BundleError(where, repr(value), ", ".join(allowed), "Correct the file.")
