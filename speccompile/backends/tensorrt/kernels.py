# SPDX-License-Identifier: Apache-2.0
"""Compile the plugins' CUDA sources for a GPU, once per machine, and launch them on raw pointers.

nvcc, else NVRTC through cuda-python; kernels are kept under the digest of sources, compiler and options.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speccompile.backends.tensorrt.launches import (
    DTYPES,
    KVRollbackArgs,
    Launch,
    SpecVerifyArgs,
    rollback_args,
    rollback_launches,
    rollback_vector_bytes,
    verify_launches,
)
from speccompile.backends.tensorrt.plugin_names import KV_ROLLBACK, SPEC_VERIFY
from speccompile.common.code_cache import find_code_file, write_file
from speccompile.errors import BuildError, RuntimeFault

SOURCES = {SPEC_VERIFY: "spec_verify/kernel.cuh", KV_ROLLBACK: "kv_rollback/kernel.cuh"}
_log = logging.getLogger(__name__)
_KIND = "kernels"  # the folder in the cache
_OPTIONS = ("-std=c++17",)
_INSTALL = "Install CUDA's nvcc and gcc (or pip install nvidia-cuda-nvrtc), or build with engine.plugins: none."


def find_sources() -> Path:
    """Returns the folder of the kernels: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[2]
    candidates = (package / "plugin_sources", package.parent / "plugins")
    for candidate in candidates:
        if (candidate / "common.cuh").is_file():
            return candidate
    raise BuildError(
        "plugins", "no kernel sources", f"them in {candidates[0]} or {candidates[1]}", "Install speccompile anew."
    )


