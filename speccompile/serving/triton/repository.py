# SPDX-License-Identifier: Apache-2.0
"""Write a model repository for a bundle, and the backend that its models name."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from speccompile.bundling.staging import copy_folder, disk_faults, staged_folder
from speccompile.errors import BundleError
from speccompile.runtime.bundle import Bundle, read_bundle
from speccompile.serving.triton.config_text import BACKEND, ModelConfig, text_from_config
from speccompile.serving.triton.contract import text_inputs, text_outputs
from speccompile.serving.triton.plans import plan_models
from speccompile.serving.triton.settings import Settings
from speccompile.serving.triton.trtllm_layout import trtllm_models

LAYOUTS = ("model", "trtllm", "plans")
_GPU_BACKENDS = frozenset({"tensorrt"})

_BACKEND_MODULE = '''# SPDX-License-Identifier: Apache-2.0
"""Triton's Python-based backend "speccompile": all of it is in the package, which the stub's Python must have."""

import sys

try:
    from speccompile.serving.triton.backend import TritonPythonModel
except ModuleNotFoundError as fault:
    raise ModuleNotFoundError(
        f"{fault}; Triton runs this model with {sys.executable} ({sys.prefix}). Install speccompile[ort] there, or "
        "write the repository with --python-env DIR, the environment that has it."
    ) from fault

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class RepositoryOptions:
    """What the repository shall be like.

    Args:
        layout: `model`: one decoupled model; `trtllm`: the five models of the removed TensorRT-LLM backend; `plans`:
            the TensorRT plans as models of Triton's own `tensorrt` backend.
        name: of the model in the layout `model`, and the first part of the names in `plans`.
        max_batch_size: 0: tensors without a batch dim; above: requests may hold that many rows.
        links_bundle: refer to the bundle where it is, instead of copying it.
        python_env: folder of a Python environment that has speccompile; None: the one on the server's PATH.
        settings: what the model with the engine is told.
    """

    layout: str = "model"
    name: str = BACKEND
    max_batch_size: int = 0
    links_bundle: bool = False
    python_env: Path | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class Model:
    """One folder of the repository.

    Args:
        config: its config.pbtxt.
        files: (name in the version's folder, file or folder to copy there).
    """

    config: ModelConfig
    files: Sequence[tuple[str, Path]] = ()


def write_repository(bundle_path: Path | str, dest: Path, options: RepositoryOptions) -> list[str]:
    """Write a repository; an existing one is exchanged in one step.

    Returns:
        The names of its models, in the order in which they are to be read.

    Raises:
        BundleError: the bundle does not hold, or the layout needs something that is not in it.
        BuildError: the place cannot be written.
    """
    bundle = read_bundle(bundle_path)
    models = _models(bundle, options)
    with staged_folder(dest) as place:
        for model in models:
            _write_model(place / model.config.name, model)
    return [model.config.name for model in models]


def write_backend(folder: Path) -> Path:
    """Write the backend's folder below `folder`, a server's backend directory; returns model.py's path."""
    home = folder / BACKEND
    with disk_faults(home):
        home.mkdir(parents=True, exist_ok=True)
        (home / "model.py").write_text(_BACKEND_MODULE, encoding="utf-8")
    return home / "model.py"


def engine_settings(bundle: Bundle, options: RepositoryOptions) -> Settings:
    """The settings of the model with the engine."""
    place = str(bundle.path.resolve()) if options.links_bundle else Settings().bundle
    return replace(options.settings, bundle=place)


def engine_files(bundle: Bundle, options: RepositoryOptions) -> list[tuple[str, Path]]:
    """What the model with the engine has in its version's folder."""
    return [] if options.links_bundle else [(Settings().bundle, bundle.path)]


def instance_kind(bundle: Bundle) -> str:
    """Where the engine runs."""
    engine = bundle.recipe["engine"]
    on_gpu = engine["backend"] in _GPU_BACKENDS or str(engine.get("device", "cpu")).startswith("cuda")
    return "KIND_GPU" if on_gpu else "KIND_CPU"


def _models(bundle: Bundle, options: RepositoryOptions) -> list[Model]:
    if options.layout == "plans":
        return [Model(config, files) for config, files in plan_models(bundle, options.name)]
    settings, files = engine_settings(bundle, options), engine_files(bundle, options)
    kind, env = instance_kind(bundle), _environment(options.python_env)
    if options.layout == "trtllm":
        if bundle.tokenizer_path is None:
            todo = "Use the layout `model`, whose prompts may be token ids."
            raise BundleError(str(bundle.path), "no tokenizer", "a tokenizer for the layout `trtllm`", todo)
        configs = trtllm_models(settings, options.max_batch_size, kind)
        own = {"tensorrt_llm": files, "preprocessing": [("tokenizer.json", bundle.tokenizer_path)]}
        own["postprocessing"] = own["preprocessing"]
        return [
            Model(replace(config, parameters={**config.parameters, **env} if config.backend else {}), own.get(name, []))
            for name, config in configs.items()
        ]
    has_tokenizer = bundle.tokenizer_path is not None
    config = ModelConfig(
        options.name,
        text_inputs(has_tokenizer),
        text_outputs(has_tokenizer),
        max_batch_size=options.max_batch_size,
        is_decoupled=True,
        parameters={**settings.parameters(), **env},
        kind=kind,
        comment=("Batching is done inside, between steps: keep one instance, and Triton's own batchers off.",),
    )
    return [Model(config, files)]


def _environment(folder: Path | None) -> dict[str, str]:
    """The parameter by which Triton's Python backend takes another environment than the server's."""
    if folder is None:
        return {}
    # Triton sources the script before it starts the stub.
    missing = [name for name in ("bin/python3", "bin/activate") if not (folder / name).exists()]
    if missing:
        todo = "Make one with python3 -m venv, and install speccompile[ort] in it."
        raise BundleError(f"--python-env {folder}", f"no {missing[0]}", "a Python environment", todo)
    return {"EXECUTION_ENV_PATH": str(folder.absolute())}


def _write_model(folder: Path, model: Model) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text_from_config(model.config), encoding="utf-8")
    for name, source in model.files:
        if source.is_dir():
            copy_folder(source, version / name)
        else:
            with contextlib.suppress(FileExistsError):
                (version / name).parent.mkdir(parents=True)
            shutil.copyfile(source, version / name)
