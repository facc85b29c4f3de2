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
    "mlp": "speccompile.speculators.mlp.method:MlpMethod",
    "ngram": "speccompile.speculators.ngram.method:NgramMethod",
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


def backend(name: str) -> Any:
    """The backend of that name.

    Raises:
        RecipeError: there is none; the nearest name is suggested.
    """
    return _load("engine.backend", BACKENDS, name)


def method(name: str) -> Any:
    """The speculation method of that name.

    Raises:
        RecipeError: there is none; the nearest name is suggested.
    """
    return _load("speculator.method", METHODS, name)
