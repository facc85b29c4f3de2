# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for the supported GPUs, within the limits of registers and shared memory."""

import ctypes
import platform
import re
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from speccompile.backends.onnxruntime import kernel_build
from speccompile.backends.tensorrt import kernels, launches
from speccompile.backends.tensorrt.plugin_names import KV_ROLLBACK, PLUGIN_OPS, SPEC_VERIFY
from speccompile.backends.tensorrt.variants import VARIANTS
from speccompile.errors import BuildError
from tests import store

pytestmark = pytest.mark.plan

NVCC = kernels.find_nvcc()
RUN = subprocess.run
ARCHS = ("sm_80", "sm_90", "sm_120")
ENTRIES = {
    SPEC_VERIFY: {"spec_verify_resolve", *(f"spec_verify_scan_{t}" for t in ("f32", "f16", "bf16"))},
    KV_ROLLBACK: {f"kv_rollback_{unit}" for unit in (16, 4, 2)},
}
ROOT = Path(__file__).parents[2]
HEADERS = ROOT / "tests/backends/tensorrt/headers"
STUBS = ("-isystem", str(HEADERS), "-arch=compute_80", "-code=compute_80")
needs_nvcc = pytest.mark.skipif(
    NVCC is None, reason="NO NVCC: the CUDA kernels WERE NOT COMPILED. Install CUDA's nvcc."
)


