# SPDX-License-Identifier: Apache-2.0
"""The bundle of a model, a recipe or a bundle's own folder: found, or built once and kept in the cache; and loaded."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend
from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.choices import complete_plan
from speccompile.bundle.format import MANIFEST, digest_from_file, digest_from_json
from speccompile.bundle.graphs import find_graph, needed_jobs
from speccompile.bundle.publish import find_bundle, is_hub_id
from speccompile.bundle.report import RECIPE
from speccompile.bundle.stage_cache import BUNDLES, Progress, StageCache
from speccompile.bundle.staging import disk_faults
from speccompile.bundle.tokenizers import TOKENIZER_FILES
from speccompile.checkpoints.folders import HUB_GGUF, gguf_files, is_gguf
from speccompile.checkpoints.vision import PROCESSOR_FILES
from speccompile.common.cache_root import cache_root, make_cache_folder
from speccompile.core import registry
from speccompile.errors import BundleError, RecipeError
from speccompile.pipeline import begin, build
from speccompile.recipe import BuildPlan, find_device, load_recipe, resolve
from speccompile.recipe.model_recipe import ModelOptions, recipe_from_model
from speccompile.recipe.speculative_config import check_model, section_from_config
from speccompile.runtime.engine import load as load_bundle
from speccompile.runtime.service import Service, ServiceOptions
from speccompile.runtime.spec_engine import SpecEngine

RECIPES = (".yaml", ".yml")
_MAX_NAMED = 4  # folders in an error
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A bundle that can be loaded."""

    path: Path
    name: str
    is_kept: bool = False


def is_model(source: str) -> bool:
    """Returns whether a name is a checkpoint: a folder of one, a GGUF file, or an id of the hub, with a file or not.

    What may be an id is a path where its first part is a folder here.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return not (path / MANIFEST).exists() and ((path / "config.json").is_file() or bool(gguf_files(path)))
    if path.exists() or path.suffix in RECIPES:
        return is_gguf(path)
    return is_hub_id(source) or HUB_GGUF.fullmatch(source) is not None


def is_recipe(source: str) -> bool:
    return Path(source).suffix in RECIPES and not Path(source).is_dir()


def check_source(source: str) -> None:
    """Compares what is neither a model nor a recipe with the folder of a bundle. Raises BundleError: it is none."""
    path = Path(source).expanduser()
    if (path / MANIFEST).is_file():
        return
    expected = "a bundle's or a checkpoint's folder, a GGUF file, a recipe (.yaml), or an id of the hub (OWNER/NAME)"
    if not path.is_dir():
        todo = "Check the path; a bundle is built with: speccompile build MODEL -o DIR."
        raise BundleError(source, "a file" if path.exists() else "no such file or folder", expected, todo)
    todo = _todo_for_folder(path, (MANIFEST, "config.json"))
    raise BundleError(source, f"a folder with neither config.json nor {MANIFEST}", expected, todo)


def _todo_for_folder(path: Path, files: Sequence[str]) -> str:
    inside = sorted(str(path / found.parent.name) for name in files for found in path.glob(f"*/{name}"))
    return f"Did you mean {' or '.join(inside[:_MAX_NAMED])}?" if inside else "Check the path."


def plan_from_source(source: str, options: ModelOptions) -> BuildPlan:
    """Returns the plan of a model, or of a recipe's file, which `options` override."""
    if is_model(source):
        recipe = recipe_from_model(source, options)
    else:
        if (folder := Path(source).expanduser()).is_dir():
            raise _error_from_folder(source, folder)
        section = section_from_config(options.speculative) if options.speculative else {}
        if section and not any(setting.startswith("speculator") for setting in options.settings):
            check_model(section)
        speculator = [f"speculator={json.dumps(section)}"] if section else []
        recipe = load_recipe(source, [*speculator, *options.settings])
    return complete_plan(resolve(recipe, find_device(recipe.engine.device)))


def _error_from_folder(source: str, folder: Path) -> RecipeError:
    got, todo = "a folder without config.json", _todo_for_folder(folder, ("config.json",))
    if (folder / MANIFEST).is_file():
        got, todo = "a bundle", f"It is built already; to build it again: speccompile build {folder / RECIPE}."
    expected = "a recipe (.yaml), a checkpoint's folder, a GGUF file, or an id of the hub (OWNER/NAME)"
    return RecipeError(source, got, expected, todo)


