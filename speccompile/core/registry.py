# SPDX-License-Identifier: Apache-2.0
"""Backends and methods by name. An entry is imported only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from speccompile.errors import RecipeError

BACKENDS = {
    "onnxruntime": "speccompile.backends.onnxruntime.backend:OnnxRuntimeBackend",
    "reference": "speccompile.backends.reference.backend:ReferenceBackend",
    "tensorrt": "speccompile.backends.tensorrt.backend:TensorRTBackend",
}
METHODS = {
    "none": "speccompile.speculators.none.method:NoneMethod",
    "draft_model": "speccompile.speculators.draft_model.method:DraftModelMethod",
    "early_exit": "speccompile.speculators.early_exit.method:EarlyExitMethod",
    "eagle": "speccompile.speculators.eagle.method:EagleMethod",
    "eagle3": "speccompile.speculators.eagle3.method:Eagle3Method",
    "medusa": "speccompile.speculators.medusa.method:MedusaMethod",
    "glide": "speccompile.speculators.glide.method:GlideMethod",
    "mlp": "speccompile.speculators.mlp.method:MlpMethod",
    "prophet": "speccompile.speculators.prophet.method:ProphetMethod",
    "ngram": "speccompile.speculators.ngram.method:NgramMethod",
}
# Layouts of checkpoints, by method. A layout is told by the first that claims it.
FORMATS = {
    "medusa": "speccompile.speculators.medusa.formats:FORMATS",
    "mlp": "speccompile.speculators.mlp.formats:FORMATS",
    "eagle3": "speccompile.speculators.eagle3.formats:FORMATS",
    "eagle": "speccompile.speculators.eagle.formats:FORMATS",
    "glide": "speccompile.speculators.glide.formats:FORMATS",
    "early_exit": "speccompile.speculators.early_exit.formats:FORMATS",
    "prophet": "speccompile.speculators.prophet.formats:FORMATS",
}

# How a method's speculator is trained (`core.training.Trainer`).
TRAINERS = {
    "mlp": "speccompile.speculators.mlp.training:MlpTrainer",
    "medusa": "speccompile.speculators.medusa.training:MedusaTrainer",
    "prophet": "speccompile.speculators.prophet.training:ProphetTrainer",
    "eagle3": "speccompile.speculators.eagle3.training:Eagle3Trainer",
    "glide": "speccompile.speculators.glide.training:GlideTrainer",
    "early_exit": "speccompile.speculators.early_exit.training:EarlyExitTrainer",
    "draft_model": "speccompile.speculators.draft_model.training:DraftModelTrainer",
}


def _load(kind: str, table: dict[str, str], name: str) -> Any:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
        raise RecipeError(kind, repr(name), f"one of {', '.join(sorted(table))}", hint)
    return find_class(table[name])()


def find_class(name: str) -> Any:
    """The class that an import string "module:Class" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def backend(name: str, device: str = "cpu") -> Any:
    """The backend of that name (a `speccompile.backends.base.Backend`), as it works on a device.

    Raises:
        RecipeError: there is none; the nearest name is suggested.
    """
    return _load("engine.backend", BACKENDS, name).for_device(device)


def method(name: str) -> Any:
    """The speculation method of that name.

    Raises:
        RecipeError: there is none; the nearest name is suggested.
    """
    return _load("speculator.method", METHODS, name)


def load_formats() -> tuple[Any, ...]:
    """Layouts of all methods' checkpoints, those of each with ours first."""
    return tuple(layout for name in FORMATS.values() for layout in find_class(name))


def trainer(name: str) -> Any:
    """How the speculator of the method of that name is trained.

    Raises:
        RecipeError: it cannot be trained, or there is no such method; the nearest name is suggested.
    """
    return _load("training.method", TRAINERS, name)
