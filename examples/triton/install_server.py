# SPDX-License-Identifier: Apache-2.0
"""Put a real Triton Inference Server and speccompile into one environment, without Docker: ENV/bin/tritonserver.

    python examples/triton/install_server.py ENV

The server is the one in PyTriton's wheel (Triton 2.51 with the `python` backend, Apache-2.0); nothing of PyTriton
itself is used. For development and tests on one machine; in production use NVIDIA's container.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

SERVER = "nvidia-pytriton==0.7.0"
# The stub of this server is compiled for numpy 1, and changes tensors in silence under numpy 2.
PACKAGES = (
    "numpy<2",
    "onnxruntime>=1.31.1",
    "tokenizers>=0.23",
    "pydantic>=2.14",
    "pyyaml>=6.0.3",
    "rich>=15",
    "typer>=0.29",
)
CLIENTS = ("tritonclient[grpc]>=2.60", "pytest>=9.2")
ROOT = Path(__file__).resolve().parents[2]

LAUNCHER = """#!/usr/bin/env bash
# Written by examples/triton/install_server.py: starts the server of this environment, which is also the models' Python.
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
export LD_LIBRARY_PATH="$here/{libraries}:{libdir}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" PATH="$here/bin:$PATH"
exec "$here/{server}" --backend-directory="$here/triton/backends" "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, help="folder to make the environment in")
    env = parser.parse_args().environment.absolute()
    venv.EnvBuilder(with_pip=True, symlinks=True, clear=True).create(env)
    pip = [str(env / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PACKAGES, *CLIENTS], check=True)
    # Without their dependencies: PyTriton's are not needed, and the core requires a newer numpy than the stub supports.
    subprocess.run([*pip, "--no-deps", SERVER, "--editable", str(ROOT)], check=True)
    folder = Path(sysconfig.get_path("purelib", "venv", {"base": str(env), "platbase": str(env)}))
    arrange(env, folder)
    print(env / "bin/tritonserver")


def arrange(env: Path, packages: Path) -> None:
    """Arranges the `python` backend with the stub of this Python, our backend, and the launcher."""
    server, backends = packages / "pytriton/tritonserver", env / "triton/backends"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        sys.exit(f"{SERVER} has no stub for Python {version}: use another Python")
    shutil.copytree(server / "backends/python", backends / "python")
    shutil.copy2(stub, backends / "python" / stub.name)
    command = [
        str(env / "bin/python"),
        "-c",
        "import sys; from speccompile.serving.triton.repository import write_backend",
    ]
    command[-1] += "; from pathlib import Path; write_backend(Path(sys.argv[1]))"
    subprocess.run([*command, str(backends)], check=True)
    libraries, libdir = packages / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR")
    check_libraries(stub, f"{libraries}:{libdir}")
    launcher = env / "bin/tritonserver"
    paths = {"libraries": libraries.relative_to(env), "server": (server / "bin/tritonserver").relative_to(env)}
    launcher.write_text(LAUNCHER.format(libdir=libdir, **paths), encoding="utf-8")
    launcher.chmod(0o755)


def check_libraries(stub: Path, search: str) -> None:
    """Refuses a stub that lacks a library: the server would hang without a message."""
    listed = subprocess.run(
        ["ldd", str(stub)], capture_output=True, text=True, check=True, env={**os.environ, "LD_LIBRARY_PATH": search}
    ).stdout
    missing = [line.split()[0] for line in listed.splitlines() if "not found" in line]
    if missing:
        sys.exit(f"{stub.name} needs {', '.join(missing)}: use a Python that was built with --enable-shared")


if __name__ == "__main__":
    main()
