# SPDX-License-Identifier: Apache-2.0
"""Results that many tests use, made once a change of what they depend on: on disk, for all workers and later runs.

For tests that use an exported graph or a built bundle. Tests of the exporter and of the build make their own.
`cheap_stages` is for bundles whose measured times no test looks at.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import speccompile
from speccompile.bundle.format import (
    digest_from_json,
    digest_from_package,
    digest_from_sources,
    digests_from_folder,
    versions_from_environment,
)
from speccompile.bundle.stage_cache import StageCache
from speccompile.core.dims import ModelDims, dims_from_json, json_from_dims

_LIMIT_BYTES = 4 * 2**30
_MODEL, _DIMS = "model.onnx", "dims.json"
# Packages that run after the export: whatever else is in speccompile may change a graph.
_LATER = ("backends", "bundle", "cli", "drafting", "recipe", "runtime", "serving", "training")


def root() -> Path:
    """Returns the folder of the store: $SPECCOMPILE_TEST_CACHE, or one under .pytest_cache."""
    given = os.environ.get("SPECCOMPILE_TEST_CACHE")
    return Path(given) if given else Path(__file__).parents[1] / ".pytest_cache/speccompile"


def stages() -> StageCache:
    """Returns the product's cache for builds of tests."""
    return StageCache(root() / "build", _LIMIT_BYTES)


def digest_of_sources(but: tuple[str, ...] = ()) -> str:
    """Returns the digest of speccompile's sources, the packages `but` excepted."""
    package = Path(speccompile.__file__).parent
    names = (p.stem for p in package.iterdir() if p.suffix == ".py" or (p.is_dir() and p.name != "__pycache__"))
    return digest_from_sources(sorted(set(names) - set(but)))


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Excludes other workers from blocks of the same name."""
    folder = root() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(stage: str, depends_on: Mapping[str, Any], dest: Path, make: Callable[[Path], None]) -> None:
    """Fills the new folder `dest` with what `make` writes into a folder, or wrote for the same `depends_on` before.

    Args:
        stage: name of the kind of result.
        depends_on: JSON-ready; all that the result depends on, the versions of packages excepted.
        dest: does not exist yet.
        make: writes the result into an existing empty folder.
    """
    key = digest_from_json({**depends_on, "versions": versions_from_environment()})
    with locked(f"{stage}-{key[:16]}"):
        StageCache(root(), _LIMIT_BYTES).fetch(stage, key, dest, make)


@contextmanager
def compiled_kernels() -> Iterator[None]:
    """Keeps the GPU kernels that are compiled inside: the PTX of SpecVerify takes nvcc 7 s of CPU time."""
    with locked("kernels"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECCOMPILE_CACHE", str(root() / "build"))
        yield


def export_decoder(source: Path, **options: Any) -> tuple[Any, ModelDims]:
    """Returns `speccompile.export.decoder.export_decoder` of a folder whose files are all that it reads."""

    def export() -> tuple[Any, ModelDims]:
        from speccompile.export.decoder import export_decoder

        return export_decoder(source, **options)

    files = digests_from_folder(source)
    return _graph(
        {"decoder": files, "options": json.loads(json.dumps(options))}, export, lambda d: dims_from_json(ModelDims, d)
    )


def export(source: Any) -> tuple[Any, Any]:
    """Returns the result of `export` of a `speccompile.core.protocols.GraphSource`."""
    # A backend quantises the exported graph: the graph is the same for all quantizations.
    job, context = replace(source.job, quantization="none"), source.context
    depends_on = {
        "source": job.source,
        "method": digest_from_package(job.source.partition(":")[0]),
        "class": f"{type(source).__module__}.{type(source).__qualname__}",
        "job": repr(replace(job, model="", config=None)),
        "context": repr(replace(context, target_job=None)),
        "files": source.digests(),
        "spec": source.spec().json_from_spec(),
    }
    return _graph(depends_on, lambda: source.export(lambda stage: None), lambda d: dims_from_json(type(source.dims), d))


def write_checkpoint(write: Callable[[Path, Path], Any], folder: Path, target: Path) -> None:
    """Fills the new `folder` with the speculator that `write` of tests.method_rows trains for a target."""
    labs = Path(__file__).parent.rglob("[!t]*.py")  # no test
    depends_on = {
        "write": write.__qualname__,
        "target": digests_from_folder(target),
        "labs": {file.name: file.read_text() for file in sorted(labs) if file.parent.name in ("tests", "speculators")},
        "sources": digest_of_sources(("serving", "cli", "planner", "benchmark")),
    }

    def make(made: Path) -> None:
        write(made / "new", target)
        for file in (made / "new").iterdir():
            file.rename(made / file.name)
        (made / "new").rmdir()

    fetch("checkpoints", depends_on, folder, make)


@contextmanager
def cheap_measurements() -> Iterator[None]:
    """ONNX Runtime's backend inside measures a few steps on one thread in this process.

    It measures 1.5 s in a child process, three times where other work disturbs it, as the second worker does; and each
    kernel form of a graph that is compiled without a form's name.
    """
    from speccompile.backends import measuring
    from speccompile.backends.onnxruntime import tune

    def measure(job: Any, node_counts: Sequence[int] = measuring.NODE_COUNTS, tries: int = 1) -> dict[str, Any]:
        settings = {"threads": job.threads or 1, "spinning": "stop"}
        measured = tune._measure(replace(job, tuning=settings), node_counts)
        found = {**settings, **measured, tune.WAIT_SHARE: 0.0}
        return {"cpu": tune.cpu_name(), **found, "tried": [found]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "SECONDS_PER_SETTING", 0.0)
        patch.setattr(measuring, "MIN_REPEATS", 2)
        patch.setattr(tune, "measure_graph", measure)
        yield


@contextmanager
def cheap_stages() -> Iterator[None]:
    """Builds inside take exports from the store; see `cheap_measurements`."""
    from speccompile.bundle import graphs

    with cheap_measurements(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_export", lambda source, log: export(source))
        yield


def _graph(
    depends_on: Mapping[str, Any], export: Callable[[], tuple[Any, Any]], dims_from: Callable[[dict[str, Any]], Any]
) -> tuple[Any, Any]:
    import onnx_ir as ir

    def make(folder: Path) -> None:
        model, dims = export()
        ir.save(model, folder / _MODEL)
        (folder / _DIMS).write_text(json.dumps(json_from_dims(dims)))

    scratch = Path(tempfile.mkdtemp(prefix="speccompile-graph-"))
    try:
        fetch("exports", {**depends_on, "sources": digest_of_sources(_LATER)}, scratch / "graph", make)
        dims = dims_from(json.loads((scratch / "graph" / _DIMS).read_text()))
        return ir.load(scratch / "graph" / _MODEL), dims
    finally:
        shutil.rmtree(scratch)
