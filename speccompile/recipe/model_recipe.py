# SPDX-License-Identifier: Apache-2.0
"""A recipe for a model without a YAML file: what a user leaves out is chosen here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend
from speccompile.checkpoints.checkpoint import read_dims
from speccompile.checkpoints.folders import find_config, resolve_checkpoint
from speccompile.common.json_reader import read_json_object, shown
from speccompile.core import registry
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import STORED, GraphJob
from speccompile.core.sampling_params import SAMPLING_PARAMETERS
from speccompile.errors import CheckpointError, RecipeError
from speccompile.recipe.loading import RawRecipe, apply_override, validate_recipe
from speccompile.recipe.models import EngineSection, Recipe
from speccompile.recipe.plan import AUTO, FLOATS
from speccompile.recipe.speculative_config import MODEL, check_model, section_from_config, verifier_of

MAX_SEQ_LEN = 4096  # of models that allow more: caches are allocated whole
MAX_BATCH_SIZE = 8
_CACHE_SHARE = 4  # caches take at most this part of the machine's memory
_OWN = ("max_new_tokens", "seed", "stop")  # sampling parameters that are not taken from generation_config.json


@dataclass(frozen=True)
class ModelOptions:
    """What a user says about a model besides its name.

    Args:
        speculative: a config as vLLM spells it, see `speculative_config`; empty: the default drafter.
        settings: "section.key=value", which win over everything else.
        reads_generation_config: sampling defaults are those of the checkpoint's generation_config.json.
        reads_weights: False reads small files of a hub checkpoint alone, for its sizes: no module of its own is found.
    """

    speculative: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[str] = ()
    reads_generation_config: bool = True
    reads_weights: bool = True


def recipe_from_model(model: str, options: ModelOptions | None = None) -> Recipe:
    """Returns the recipe for a checkpoint, or for a speculator's checkpoint that names its target.

    Weights have the fastest form near float32, where the backend measures that; drafters are those of
    `default_section`; caches hold `MAX_BATCH_SIZE` sequences of `MAX_SEQ_LEN` tokens, halved to a quarter of the
    memory.

    Args:
        model: folder or hub id; a hub checkpoint is downloaded.

    Raises:
        CheckpointError: no such model, or a speculator without a target's name.
    """
    options = options or ModelOptions()
    raw = RawRecipe(model, Path.cwd(), {})
    for setting in options.settings:
        apply_override(raw, setting)
    sections = {name: _section(raw, name) for name in ("target", "speculator", "engine", "decoding")}
    target, engine = sections["target"], sections["engine"]
    is_random = target.get("weights") == "random"
    folder, has_weights = _find_folder(model, options, is_random)
    speculative = dict(options.speculative)
    if (verifier := verifier_of(folder)) is not None:
        speculative.setdefault(MODEL, _absolute(model))
        model = verifier
        folder, has_weights = _find_folder(model, options, is_random)
    dims = read_dims(folder)
    target.setdefault("model", _absolute(model))
    name, device = (str(engine.get(key, EngineSection.model_fields[key].default)) for key in ("backend", "device"))
    backend: Backend = registry.backend(name, device)
    measures = not is_random and AUTO in backend.quantizations
    if measures:
        target.setdefault("quantization", AUTO)
    if "method" not in (given := sections["speculator"]):
        may_gain = measures and not given and target["quantization"] in (AUTO, STORED, *FLOATS)
        chosen = default_section(folder, may_gain=may_gain) if has_weights and not speculative else {}
        sections["speculator"] = (section_from_config(speculative) if speculative else chosen) | given
        if speculative:
            check_model(sections["speculator"])
    _set_sizes(engine, dims, _num_drafts(sections["speculator"]))
    if options.reads_generation_config:
        sections["decoding"] = sampling_defaults(folder) | sections["decoding"]
    raw.values = {**raw.values, **{name: section for name, section in sections.items() if section}}
    return validate_recipe(raw)


def _section(raw: RawRecipe, name: str) -> dict[str, Any]:
    value = raw.values.get(name)
    if not isinstance(value, dict | None):
        raise RecipeError(raw.where((name,)), shown(value), "a section", f"Name a key: --set {name}.KEY=VALUE.")
    return dict(value or {})


def _find_folder(model: str, options: ModelOptions, is_random: bool) -> tuple[Path, bool]:
    if is_random or not (options.reads_weights or os.path.exists(Path(model).expanduser())):
        return find_config(GraphJob("target", model)), False
    return resolve_checkpoint(model), True


def default_section(folder: Path, *, may_gain: bool) -> dict[str, Any]:
    """Returns the section for a target without a named drafter; `may_gain`: with those that have a `min_gain`, too."""
    found: list[dict[str, Any]] = []
    for method in registry.all_methods():
        section = registry.find_class(method.default_section)(folder) if method.default_section else None
        if section is not None and (may_gain or not section.get("min_gain")):
            found.append({"method": method.name, **section})
    return registry.section_of(found)


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Returns the sampling parameters of generation_config.json; {} without one or with `do_sample: false`."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    config = read_json_object(path, CheckpointError, "Download the file again.")
    if config.get("do_sample") is False:
        return {}
    known = [name for name, declared in SAMPLING_PARAMETERS.items() if declared.in_recipe and name not in _OWN]
    found = {name: config[name] for name in known if config.get(name) is not None}
    return {name: value if name == "top_k" else float(value) for name, value in found.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _absolute(model: str) -> str:
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.resolve())
    return os.path.abspath(path) if os.path.exists(path) else model


def _num_drafts(section: Mapping[str, Any]) -> int:
    number = section.get("num_draft_tokens")
    return number if isinstance(number, int) else 0


def _set_sizes(engine: dict[str, Any], dims: ModelDims, num_drafts: int) -> None:
    nodes = EngineSection.model_fields["max_draft_nodes"].default
    if num_drafts > nodes:
        engine.setdefault("max_draft_nodes", num_drafts)
    if "max_seq_len" not in engine:
        engine["max_seq_len"] = min(dims.max_positions or MAX_SEQ_LEN, MAX_SEQ_LEN)
    if "max_batch_size" not in engine:
        kind = "int8" if engine.get("kv_cache") == "int8" else "float32"
        length = engine["max_seq_len"]
        sequence_bytes = (length if isinstance(length, int) else 0) * dims.cache_row_bytes_in(kind)  # refused below
        # Of the whole memory: with what is free at the moment, every start would have another recipe.
        room, slots = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _CACHE_SHARE, MAX_BATCH_SIZE
        while slots > 1 and room < slots * sequence_bytes:
            slots //= 2
        engine["max_batch_size"] = slots
