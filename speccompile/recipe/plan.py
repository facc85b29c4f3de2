# SPDX-License-Identifier: Apache-2.0
"""The frozen plan of a build, and its derivation from a recipe and a device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from speccompile.backends.base import Backend
from speccompile.backends.machine import num_usable_cores
from speccompile.common.parameters import parameters
from speccompile.core import registry
from speccompile.core.jobs import AS_TARGET, STORED, DecoderOptions, DraftBounds, GraphJob, TargetOutputs
from speccompile.errors import RecipeError
from speccompile.recipe.models import AUTO_TEXTS, NO_TEXTS, DecodingSection, EngineSection, Recipe, backend_config

Weights = Literal["checkpoint", "random"]
TARGET, VISION = "target", "vision"
VISION_SOURCE = "speccompile.export.vision_source:VisionSource"
AUTO = "auto"  # the quantisation that a backend chooses by measuring
FLOATS = ("none", "bf16")  # quantisations that leave weights floats
# The engine's keys as a bundle's recipe has them.
_ENGINE_KEYS = (
    *("backend", "device", "max_batch_size", "max_seq_len", "max_draft_nodes", "threads", "logits"),
    *("synthetic_acceptance", "kv_cache"),
)


@dataclass(frozen=True)
class Device:
    """The hardware of a build."""

    name: str
    num_cores: int


@dataclass(frozen=True)
class BuildPlan:
    """All decisions of a build.

    Args:
        target: the target as a graph job; its options are the hidden states that the method reads, and `num_layers`.
        weights: source of the target's weights; with "random" a draft's are random too.
        drafts: graphs that the method needs beside the target.
        engine: the recipe's section without `auto` for the device and for logits.
        options: the `Config` of the backend; None: it has none.
        calibration: of the target's weights: "auto", "none" or a file, see the recipe.
        vision: the target's vision tower as a graph job; None: its prompts have no images.
        chooses_dtype: the recipe left the dtype open, and the backend has several: see `bundle.choices`.
        open_drafts: (name, `auto` or `target`) of drafts whose quantisation is open: see `bundle.choices`.
    """

    target: GraphJob
    weights: Weights
    dtype: str
    method: str
    speculator: Any
    drafts: tuple[GraphJob, ...]
    engine: EngineSection
    decoding: DecodingSection
    options: Any = None
    calibration: str = AUTO_TEXTS
    vision: GraphJob | None = None
    chooses_dtype: bool = False
    open_drafts: tuple[tuple[str, str], ...] = ()

    @property
    def jobs(self) -> tuple[GraphJob, ...]:
        return (self.target, *self.drafts, *(() if self.vision is None else (self.vision,)))

    def recipe_from_plan(self) -> dict[str, Any]:
        """Returns the plan as a recipe with all defaults, JSON-ready."""
        return {
            "target": {
                "model": self.target.model,
                "config": self.target.config,
                "lora": self.target.lora,
                "adapters": dict(self.target.adapters),
                "dtype": self.dtype,
                "quantization": self.target.quantization,
                "calibration": self.calibration,
                "weights": self.weights,
                "num_layers": self.target.options.num_layers,
                "vision": self.vision is not None,
            },
            "speculator": {"method": self.method, **asdict(self.speculator)},
            "engine": self._engine_keys(),
            "decoding": self.decoding.model_dump(mode="json"),
        }

    def _engine_keys(self) -> dict[str, Any]:
        # Without the sections of other backends.
        section = self.engine.model_dump(mode="json")
        keys = {name: section[name] for name in _ENGINE_KEYS}
        if not self.engine.synthetic_acceptance:
            del keys["synthetic_acceptance"]
        if self.options is not None:
            own = json.loads(json.dumps(asdict(self.options)))
            beside = {key for key, rule in parameters(type(self.options)).items() if rule.beside_section}
            keys |= {key: own.pop(key) for key in sorted(beside)}
            keys[self.engine.backend] = own
        return keys


def find_device(name: str) -> Device:
    return Device(name, num_usable_cores())


def resolve(recipe: Recipe, device: Device) -> BuildPlan:
    """Decides everything, purely: reads no file and measures nothing.

    Raises:
        RecipeError: valid keys contradict each other, the method or the device.
    """
    engine = recipe.engine
    if engine.threads != "auto" and engine.threads > device.num_cores:
        expected = f"at most {device.num_cores} on this machine"
        raise RecipeError("engine.threads", f"{engine.threads} threads", expected, "Lower it, or write auto.")
    if engine.max_draft_nodes + 1 >= engine.max_seq_len:
        got = f"{engine.max_draft_nodes} with max_seq_len {engine.max_seq_len}"
        expected = "room for a prompt beside one tree"
        raise RecipeError("engine.max_draft_nodes", got, expected, "Raise engine.max_seq_len.")
    method = registry.method(recipe.speculator.method)
    names = [f.name for f in fields(method.Config)]
    try:
        config = method.Config(**{name: getattr(recipe.speculator, name) for name in names})
    except ValueError as error:
        raise RecipeError("speculator", str(error), f"a valid {method.name} section", "Correct the value.") from error
    bounds: DraftBounds = config.draft_bounds
    expected = f"at most engine.max_draft_nodes = {engine.max_draft_nodes}"
    if bounds.length > engine.max_draft_nodes:
        todo = "Lower it, or raise engine.max_draft_nodes."
        raise RecipeError("speculator.num_draft_tokens", f"{bounds.length}", expected, todo)
    if bounds.nodes > engine.max_draft_nodes:
        got, todo = f"{bounds.nodes} draft tokens", "Draft fewer, or raise engine.max_draft_nodes."
        raise RecipeError("speculator.tree", got, expected, todo)
    backend: Backend = registry.backend(engine.backend)
    engine = _decided_engine(engine, backend)
    on_device: Backend = registry.backend(engine.backend, engine.device)
    if recipe.target.weights == "random" or STORED not in on_device.quantizations:  # floats are as they are
        recipe = _without_stored(recipe)
    jobs = method.graph_jobs(config)
    drafts = tuple(_decided(job, recipe, on_device) for job in jobs)
    _check_forms(on_device, recipe, drafts)
    _check_calibration(on_device, recipe)
    target = _target_job(recipe, method.target_outputs(config), keeps_logits=engine.logits is True)
    loras = [("target.lora", target.lora), *(("target.adapters", folder) for _, folder in target.adapters)]
    for key, lora in (*loras, *(("speculator.lora", draft.lora) for draft in drafts)):
        if lora is not None and recipe.target.weights == "random":
            todo = f"Leave {key} out, or build from the checkpoint."
            raise RecipeError(key, "an adapter with target.weights: random", "target.weights: checkpoint", todo)
    return BuildPlan(
        target=target,
        weights=recipe.target.weights,
        dtype=backend.dtypes[0] if recipe.target.dtype == "auto" else recipe.target.dtype,
        chooses_dtype=recipe.target.dtype == "auto" and len(backend.dtypes) > 1,
        method=method.name,
        speculator=config,
        drafts=drafts,
        engine=engine,
        decoding=recipe.decoding,
        options=_backend_options(engine, backend),
        calibration=recipe.target.calibration,
        vision=_vision_job(recipe),
        open_drafts=tuple((job.name, job.quantization) for job in jobs if job.quantization in (AUTO, AS_TARGET)),
    )


def _without_stored(recipe: Recipe) -> Recipe:
    if recipe.target.quantization != STORED:
        return recipe
    return recipe.model_copy(update={"target": recipe.target.model_copy(update={"quantization": "none"})})


def _vision_job(recipe: Recipe) -> GraphJob | None:
    target = recipe.target
    return GraphJob(VISION, target.model, source=VISION_SOURCE, config=target.config) if target.vision else None


def _decided(job: GraphJob, recipe: Recipe, backend: Backend) -> GraphJob:
    target = recipe.target
    if job.model == AS_TARGET:
        job = replace(job, model=target.model, config=job.config or target.config)
    return replace(job, quantization=draft_form(job.quantization, target.quantization, backend))


def draft_form(asked: str, target: str, backend: Backend) -> str:
    """Returns the quantisation of a draft, by that of the target where it is left to it."""
    forms = {AS_TARGET: target, AUTO: backend.draft_quantizations.get(target, "none")}
    return forms.get(asked, asked)


def _decided_engine(section: EngineSection, backend: Backend) -> EngineSection:
    device = backend.devices[0] if section.device == "auto" else section.device
    logits = section.logits
    if logits == "auto":
        logits = registry.backend(section.backend, device).keeps_logits
    return section.model_copy(update={"device": device, "logits": logits})


def _backend_options(section: EngineSection, backend: Backend) -> Any:
    if backend.Config is None:
        return None
    values = section.model_dump()
    return backend_config(backend.Config, {**values, **values[backend.name]})


def _check_forms(backend: Backend, recipe: Recipe, drafts: Sequence[GraphJob]) -> None:
    """Check that the backend supports the dtype and the quantisations."""
    forms: list[tuple[str, str, tuple[str, ...]]] = [
        ("target.quantization", recipe.target.quantization, backend.quantizations)
    ]
    # A form that is measured is chosen for the target, by its distance to float32: a draft cannot take the target's.
    forms.append(("engine.kv_cache", recipe.engine.kv_cache, backend.kv_caches))
    named = tuple(name for name in backend.quantizations if name != AUTO)
    forms += [("speculator.quantization", job.quantization, named) for job in drafts]
    if recipe.target.dtype != "auto":
        forms.append(("target.dtype", recipe.target.dtype, backend.dtypes))
    for where, got, known in forms:
        if got not in known:
            expected = f"one of {', '.join(known)} with engine.backend: {backend.name}"
            raise RecipeError(where, repr(got), expected, "Choose one of these, or another backend.")


def _check_calibration(backend: Backend, recipe: Recipe) -> None:
    text = recipe.target.calibration
    if text not in (AUTO_TEXTS, NO_TEXTS) and not backend.calibrates:
        expected = f"{AUTO_TEXTS} or {NO_TEXTS} with engine.backend: {backend.name}, which quantises without text"
        raise RecipeError("target.calibration", repr(text), expected, "Leave it out, or choose another backend.")


def _target_job(recipe: Recipe, outputs: TargetOutputs, *, keeps_logits: bool) -> GraphJob:
    target = recipe.target
    if target.num_layers is not None and target.weights != "random":
        got = f"{target.num_layers} with target.weights: {target.weights}"
        todo = "A checkpoint is built whole: build with --weights random, or leave num_layers out."
        raise RecipeError("target.num_layers", got, "target.weights: random", todo)
    options = DecoderOptions(
        outputs.hidden, outputs.hidden_layers, keeps_logits, target.num_layers, images=target.vision
    )
    job = GraphJob(TARGET, target.model, target.quantization, options=options, config=target.config, lora=target.lora)
    return replace(job, adapters=tuple(sorted(target.adapters.items())))
