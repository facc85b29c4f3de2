# SPDX-License-Identifier: Apache-2.0
"""Write a model repository for a bundle, and the backend that its models name."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from speccompile.bundle.bundle import Bundle, read_bundle
from speccompile.bundle.files import check_file, write_file
from speccompile.bundle.format import MODEL, write_record
from speccompile.bundle.staging import Claim, check_home, claim_folder, copy_folder, resolve_path, staged_folder
from speccompile.common.extras import install_command
from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.errors import BuildError, BundleError, RecipeError
from speccompile.serving.triton.config_text import BACKEND, ModelConfig, text_from_config
from speccompile.serving.triton.contract import TRITON_TYPES, Tensor, text_inputs, text_outputs
from speccompile.serving.triton.settings import Settings
from speccompile.serving.triton.trtllm.layout import trtllm_models

LAYOUTS = ("model", "trtllm", "plans")
_GPU_BACKENDS = frozenset({"tensorrt"})
_SEAL = "# Written by `speccompile triton`; SHA-256 of the lines above: "

_BACKEND_MODULE = '''# SPDX-License-Identifier: Apache-2.0
"""Triton's Python-based backend "speccompile": all of it is in the package, which the stub's Python must have."""

import sys

try:
    from speccompile.serving.triton.backend import TritonPythonModel
except ModuleNotFoundError as fault:
    raise ModuleNotFoundError(
        f"{fault}; Triton runs this model with {sys.executable} ({sys.prefix}). Install its extra [ort] there, or "
        "write the repository with --python-env DIR, the environment that has it."
    ) from fault

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class RepositoryOptions:
    """The contents of the repository.

    Args:
        layout: `model`: one decoupled model; `trtllm`: the five models of the removed TensorRT-LLM backend; `plans`:
            the TensorRT plans as models of Triton's own `tensorrt` backend.
        python_env: folder of a Python environment that has speccompile; None: the one on the server's PATH.
    """

    layout: str = "model"
    name: str = BACKEND  # of the model in the layout `model`, and the first part of the names in `plans`
    max_batch_size: int = 0  # 0: tensors without a batch dim; above: requests may hold that many rows
    links_bundle: bool = False
    python_env: Path | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class Model:
    """One folder of the repository."""

    config: ModelConfig
    files: Sequence[tuple[str, Path]] = ()  # (name in the version's folder, file or folder to copy there)


def write_repository(bundle_path: Path | str, dest: Path, options: RepositoryOptions) -> list[str]:
    """Writes models into a repository, beside others, exchanged in one step; returns their names in reading order.

    Raises:
        BundleError: the bundle does not hold, or the layout needs something that is not in it.
        BuildError: the folder cannot be written, or a model of that name is not ours or was changed.
    """
    _check_name(options.name)
    repository = resolve_path(dest)
    check_home(repository, dest)
    bundle = read_bundle(bundle_path)
    models = _models(bundle, options)
    claims = [_claim_model(repository / model.config.name) for model in models]

    def hold() -> None:
        for claim in claims:
            claim.hold()

    with staged_folder(repository, hold, keeps_others=True) as staged:
        for model in models:
            _write_model(staged / model.config.name, model)
    return [model.config.name for model in models]


def check_backend(folder: Path) -> Path:
    """Check that the backend can be written below `folder`, a server's backend directory; returns model.py's path."""
    path = folder / BACKEND / "model.py"
    check_file(path, makes_folder=True)
    if path.exists() and not _is_ours(path.read_bytes()):
        got, todo = "a file that was edited, or is not speccompile's", "Move it away, or choose another --backends."
        raise BuildError(str(path), got, "the backend as speccompile writes it, or nothing", todo)
    return path


def write_backend(folder: Path) -> Path:
    """Write the backend's folder below `folder`; returns model.py's path. See `check_backend`."""
    path = check_backend(folder)
    write_file(path, f"{_BACKEND_MODULE}{_SEAL}{_digest(_BACKEND_MODULE.encode())}\n", makes_folder=True)
    return path


def _is_ours(data: bytes) -> bool:
    body, seal, digest = data.rpartition(_SEAL.encode())
    return digest.strip() == _digest(body).encode() if seal else data == _BACKEND_MODULE.encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or name.startswith("."):
        raise RecipeError("--name", repr(name), "the name of a folder", "Choose another name.")


def _claim_model(folder: Path) -> Claim:
    if folder.is_symlink():
        raise BuildError(str(folder), "a link", f"a {MODEL} to replace, or nothing", "Remove it, or choose a --name.")
    return claim_folder(folder, MODEL)


def engine_settings(bundle: Bundle, options: RepositoryOptions) -> Settings:
    bundle_path = str(bundle.path.resolve()) if options.links_bundle else Settings().bundle
    return replace(options.settings, bundle=bundle_path)


def engine_files(bundle: Bundle, options: RepositoryOptions) -> list[tuple[str, Path]]:
    return [] if options.links_bundle else [(Settings().bundle, bundle.path)]


def instance_kind(bundle: Bundle) -> str:
    engine = bundle.recipe.engine
    on_gpu = engine.backend in _GPU_BACKENDS or engine.device.startswith("cuda")
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
        text_inputs(has_tokenizer, has_vision=bundle.images is not None),
        text_outputs(has_tokenizer),
        max_batch_size=options.max_batch_size,
        is_decoupled=True,
        parameters={**settings.parameters(), **env},
        kind=kind,
        comment=("Batching is done inside, between steps: keep one instance, and Triton's own batchers off.",),
    )
    return [Model(config, files)]


def _environment(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    # Triton sources the script before it starts the stub.
    missing = [name for name in ("bin/python3", "bin/activate") if not (folder / name).exists()]
    if missing:
        todo = f"Make one with python3 -m venv, and there: {install_command('ort')}."
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
    write_record(folder, MODEL)


PLAN_NAME = "model.plan"  # what the `tensorrt` backend looks for in a version's folder


def plan_models(bundle: Bundle, prefix: str) -> list[tuple[ModelConfig, list[tuple[str, Path]]]]:
    """Returns a model for each plan: inputs and outputs of its GraphSpec, dim by dim."""
    names = [name for name in bundle.graphs if bundle.graph_path(name).suffix == ".plan"]
    if not names:
        todo = "Build it with --backend tensorrt, or choose another layout."
        raise BundleError(str(bundle.path), "no TensorRT plan", "plans for the layout `plans`", todo)
    return [
        (
            ModelConfig(
                f"{prefix}_{name}",
                tensors(bundle.graph_spec(name), is_input=True),
                tensors(bundle.graph_spec(name), is_input=False),
                backend="tensorrt",
                kind="KIND_GPU",
                num_profiles=len(bundle.graphs[name].get("tensorrt", {}).get("profiles") or ()),
                comment=comment(bundle, name),
            ),
            [(PLAN_NAME, bundle.graph_path(name))],
        )
        for name in names
    ]


def tensors(spec: GraphSpec, is_input: bool) -> list[Tensor]:
    """Returns a graph's inputs or outputs as in config.pbtxt, dynamic dims as -1. Raises BundleError: unknown dtype."""
    return [_tensor(spec, tensor) for tensor in (spec.inputs if is_input else spec.outputs)]