@functools.cache
def sources_digest() -> str:
    """Returns the SHA-256 of the kernels' sources and their names."""
    root, digest = find_sources(), hashlib.sha256()
    for path in sorted(root.rglob("*.cuh")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def find_nvcc() -> Path | None:
    """Finds nvcc: on the PATH, under CUDA_HOME or CUDA_PATH, or of NVIDIA's wheel; None where there is none."""
    found = shutil.which("nvcc")
    candidates = [Path(found)] if found else []
    candidates += [Path(os.environ[name]) / "bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        candidates += sorted(Path(folder).glob("*/bin/nvcc"))
    return next((candidate for candidate in candidates if os.access(candidate, os.X_OK)), None)


def compile_kernels(op: str, capability: tuple[int, int], kind: str = "cubin") -> bytes:
    """Returns the kernels of an op, from the cache or compiled now (up to half a minute for SpecVerify).

    Args:
        kind: cubin, or ptx for a GPU of this generation or a later one.
    """
    nvcc, compiler = _find_compiler()
    arch = f"{'sm' if kind == 'cubin' else 'compute'}_{capability[0]}{capability[1]}"
    identity = "\n".join((sources_digest(), compiler, arch, *_OPTIONS))
    name = f"{op}-{arch}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.{kind}"
    cached = find_code_file(f"{_KIND}/{name}")
    if cached.exists():
        return cached.read_bytes()
    source = f'#include "{SOURCES[op]}"\n'
    code = _run_nvcc(nvcc, op, arch, kind, source) if nvcc else _run_nvrtc(op, arch, kind, source)
    try:
        write_file(cached, code)
    except OSError as fault:
        _log.warning("the compiled kernels of %s are not kept: %s", op, fault)
    return code


def _find_compiler() -> tuple[Path | None, str]:
    nvcc = find_nvcc()
    version = _nvcc_version(nvcc) if nvcc else None
    if version is not None:
        return nvcc, version
    nvrtc = _load_nvrtc(f"an nvcc that does not run ({nvcc})" if nvcc else "no nvcc")
    return None, f"nvrtc {nvrtc.nvrtcVersion()[1:]}"


@functools.cache
def _nvcc_version(nvcc: Path) -> str | None:
    try:
        return subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def _run_nvcc(nvcc: Path, op: str, arch: str, kind: str, source: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        output, unit = Path(folder) / f"kernels.{kind}", Path(folder) / "kernels.cu"
        unit.write_text(source)
        command = [
            str(nvcc),
            *_OPTIONS,
            f"-arch={arch}",
            f"-{kind}",
            f"-I{find_sources()}",
            str(unit),
            "-o",
            str(output),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return output.read_bytes()
    # It may have no host compiler, or not know the GPU: a distribution's nvcc is often older than NVRTC's wheel.
    fault = _compile_error(op, arch, done.stderr)
    _load_nvrtc(f"an nvcc that fails ({fault.got})")
    try:
        return _run_nvrtc(op, arch, kind, source)
    except BuildError as other:
        got = f"{fault.got} from nvcc, {other.got} from NVRTC"
        raise BuildError(fault.where, got, fault.expected, fault.todo) from other


def _load_nvrtc(nvcc: str = "no nvcc") -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as fault:  # cuda-python finds the library when the first function is called
        raise BuildError("plugins", f"{nvcc}, and no NVRTC: {fault}", "one of them", _INSTALL) from fault
    return nvrtc


def _run_nvrtc(op: str, arch: str, kind: str, source: str) -> bytes:
    nvrtc, root = _load_nvrtc(), find_sources()
    headers = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*.cuh"))}
    names = [name.encode() for name in headers]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", len(headers), list(headers.values()), names)
    # NVRTC has no host code: lambdas and constants are for the device.
    options = [option.encode() for option in (*_OPTIONS, "-default-device", f"-arch={arch}")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(status) != 0:
        log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise _compile_error(op, arch, log.decode(errors="replace"))
    get_size, get = {
        "cubin": (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
        "ptx": (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX),
    }[kind]
    code = bytes(get_size(program)[1])
    get(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code.rstrip(b"\0") if kind == "ptx" else code


def _compile_error(op: str, arch: str, log: str) -> BuildError:
    lines = (
        " | ".join(line for line in log.splitlines() if "error" in line or "fatal" in line)[:600] or log.strip()[:600]
    )
    todo = "Use a CUDA that knows this GPU, or build with engine.plugins: none."
    return BuildError(f"plugins: {op} for {arch}", lines, "a compiled kernel", todo)


def _call_driver(driver: Any, function: str, *arguments: Any) -> Any:
    status, *results = getattr(driver, function)(*arguments)
    if int(status) != 0:
        name = driver.cuGetErrorName(status)[1].decode()
        raise RuntimeFault(f"plugins, {function}", name, "success", "Update the NVIDIA driver, or report this.")
    return results[0] if results else None


def copy_memory(dest: int, source: int, num_bytes: int, stream: int) -> None:
    driver = importlib.import_module("cuda.bindings.driver")
    _call_driver(driver, "cuMemcpyDtoDAsync", dest, source, num_bytes, stream)


class KernelModule:
    """The kernels of one op on the current CUDA context's device."""

    def __init__(self, code: bytes) -> None:
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._library = self._call("cuLibraryLoadData", code, [], [], 0, [], [], 0)
        self._kernels: dict[str, Any] = {}

    def _call(self, function: str, *arguments: Any) -> Any:
        return _call_driver(self._driver, function, *arguments)

    def launch(self, launch: Launch, arguments: Sequence[Any], stream: int) -> None:
        """Enqueues a kernel; does not wait. `arguments`: ctypes objects by parameter, read before this returns."""
        if launch.kernel not in self._kernels:
            kernel = self._call("cuLibraryGetKernel", self._library, launch.kernel.encode())
            self._kernels[launch.kernel] = self._driver.CUfunction(int(kernel))
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        block = (launch.threads, 1, 1)
        self._call(
            "cuLaunchKernel",
            self._kernels[launch.kernel],
            *launch.grid,
            *block,
            launch.shared_bytes,
            stream,
            ctypes.addressof(pointers),
            0,
        )


@functools.cache
def load_module(op: str, capability: tuple[int, int]) -> KernelModule:
    """Returns the op's kernels for GPUs of that capability; compiled and loaded once per process."""
    return KernelModule(compile_kernels(op, capability))


def current_capability() -> tuple[int, int]:
    """Returns (major, minor) of the device of the calling thread's CUDA context."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as fault:
        raise RuntimeFault("CUDA", str(fault), "the package cuda-python", "Run: pip install cuda-python.") from fault
    status, device = driver.cuCtxGetDevice()
    if int(status) != 0:
        raise RuntimeFault("CUDA", f"no current device ({status})", "a CUDA context", "Open the device first.")
    attributes = driver.CUdevice_attribute
    major = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)[1]
    minor = driver.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)[1]
    return int(major), int(minor)


def launch_verify(args: SpecVerifyArgs, stream: int) -> None:
    """Launches SpecVerify, two kernels; the workspace of `args` has `launches.verify_workspace_bytes`."""
    module = load_module(SPEC_VERIFY, current_capability())
    for launch in verify_launches(args.batch, args.nodes, args.vocab, DTYPES[args.dtype]):
        module.launch(launch, (args,), stream)


def launch_rollback(
    caches: Sequence[int], shape: Sequence[int], dtype: str, lengths: int, path: int, depth: int, stream: int
) -> None:
    """Launches KVRollback on the current device: one kernel per 480 caches.

    Args:
        shape: [slots in use, kv_heads, max_seq, head_dim].
        lengths: device address of [slots] int64.
        path: device address of [slots, depth] int64.
    """
    batch, kv_heads, max_seq, head_dim = shape
    columns = head_dim * (4 if dtype == "float32" else 2) // rollback_vector_bytes(head_dim, dtype, caches)
    module = load_module(KV_ROLLBACK, current_capability())
    for launch, group in rollback_launches(caches, batch, kv_heads, head_dim, dtype):
        args: KVRollbackArgs = rollback_args(group, lengths, path, depth, kv_heads, max_seq, columns)
        module.launch(launch, (args,), stream)