def _compile(source: Path, dest: Path, *options: str) -> str:
    """Returns nvcc's messages on a source that compiles; from the store for the same sources, options and nvcc."""
    version = subprocess.run([str(NVCC), "--version"], capture_output=True, text=True, check=True).stdout

    def make(folder: Path) -> None:
        language = () if source.suffix == ".ptx" else (*kernels._OPTIONS, "-x", "cu", f"-I{kernels.find_sources()}")
        command = [str(NVCC), *language, *options, str(source), "-o", f"{dest}.out"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (folder / "said.txt").write_text(done.stderr)

    sources = {str(p.relative_to(kernels.find_sources())): p.read_text() for p in _headers()}
    sources |= {p.name: p.read_text() for p in sorted(HEADERS.iterdir())}
    own = {"options": [*kernels._OPTIONS, *options], "source": source.read_text(), "nvcc": version}
    store.fetch("kernels", {**own, "sources": sources}, dest, make)
    return (dest / "said.txt").read_text()


def _headers() -> list[Path]:
    """Returns the headers that nvcc may read."""
    root = kernels.find_sources()
    return sorted(p for p in root.rglob("*.*h") if p.relative_to(root).parts[0] != "cpu")


def test_the_kernels_have_the_same_code_for_all_gpus():
    """So the PTX of the oldest GPU is that of all: the front end runs once, and ptxas for each."""
    found = [line for path in _headers() for line in path.read_text().splitlines() if "CUDA_ARCH" in line]
    assert found == ["#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800"]  # refused


FULL_TENSORRT = ((9, 0), (10, 0), (10, 3), (11, 0))  # GPUs that TensorRT-RTX does not support: docs/reference/gpu.md


def test_the_plugin_library_has_code_for_every_gpu_of_tensorrt():
    """Code of a GPU runs on those of the same major number and a larger minor one."""
    (line,) = re.findall(r"^PLUGIN_ARCHS +\?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    archs = [divmod(int(arch), 10) for arch in line.split()]
    for major, minor in (*VARIANTS["tensorrt_rtx"].target_capabilities, *FULL_TENSORRT):
        assert any(arch[0] == major and arch[1] <= minor for arch in archs), f"{major}.{minor}"


@needs_nvcc
@pytest.mark.parametrize("op", PLUGIN_OPS)
def test_kernels_compile(op, tmp_path):
    """For every GPU, with the registers and the shared memory that a launch may use."""
    with store.compiled_kernels():
        ptx = kernels.compile_kernels(op, (int(ARCHS[0][-2]), int(ARCHS[0][-1])), "ptx")
    source = tmp_path / "kernels.ptx"
    source.write_bytes(ptx)
    for arch in ARCHS:
        said = _compile(source, tmp_path / arch, f"-arch={arch}", "-cubin", "-Xptxas", "-v")
        assert "warning" not in said
        reports = re.findall(
            r"Compiling entry function '(\w+)' for '(\w+)'(.*?ptxas info    : Used [^\n]*)", said, re.S
        )
        assert {(entry, compiled_for) for entry, compiled_for, _ in reports} == {(entry, arch) for entry in ENTRIES[op]}
        for entry, _, report in reports:
            registers = int(re.findall(r"Used (\d+) registers", report)[0])
            shared = int((re.findall(r"(\d+) bytes smem", report) or ["0"])[0])
            is_resolving = entry == "spec_verify_resolve"
            threads = launches.RESOLVE_THREADS if is_resolving else launches.SCAN_THREADS
            dynamic = (
                launches.verify_launches(1, 1, launches.MAX_VOCAB, "float16")[1].shared_bytes if is_resolving else 0
            )
            assert registers * threads <= 65536, entry
            assert shared + dynamic <= 48 * 1024, entry  # more would have to be asked for at every launch
            if entry.startswith(("spec_verify_scan", "kv_rollback")):
                assert registers <= 80, entry  # 24 warps of a multiprocessor stay resident, each with 2 KiB in flight


@needs_nvcc
@pytest.mark.parametrize("name", ["spec_verify/plugin.cpp", "kv_rollback/plugin.cpp", "library.cpp"])
def test_the_library_compiles_against_the_documented_interface(name, tmp_path):
    """Without TensorRT's headers: a stub has the names that the sources use; kernels compile beside code of the host.

    PTX is the device's part here.
    """
    said = _compile(kernels.find_sources() / name, tmp_path / "object", *STUBS, "-Xcompiler", "-Wall,-Wextra", "-c")
    assert "warning" not in said and "error" not in said


@needs_nvcc
def test_a_signature_that_is_not_documented_does_not_compile(tmp_path):
    source = (kernels.find_sources() / "library.cpp").read_text()
    wrong = source + "struct W : speccompile::trt::ILogger { void log(int, char const*) noexcept override {} };\n"
    (tmp_path / "wrong.cpp").write_text(wrong)
    with pytest.raises(AssertionError, match="override"):
        _compile(tmp_path / "wrong.cpp", tmp_path / "object", *STUBS, "-c")


@needs_nvcc
def test_what_was_compiled_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    code = kernels.compile_kernels(KV_ROLLBACK, (9, 0))
    (kept,) = (tmp_path / "kernels").iterdir()
    assert kept.name.startswith("KVRollback-sm_90-") and kept.read_bytes() == code
    kept.write_bytes(b"kept")
    assert kernels.compile_kernels(KV_ROLLBACK, (9, 0)) == b"kept"
    assert b".entry kv_rollback_16" in kernels.compile_kernels(KV_ROLLBACK, (9, 0), "ptx")


@needs_nvcc
def test_a_gpu_that_no_compiler_knows(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed: NVRTC WAS NOT RUN")
    with pytest.raises(
        BuildError, match=r"KVRollback for sm_999: got .*sm_999.* from nvcc, .* from NVRTC; expected a comp"
    ):
        kernels.compile_kernels(KV_ROLLBACK, (99, 9))
    assert not list((tmp_path / "kernels").iterdir())


def test_a_compiler_is_looked_for_in_cuda_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").write_text("")
    assert kernels.find_nvcc() != tmp_path / "bin/nvcc"
    (tmp_path / "bin/nvcc").chmod(0o755)
    assert kernels.find_nvcc() == tmp_path / "bin/nvcc"


def test_without_a_compiler(monkeypatch):
    def no_nvrtc(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(kernels, "find_nvcc", lambda: None)
    monkeypatch.setattr(kernels.importlib, "import_module", no_nvrtc)
    with pytest.raises(
        BuildError, match=r"plugins: got no nvcc, and no NVRTC: .*; expected one of them\. Install CUDA's"
    ):
        kernels.compile_kernels(KV_ROLLBACK, (9, 0))


class FakeNvrtc:
    """NVRTC with one outcome; `faults` fail to compile."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults

    def nvrtcVersion(self) -> tuple[int, int, int]:
        return 0, 13, 0

    def nvrtcCreateProgram(self, source: bytes, *rest: object) -> tuple[int, bytes]:
        return 0, source

    def nvrtcCompileProgram(self, *rest: object) -> tuple[int]:
        return (len(self.faults),)

    def nvrtcGetProgramLogSize(self, program: bytes) -> tuple[int, int]:
        return 0, 80

    def nvrtcGetProgramLog(self, program: bytes, log: bytes) -> None:
        ctypes.memmove(log, self.faults[0].encode(), len(self.faults[0]))

    def nvrtcGetCUBINSize(self, program: bytes) -> tuple[int, int]:
        return 0, 5

    nvrtcGetPTXSize = nvrtcGetCUBINSize

    def nvrtcGetCUBIN(self, program: bytes, code: bytes) -> None:
        ctypes.memmove(code, b"NVRTC", 5)

    nvrtcGetPTX = nvrtcGetCUBIN

    def nvrtcDestroyProgram(self, program: bytes) -> None:
        pass


OLD = "nvcc fatal   : Unsupported gpu architecture 'compute_120'"
NO_HOST = "gcc: No such file or directory\nnvcc fatal   : Failed to preprocess host compiler properties."


@pytest.mark.parametrize(
    ("said", "nvrtc", "expected"),
    [
        (NO_HOST, FakeNvrtc(), None),
        (NO_HOST, FakeNvrtc("error: bad"), r"KVRollback.*: got nvcc fatal .*host compiler.* nvcc, error: bad.* NVRTC;"),
        (NO_HOST, None, r"plugins: got an nvcc that fails \(nvcc fatal .*host compiler.*\), and no NVRTC: .*Install"),
        (OLD, FakeNvrtc(), None),
        (OLD, None, r"plugins: got an nvcc that fails \(nvcc fatal .*compute_120.*\), and no NVRTC: .*Install"),
        ("kernel.cuh(3): error: bad", FakeNvrtc(), None),
        (None, FakeNvrtc(), None),
        (None, FakeNvrtc("error: bad"), r"KVRollback for sm_90: got error: bad"),
        (None, None, r"plugins: got an nvcc that does not run \(.*nvcc\), and no NVRTC: .*Install"),
    ],
)
def test_nvrtc_compiles_where_nvcc_does_not(said, nvrtc, expected, tmp_path, monkeypatch):
    def load(name: str) -> FakeNvrtc:
        if nvrtc is None:
            raise ImportError(name)
        return nvrtc

    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit {int(said is None)}\nprintf "{said}" >&2\nexit 1\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(kernels.importlib, "import_module", load)
    if expected is None:
        assert kernels.compile_kernels(KV_ROLLBACK, (9, 0)) == b"NVRTC"
    else:
        with pytest.raises(BuildError, match=expected):
            kernels.compile_kernels(KV_ROLLBACK, (9, 0))


# SpecVerify's cubin takes NVRTC most of a minute on each GPU; nvcc compiles it above, so here its PTX stands for it.
@pytest.mark.parametrize(
    ("op", "gpu", "kind"),
    [(KV_ROLLBACK, gpu, kind) for gpu in ("75", "80", "90", "100", "120") for kind in ("cubin", "ptx")]
    + [(SPEC_VERIFY, "75", "ptx")],
)
def test_the_real_nvrtc_compiles_the_kernels(op, gpu, kind):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed: NVRTC WAS NOT RUN")
    arch = f"{'sm' if kind == 'cubin' else 'compute'}_{gpu}"
    code = kernels._run_nvrtc(op, arch, kind, f'#include "{kernels.SOURCES[op]}"')
    if kind == "cubin":
        assert code.startswith(b"\x7fELF")
    else:
        assert f".target sm_{gpu}".encode() in code
    assert all(entry.encode() in code for entry in ENTRIES[op])


def test_the_digest_follows_the_sources(tmp_path, monkeypatch):
    import shutil

    tree = tmp_path / "plugins"
    shutil.copytree(kernels.find_sources(), tree)
    monkeypatch.setattr(kernels, "find_sources", lambda: tree)
    first = kernels.sources_digest.__wrapped__()
    assert first == kernels.sources_digest()
    (tree / "common.cuh").write_text((tree / "common.cuh").read_text() + "// \n")
    assert kernels.sources_digest.__wrapped__() != first


def _compile_stub(command: tuple[str, ...], **given: Any) -> subprocess.CompletedProcess[str]:
    """Compiles one function in place of the kernels: `make test-wheel` runs those that a wheel has."""
    if "-c" not in command:
        return RUN(command, **given)
    at = command.index("-c") + 1
    has_entry = Path(command[at]).name == "library.cpp"
    text = 'extern "C" __attribute__((visibility("default"))) void RegisterCustomOps() {}' if has_entry else ""
    return RUN([*command[:at], "-x", "c++", "-", *command[at + 1 :]], input=text, **given)


def test_the_wheel_carries_the_sources_and_libraries_for_common_cpus(monkeypatch):
    hatchling = pytest.importorskip("hatchling.build", reason="hatchling is not installed: the wheel WAS NOT BUILT")
    monkeypatch.chdir(kernels.find_sources().parent)
    monkeypatch.setattr(subprocess, "run", _compile_stub)
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder) / hatchling.build_wheel(folder)
        archive = zipfile.ZipFile(wheel)
        names = set(archive.namelist())
        libraries = {f"speccompile/cpu_kernels/{variant.name}.so": variant for variant in kernel_build.VARIANTS}
        has_libraries = platform.machine() == "x86_64" and kernel_build.find_compiler() is not None
        assert libraries.keys() & names == (libraries.keys() if has_libraries else set())
        assert wheel.name.endswith("-py3-none-linux_x86_64.whl" if has_libraries else "-py3-none-any.whl")
        for name, variant in libraries.items():
            if name in names and variant.features <= kernel_build.cpu_features():
                assert ctypes.CDLL(archive.extract(name, folder)).RegisterCustomOps
    wanted = {p.relative_to(kernels.find_sources()) for p in kernels.find_sources().rglob("*.cuh")}
    assert {f"speccompile/plugin_sources/{name}" for name in wanted} <= names
