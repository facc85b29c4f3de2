# SPDX-License-Identifier: Apache-2.0
"""Backends and methods by name. An entry is imported only when it is asked for.

Other packages add entry points of `speccompile.backends` and `speccompile.methods`, looked up for other names.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from speccompile.errors import RecipeError

if TYPE_CHECKING:
    from speccompile.core.method import Method
    from speccompile.training_contract import Trainer

BACKENDS = {
    "onnxruntime": "speccompile.backends.onnxruntime.backend:OnnxRuntimeBackend",
    "reference": "speccompile.backends.reference.backend:ReferenceBackend",
    "tensorrt": "speccompile.backends.tensorrt.backend:TensorRTBackend",
}
# A checkpoint's layout is that of the first method that claims it.
METHODS = {
    "none": "speccompile.speculators.none.config:NoneMethod",
    "draft_model": "speccompile.speculators.draft_model.config:DraftModelMethod",
    "medusa": "speccompile.speculators.medusa.config:MedusaMethod",
    "mlp": "speccompile.speculators.mlp.config:MlpMethod",
    "dflash": "speccompile.speculators.dflash.config:DflashMethod",
    "eagle3": "speccompile.speculators.eagle3.config:Eagle3Method",
    "eagle": "speccompile.speculators.eagle.config:EagleMethod",
    "glide": "speccompile.speculators.glide.config:GlideMethod",
    "early_exit": "speccompile.speculators.early_exit.config:EarlyExitMethod",
    "self_draft": "speccompile.speculators.self_draft.config:SelfDraftMethod",
    "prophet": "speccompile.speculators.prophet.config:ProphetMethod",
    "mtp": "speccompile.speculators.mtp.config:MtpMethod",
    "gemma4_assistant": "speccompile.speculators.gemma4_assistant.config:Gemma4AssistantMethod",
    "ngram": "speccompile.speculators.ngram.config:NgramMethod",
    "suffix": "speccompile.speculators.suffix.config:SuffixMethod",
    "hybrid": "speccompile.speculators.hybrid.config:HybridMethod",
}
BACKEND_GROUP, METHOD_GROUP = "speccompile.backends", "speccompile.methods"


def find_class(name: str) -> Any:
    """Returns the object that an import string "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def find_backend(name: str, where: str = "engine.backend") -> str:
    """Returns the import string of a backend. Raises RecipeError: none at `where`; the nearest name is suggested."""
    return _find(where, BACKENDS, BACKEND_GROUP, name)


def find_method(name: str, where: str = "speculator.method") -> str:
    """Returns the import string of a method. Raises RecipeError: none at `where`; the nearest name is suggested."""
    return _find(where, METHODS, METHOD_GROUP, name)


def backend(name: str, device: str = "cpu") -> Any:
    """Returns the backend of that name (a `speccompile.backends.base.Backend`), as it works on a device."""
    found = find_class(find_backend(name))
    variant = found.device_variants.get(device)
    return found() if variant is None else find_class(variant)()


def method(name: str) -> Method:
    """Returns the speculation method of that name."""
    return _open(find_method(name))


def trainer(name: str) -> Trainer:
    """Returns how the speculator of a method is trained. Raises RecipeError: it cannot be, or see `find_method`."""
    made: Trainer = find_class(trained_method(name).trainer)()
    return made


def trained_method(name: str) -> Method:
    """Returns the method of that name, whose speculator can be trained; raises as `trainer`."""
    found = _open(find_method(name, "training.method"))
    if not found.trainer:
        able = sorted(other.name for other in all_methods() if other.trainer)
        raise RecipeError("training.method", repr(name), f"one of {', '.join(able)}", "Choose one of these.")
    return found


def all_methods() -> Iterator[Method]:
    """Yields all methods: those of the table in its order, then those of other packages by name."""
    plugins = _plugins(METHOD_GROUP, tuple(sys.path))
    yield from map(_open, (*METHODS.values(), *(plugins[name] for name in sorted(plugins.keys() - METHODS.keys()))))


def load_formats() -> tuple[Any, ...]:
    """Returns the layouts of all methods' checkpoints (`doctor.layouts.Format`), those of each with ours first."""
    return tuple(layout for found in all_methods() if found.formats for layout in find_class(found.formats))


def _find(where: str, table: Mapping[str, str], group: str, name: str) -> str:
    if name in table:
        return table[name]
    known = {**_plugins(group, tuple(sys.path)), **table}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        todo = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
        raise RecipeError(where, repr(name), f"one of {', '.join(sorted(known))}", todo)
    return known[name]


@functools.cache
def _plugins(group: str, path: tuple[str, ...]) -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=group)}


def _open(name: str) -> Method:
    found: Method = find_class(name)()
    return found
