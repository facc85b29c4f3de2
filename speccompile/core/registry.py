# SPDX-License-Identifier: Apache-2.0
"""The base class of speculation methods; methods and backends by name, imported only when they are asked for.

Other packages add entry points of `speccompile.backends` and `speccompile.methods`, looked up for other names.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.errors import RecipeError

if TYPE_CHECKING:
    from speccompile.core.proposer import Proposer
    from speccompile.core.protocols import Engine
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


SECTIONS = "sections"  # metadata of a field of a `Config` that lists speculator sections


class Method:
    """A speculation method: what it needs of the build, and its proposer.

    A method is found by name: a line in `METHODS`, or an entry point of an installed package. Importing
    it needs no torch; parts that do are named by import strings.

    Attributes:
        Config: frozen dataclass, the recipe's `speculator:` fields besides `method`; its property `draft_bounds`
            (`core.jobs.DraftBounds`) says how much they let it draft.
        TrainingConfig: frozen dataclass, the recipe's `training.heads`; None: it cannot be trained.
        formats: import string of a tuple of `doctor.layouts.Format`, the layouts of its checkpoints; empty: none.
        vllm_keys: fields of `Config` by the keys that vLLM has for them, besides those that methods share.
        default_section: import string of a function: a target's folder -> the section with which it drafts without
            another model, or None; empty: it is never chosen by default.
    """

    name: str  # in recipes
    Config: type[Any]
    TrainingConfig: type[Any] | None = None
    formats: str = ""
    trainer: str = ""  # import string of its `training_contract.Trainer`; empty: it cannot be trained
    vllm_names: tuple[str, ...] = ()  # what vLLM calls it, besides `name`
    vllm_keys: Mapping[str, str] = MappingProxyType({})
    default_section: str = ""
    takes_models: bool = False  # its `model` is any language model

    def target_outputs(self, config: Any) -> TargetOutputs:
        """Returns what it reads of the target: by default nothing besides the verdicts."""
        return TargetOutputs()

    def graph_jobs(self, config: Any) -> tuple[GraphJob, ...]:
        """Returns the graphs it needs besides the target: by default none."""
        return ()

    def host_ms(self, config: Any) -> float:
        """Returns what drafting takes of a step besides engines, where `planner.costs.LOOP_S` was measured."""
        return 0.1

    def allows_tokenizer_mismatch(self, config: Any) -> bool:
        """Whether graphs with a tokenizer of their own are built although it is not the target's: by default not."""
        return False

    def make_proposer(self, config: Any, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        """Returns the proposer over loaded engines. Raises RecipeError: an engine was built for less than that."""
        raise NotImplementedError(f"{type(self).__name__}.make_proposer")


def section_of(drafters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the `speculator` section of these drafters together, each a section itself; of none plain decoding."""
    if len(drafters) < 2:
        return dict(drafters[0]) if drafters else {"method": "none"}
    several = next(m for m in all_methods() if any(f.metadata.get(SECTIONS) for f in dataclasses.fields(m.Config)))
    return {"method": several.name, "drafters": list(drafters)}


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