def prepare(source: str, options: ModelOptions | None = None, progress: Progress = lambda stage: None) -> Prepared:
    """Returns a bundle for `source`; one that is not there yet is built into the cache.

    An entry is found by the digests of checkpoints, options, versions and sources, written beside and renamed, by one
    process at a time.

    Args:
        source: a bundle's folder, a recipe, a checkpoint's folder or a hub id.
    """
    source = os.path.expanduser(source)
    if is_hub_id(source) and (folder := find_bundle(source)) is not None:
        return Prepared(folder, source)
    if not is_model(source) and not is_recipe(source):
        check_source(source)
        return Prepared(Path(source), Path(source).resolve().name)
    plan = plan_from_source(source, options or ModelOptions())
    begun = begin(plan, progress)
    found = _entry_of(source, plan)
    if _is_whole(entry := found.path):
        return found
    root = make_cache_folder(BUNDLES)
    with _locked(root / f".{entry.name}.lock", lambda: progress("wait for another process that builds the same")):
        if not _is_whole(entry):
            shutil.rmtree(entry, ignore_errors=True)
            build(plan, entry, progress, StageCache(make_cache_folder()), begun)
    return found


def find_prepared(source: str, options: ModelOptions) -> Prepared | None:
    """Returns the bundle of a model or a recipe that is in the cache; None: it is not, or no kernels are yet."""
    plan = plan_from_source(source, options)
    if not registry.backend(plan.engine.backend, plan.engine.device).is_ready():
        return None
    found = _entry_of(source, plan)
    return found if _is_whole(found.path) else None


def _entry_of(source: str, plan: BuildPlan) -> Prepared:
    path = Path(source)
    name = (path.resolve().name if path.is_dir() else path.stem) if path.exists() else source
    return Prepared(cache_root() / BUNDLES / key_of(plan), name, is_kept=True)


def key_of(plan: BuildPlan) -> str:
    """Returns the digest of everything that a plan's bundle depends on."""
    backend: Backend = registry.backend(plan.engine.backend, plan.engine.device)
    target = find_graph(plan, plan.target, None, backend)
    graphs = [target, *(find_graph(plan, job, target.dims, backend) for job in needed_jobs(plan, target.dims))]
    folder = target.source.folder
    names = (*TOKENIZER_FILES, *PROCESSOR_FILES)
    files = {name: digest_from_file(folder / name) for name in names if (folder / name).is_file()}
    return digest_from_json(
        {"recipe": plan.recipe_from_plan(), "graphs": {g.job.name: g.key for g in graphs}, "files": files}
    )


def _is_whole(entry: Path) -> bool:
    if not os.path.isdir(entry):
        return False
    try:
        read_bundle(entry)
        with contextlib.suppress(PermissionError):
            os.utime(entry)  # the entries used last are kept the longest
    except (BundleError, FileNotFoundError) as fault:
        _log.warning("the cache's bundle %s is built again: %s", entry, fault)
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    with disk_faults(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def load(
    source: Path | str,
    *,
    backend: str | None = None,
    threads: int | None = None,
    method: str | Mapping[str, Any] | None = None,
    verify: bool = True,
    settings: Sequence[str] = (),
    progress: Progress = lambda stage: None,
    allow_synthetic_acceptance: bool = False,
) -> SpecEngine:
    """Loads what the commands take: a bundle, or the bundle of a model or a recipe, built where it is not in the cache.

    Args:
        source: a bundle's folder, a recipe, a checkpoint's folder or a hub id.
        backend: see `runtime.engine.load`; of a model or a recipe, the one that it is built for.
        settings: of a model or a recipe, as `engine.max_batch_size=4`.

    Raises:
        BundleError, RuntimeFault: it cannot be loaded; see `runtime.engine.load`.
    """
    name = os.path.expanduser(source)
    given: dict[str, Any] = {"threads": threads, "method": method}
    given["allow_synthetic_acceptance"] = allow_synthetic_acceptance
    is_published = is_hub_id(name) and find_bundle(name) is not None
    if not is_published and (is_model(name) or is_recipe(name)):
        chosen = [] if backend is None else [f"engine.backend={backend}"]
        found = prepare(name, ModelOptions(settings=(*chosen, *settings)), progress)
        return load_bundle(found.path, verify=False, **given)
    if settings:
        got, todo = f"{settings[0]} for a bundle", "Leave the settings out, or give a model or a recipe."
        raise RecipeError("settings", got, "none: it is built already", todo)
    try:
        return load_bundle(name, backend=backend, verify=verify, **given)
    except BundleError:
        if not is_published:
            check_source(name)  # says more of what is no bundle at all
        raise


def load_service(source: Path | str, options: ServiceOptions | None = None, **load_options: Any) -> Service:
    """Loads an engine into a service: many requests at once, from any thread or event loop. `start` or `with` runs it.

    Raises:
        SpecCompileError: as `load`.
    """
    return Service(load(source, **load_options), options)
