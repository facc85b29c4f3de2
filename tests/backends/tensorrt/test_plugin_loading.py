# SPDX-License-Identifier: Apache-2.0
"""Plugins as kernels that are loaded with the engine, and as a C++ library that TensorRT-RTX loads."""

import glob
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from speccompile.backends.base import LoadJob
from speccompile.backends.tensorrt import backend as backend_module
from speccompile.backends.tensorrt import kernels, plugins, records
from speccompile.backends.tensorrt.engine import load_engine
from speccompile.backends.tensorrt.import_helper import installed_variants
from speccompile.backends.tensorrt.kernels import find_nvcc
from speccompile.backends.tensorrt.plugin_names import KV_ROLLBACK, PLUGIN_OPS, SPEC_VERIFY
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core.dims import ModelDims
from speccompile.errors import BuildError
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from tests.backends.tensorrt.trt_lab import Lab

pytestmark = pytest.mark.plan

ROWS = 64
SPEC = tensorrt_spec(
    verified_spec(decoder_spec("target", ModelDims("llama", 97, 64, 2, 4, 2, 16, ROWS))), "float16", ROWS
)
SIZES = {"max_slots": 1, "max_rows": ROWS}


@pytest.fixture
def loaded(monkeypatch):
    """What was registered and loaded, in order."""
    seen = []
    monkeypatch.setattr(plugins, "register_plugins", lambda trt: seen.append("register"))
    monkeypatch.setattr(kernels, "load_module", lambda op, capability: seen.append((op, capability)))
    return seen


@pytest.mark.parametrize("ops", [[], [KV_ROLLBACK], list(PLUGIN_OPS)])
def test_kernels_are_loaded_before_the_plan(monkeypatch, tmp_path, loaded, ops):
    lab = Lab(monkeypatch, tmp_path)
    load_engine(LoadJob(lab.plan(None, SPEC), SPEC, **SIZES, tuning={"plugins": ops}))
    assert loaded == (["register", *((op, (9, 0)) for op in ops)] if ops else [])


def test_a_missing_compiler_is_named_when_the_engine_is_loaded(monkeypatch, tmp_path, loaded):
    def load(op, capability):
        raise BuildError("plugins", "no nvcc, and no NVRTC", "one of them", "Install one.")

    monkeypatch.setattr(kernels, "load_module", load)
    lab = Lab(monkeypatch, tmp_path)
    with pytest.raises(BuildError, match="no nvcc, and no NVRTC"):
        load_engine(LoadJob(lab.plan(None, SPEC), SPEC, **SIZES, tuning={"plugins": [SPEC_VERIFY]}))
    assert loaded == ["register"] and lab.trt.deserialized == []


@pytest.mark.parametrize(
    ("ops", "rollback", "wanted"),
    [
        ([SPEC_VERIFY], None, [SPEC_VERIFY]),
        ([SPEC_VERIFY], [KV_ROLLBACK], [KV_ROLLBACK, SPEC_VERIFY]),
        ([], [KV_ROLLBACK], [KV_ROLLBACK]),  # of a draft whose steps are trees
        ([], [], []),
    ],
)
def test_the_plugins_of_both_plans_are_loaded(monkeypatch, tmp_path, ops, rollback, wanted):
    given = []
    plans = [tmp_path / f"{name}/graph.plan" for name in ("target", "rollback")]
    record = {"variant": "tensorrt_rtx", "version": "0.0", "profiles": []}
    for plan, held in zip(plans, (ops, rollback or []), strict=True):
        plan.parent.mkdir()
        records.write_record(plan, {**record, "plugins": held})
    monkeypatch.setattr(records, "check_record", lambda *arguments: None)
    monkeypatch.setattr("speccompile.backends.tensorrt.engine.load_engine", given.append)
    compactor = None if rollback is None else plans[1]
    maker, tuning = backend_module.TensorRTBackend(), {"others_bytes": 5}
    maker.load(LoadJob(plans[0], SPEC, **SIZES, tuning=tuning, rollback=compactor))
    maker.load(LoadJob(plans[0], SPEC, **SIZES, tuning=tuning, owners={"target": None}))  # a draft
    target, draft = (job.tuning for job in given)
    assert (target["plugins"], target["others_bytes"]) == (wanted, 5) and "others_bytes" not in draft


