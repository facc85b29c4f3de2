# SPDX-License-Identifier: Apache-2.0
"""`--speculative-config` as vLLM spells it -> a recipe's speculator section."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from speccompile.checkpoints.checkpoint import read_config
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.common.json_reader import parse_json, shown
from speccompile.core import registry
from speccompile.core.registry import Method
from speccompile.doctor.doctor import check_kind, open_checkpoint
from speccompile.errors import CheckpointError, RecipeError

WHERE = "--speculative-config"
METHOD, MODEL, NUM_TOKENS = "method", "model", "num_speculative_tokens"
# vLLM's keys that mean the same for all methods, and the fields of a `Config` that they are.
_SHARED = {
    MODEL: "model",
    NUM_TOKENS: "num_draft_tokens",
    "quantization": "quantization",
    "draft_sample_method": "drafts",
}
_DRAFTS = {"greedy": "greedy", "probabilistic": "sampled"}
# Values that ask for nothing: a key of these with another value is refused.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (1,),
    "rejection_sample_method": ("standard", "strict", "block"),
    "parallel_drafting": (False,),
    "suffix_decoding_max_cached_requests": (0,),
    "use_heterogeneous_vocab": (False,),
}


def read_speculative_config(text: str) -> dict[str, Any]:
    """Returns the object of `--speculative-config`."""
    try:
        value = parse_json(text, refuses_doubles=True)
    except ValueError as fault:
        value, problem = None, f": {fault}"
    else:
        problem = ""
    if not isinstance(value, dict):
        todo = 'Quote it for the shell: \'{"model": "FOLDER", "num_speculative_tokens": 4}\'.'
        raise RecipeError(WHERE, f"{shown(text)}{problem}", "a JSON object", todo)
    return value


def section_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the speculator section that a config of vLLM describes.

    Args:
        config: `method`, `model`, `num_speculative_tokens` and others as vLLM has them; fields of the method's own
            `Config` are taken too. Without a method, or with a name of several, it is that of the checkpoint `model`.

    Raises:
        RecipeError: an unknown method or key, or a value that the method cannot take.
        CheckpointError: a method is looked for, and `model` is no checkpoint whose method is known.
    """
    given = {key: value for key, value in config.items() if value is not None}
    name = given.pop(METHOD, None)
    if name is None and MODEL not in given:
        todo = f"Name a method or a model; methods: {', '.join(_known_names())}."
        raise RecipeError(WHERE, "neither a method nor a model", "one of them", todo)
    method = find_method_of(str(given[MODEL])) if name is None else _method(name, given.get(MODEL))
    known = {field.name: field for field in fields(method.Config)}
    section: dict[str, Any] = {METHOD: method.name}
    for key, value in given.items():
        field = {**_SHARED, **method.vllm_keys}.get(key, key)
        where = f"{WHERE} ({key})"
        if field not in known and value in _NEUTRAL.get(key, ()):
            continue
        if field not in known:
            raise RecipeError(where, shown(value), f"the keys of {method.name}", _todo_for_key(method, known))
        section[field] = _value(where, field, value)
    tree = known.get("tree")
    if NUM_TOKENS in given and tree is not None and tree.default != "chain":
        section.setdefault("tree", "chain")  # as long as that number says
    return section


def check_model(section: Mapping[str, Any]) -> None:
    """Refuses a speculator section that options describe where the method needs a model and there is none."""
    method = registry.method(str(section[METHOD]))
    needs = any(field.name == MODEL and field.default is MISSING for field in fields(method.Config))
    if needs and section.get(MODEL) is None:
        todo = f'Give --spec-model FOLDER, or "{MODEL}" in {WHERE}.'
        expected = "the checkpoint that drafts, a folder or OWNER/NAME"
        raise RecipeError("--spec-model", f"no model for the method {method.name}", expected, todo)


def _value(where: str, field: str, value: Any) -> Any:
    if field != "drafts" or value in _DRAFTS.values():
        return value
    if not isinstance(value, str) or value not in _DRAFTS:
        raise RecipeError(where, shown(value), f"one of {', '.join(_DRAFTS)}", "Choose one of these.")
    return _DRAFTS[value]


def _todo_for_key(method: Method, known: Mapping[str, Any]) -> str:
    shared = [key for key, field in _SHARED.items() if field in known]
    keys = [*shared, *method.vllm_keys, *(field for field in known if field not in _SHARED.values())]
    return f"Leave it out; it takes {', '.join(keys) or 'no keys'}."


def _method(name: Any, model: Any) -> Method:
    names = _names()
    found = names.get(name) if isinstance(name, str) else None
    if found is None:
        near = difflib.get_close_matches(str(name), names, n=1)
        todo = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
        raise RecipeError(f"{WHERE} ({METHOD})", shown(name), f"one of {', '.join(_known_names())}", todo)
    # To vLLM a kind of drafters is the name of each without its family: the model says which it is.
    kin = {method.name: method for known, method in names.items() if known.endswith(f"_{name}")}
    if model is None or not kin.keys() - {found.name}:
        return found
    return kin.get(find_method_of(str(model)).name, found)


def _names() -> dict[str, Method]:
    methods = list(registry.all_methods())
    return {name: method for method in methods for name in (*method.vllm_names, method.name)}


def _known_names() -> list[str]:
    return sorted(_names())


def find_method_of(model: str) -> Method:
    """Returns the method of a checkpoint: of its layout, or that which drafts with whole models.

    Raises:
        CheckpointError: it cannot be read, or is of a kind that is not supported yet.
    """
    folder, formats = resolve_checkpoint(model, SPECULATOR_FILES), registry.load_formats()
    check_kind(folder, formats)
    layout = open_checkpoint(folder, formats).layout
    if layout is not None and not layout.has_others:
        return registry.method(layout.method)
    if not read_config(folder).get("architectures"):
        got, todo = "neither a speculator of a known layout nor a language model", "See: speccompile doctor MODEL."
        raise CheckpointError(model, got, "a checkpoint to draft with", todo)
    return next(method for method in registry.all_methods() if method.takes_models)


def verifier_of(folder: Path) -> str | None:
    """Returns the model that a speculator's config names as its target, found beside it or here; else None."""
    config = read_config(folder)
    stated = config.get("speculators_config")
    if not isinstance(stated, Mapping):
        return None
    verifier = stated.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not isinstance(name, str) or not name:
        where = f"{folder / 'config.json'} (speculators_config.verifier)"
        todo = "Give the target as the model, and this as --spec-model."
        raise CheckpointError(where, shown(name), "the name of its target", todo)
    beside = folder / name
    return str(beside.resolve()) if beside.exists() else name
