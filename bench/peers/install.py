#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make an environment for each peer (`make peers`): build/peers/NAME with pinned packages from PyPI.

What is found is written to build/peers/NAME/peer.json: {"python", "worker", "forms", "versions"}, or {"failed": reason}
for a peer that cannot be installed here, which the benchmark then names and leaves out.

    python bench/peers/install.py [NAME...] [--folder build/peers] [--again]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORKERS = {
    "openvino": "openvino_peer.py",
    "ort-genai": "ort_genai_peer.py",
    "llama.cpp": "llama_cpp_peer.py",
    "transformers": "transformers_peer.py",
}
# torch without CUDA is a tenth of the size; pip prefers it where this index has it.
CPU_TORCH = "https://download.pytorch.org/whl/cpu"

# llama-cpp-python's own option: without its library for images.
BUILD_OPTIONS = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
# Required by optimum-intel, not for texts; built for another torch than this one, it keeps transformers from loading.
UNUSED = {"openvino": ["torchvision"]}


def _run(command: Sequence[str], log: Path) -> str:
    """Runs `command`; returns its standard output. What it prints otherwise goes to `log`.

    Raises:
        SystemExit: it failed; the end of the log is the reason.
    """
    environment = {**BUILD_OPTIONS, **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}}
    with log.open("a", encoding="utf-8") as errors:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
        errors.write(done.stdout)
    if done.returncode:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        raise SystemExit(f"{Path(command[0]).name} {' '.join(command[1:4])}...: {' '.join(lines[-3:])[-400:]}")
    return done.stdout


def _index_options() -> list[str]:
    """Returns pip's options for torch without CUDA: none where its index is out of reach, as pip tries for minutes."""
    try:
        with urllib.request.urlopen(f"{CPU_TORCH}/torch/", timeout=10):
            return ["--extra-index-url", CPU_TORCH]
    except OSError as error:
        print(f"{CPU_TORCH}: {error}; torch comes from pip's own index")
        return []


def install(name: str, folder: Path) -> dict[str, Any]:
    """Returns what peer.json says of the environment that is now in `folder`.

    Raises:
        SystemExit: it cannot be installed.
    """
    log = folder / "install.log"
    log.unlink(missing_ok=True)
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--prefer-binary"]
    _run([*pip, *_index_options(), "-r", str(HERE / "requirements" / f"{name}.txt")], log)
    for package in UNUSED.get(name, []):
        _run([str(python), "-m", "pip", "uninstall", "--yes", package], log)
    worker = HERE / WORKERS[name]
    described = json.loads(_run([str(python), str(worker), "describe"], log))
    return {"python": str(python.absolute()), "worker": str(worker), **described}


def main(arguments: Sequence[str] | None = None) -> int:
    """Install the peers that are asked for; returns 1 where none could be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(WORKERS)}; all by default")
    parser.add_argument("--folder", type=Path, default=HERE.parents[1] / "build/peers")
    parser.add_argument("--again", action="store_true", help="also those that are installed, or failed, already")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in WORKERS]
    if unknown:
        parser.error(f"no peer is called {', '.join(unknown)}; there are {', '.join(WORKERS)}")
    num_installed = 0
    for name in options.names or WORKERS:
        folder = options.folder / name
        file = folder / "peer.json"
        if options.again or not file.exists():
            print(f"{name}: installing (log: {folder / 'install.log'})", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                found = install(name, folder)
            except SystemExit as error:
                found = {"failed": str(error)}
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        found = json.loads(file.read_text(encoding="utf-8"))
        if "failed" in found:
            print(f"{name}: left out: {found['failed']}")
        else:
            num_installed += 1
            print(f"{name}: {', '.join(f'{p} {v}' for p, v in found['versions'].items())}")
    return 0 if num_installed else 1


if __name__ == "__main__":
    sys.exit(main())