def test_extras_bring_what_a_gpu_needs_beside_its_driver():
    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("tensorrt", "tensorrt-rtx"):
        found = {line.split(">")[0] for line in extras[extra]}
        assert found == {"cuda-python", "ml-dtypes", "nvidia-cuda-nvrtc", extra}  # ml-dtypes: bfloat16 on the host
    assert "onnxruntime-gpu[cuda,cudnn]" in {line.split(">")[0] for line in extras["ort-gpu"]}


def test_nvrtc_of_the_extra_is_found_and_compiles(monkeypatch, tmp_path):
    """The real one: cuda-python finds the wheel's library without a toolkit on the machine."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed: NVRTC WAS NOT RUN")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "find_nvcc", lambda: None)
    ptx = kernels.compile_kernels(KV_ROLLBACK, (9, 0), "ptx")
    assert b".entry kv_rollback_16" in ptx and b".target sm_90" in ptx and not ptx.endswith(b"\0")
    assert kernels.compile_kernels(KV_ROLLBACK, (12, 0)).startswith(b"\x7fELF")


ROOT = Path(__file__).parents[3]
_PLACES = ("/usr/include", "/usr/include/*-linux-gnu", "/usr/local/tensorrt/include", "/usr/local/TensorRT*/include")


def _headers() -> str | None:
    given = [os.environ["TENSORRT_INCLUDE_DIR"]] if os.environ.get("TENSORRT_INCLUDE_DIR") else []
    candidates = given + [candidate for pattern in _PLACES for candidate in sorted(glob.glob(pattern))]
    return next((candidate for candidate in candidates if (Path(candidate) / "NvInfer.h").is_file()), None)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    headers, nvcc = _headers(), find_nvcc()
    if headers is None or nvcc is None or "tensorrt_rtx" not in installed_variants():
        lacks = [
            name
            for name, there in (("TensorRT's headers (set TENSORRT_INCLUDE_DIR)", headers), ("nvcc", nvcc))
            if not there
        ]
        pytest.skip(f"THE C++ PLUGIN LIBRARY WAS NOT COMPILED: no {', '.join(lacks) or 'TensorRT-RTX'}")
    built = tmp_path_factory.mktemp("library") / "libspeccompile_plugins.so"
    command = ["make", "plugins", f"TENSORRT_INCLUDE_DIR={headers}", f"PLUGIN_LIBRARY={built}"]
    command += ["PLUGIN_ARCHS=80", f"NVCC={nvcc}"]  # one GPU: the sources are the same for all
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    return built


def test_the_library_exports_what_tensorrt_looks_for_and_needs_nothing_of_it(library):
    def names(*options: str) -> set[str]:
        done = subprocess.run(["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True)
        return {line.split()[-1] for line in done.stdout.splitlines()}

    assert {"getCreators", "setLoggerFinder"} <= names("--defined-only")
    assert not {
        name for name in names("--undefined-only") if "nvinfer" in name or name.startswith(("cuda", "getPlugin"))
    }


def test_plans_are_built_with_it(library):
    command = [sys.executable, "-m", "tests.backends.tensorrt.library_child", str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["registered"] == 0
    assert said["plugins"] == ["verify", "compact"]
    assert said["float16"] > 0 and said["bfloat16"] > 0 and said["map"] > 0
    assert said["embedded"] > said["float16"] + library.stat().st_size // 2  # the library is in the plan
    assert said["ops"] == ["SpecVerify", "KVRollback"]
    assert said["wrong"] and said["errors"] == [
        "KVRollback: got 6 inputs; expected 1 caches (num_caches), lengths and path."
    ]


def test_without_headers_make_says_what_to_give(tmp_path):
    command = ["make", "plugins", f"TENSORRT_INCLUDE_DIR={tmp_path}", f"PLUGIN_LIBRARY={tmp_path}/lib.so"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"not at '{tmp_path}': make plugins TENSORRT_INCLUDE_DIR=..." in done.stderr