def _tensor(spec: GraphSpec, tensor: TensorSpec) -> Tensor:
    if tensor.dtype not in TRITON_TYPES:
        known = ", ".join(TRITON_TYPES)
        raise BundleError(f"{spec.name}.{tensor.name}", f"dtype {tensor.dtype}", f"one of {known}", "Build it anew.")
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in tensor.dims)
    return Tensor(tensor.name, tensor.dtype, dims, is_optional=False)


def comment(bundle: Bundle, name: str) -> tuple[str, ...]:
    """Returns what callers of the plan need to know: plugins, caches, profiles."""
    record = bundle.graphs[name].get("tensorrt", {})
    spec = bundle.graph_spec(name)
    lines = [f"Plan of the graph {name}, built by {record.get('variant')} {record.get('version')}."]
    plugins = ", ".join(record.get("plugins") or ())
    if plugins:
        lines.append(f"Plugins: {plugins}. Start the server with")
        lines.append('--backend-config=tensorrt,plugins="libspeccompile_plugins.so" (make plugins builds it).')
    if spec.caches:
        lines.append("Each cache and its updates are one memory: bind the outputs to the address of their input.")
    for profile in record.get("profiles") or ():
        sizes = "; ".join(f"{dim} {', '.join(map(str, bounds))}" for dim, bounds in profile["sizes"].items())
        lines.append(f"Profile {profile['name']} (least, best, most): {sizes}.")
    return tuple(lines)
