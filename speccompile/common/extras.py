# SPDX-License-Identifier: Apache-2.0
"""How the packages of an extra come into this installation: from the clone or the wheel that it was made from."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install {shlex.quote(f'{_source()}[{extra}]')}"


def _source() -> str:
    try:
        text = importlib.metadata.distribution("speccompile").read_text("direct_url.json")
        url = urlsplit(json.loads(text or "")["url"])
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return "speccompile"
    return unquote(url.path) if url.scheme == "file" else url.geturl()


def todo_for_checkpoint(folder: Path) -> str:
    """Returns the command to type where a checkpoint's folder was given instead of a recipe or a bundle."""
    return f"Build it first: speccompile build {shlex.quote(str(folder.absolute()))} -o bundle."
