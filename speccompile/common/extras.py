# SPDX-License-Identifier: Apache-2.0
"""How the packages of an extra come into this installation: from the clone or the wheel that it was made from."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra of pyproject.toml."""
    source, editable = _source()
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"


def _source() -> tuple[str, str]:
    """Returns what was installed, and the option for a clone that stays in use; the name where pip did not say."""
    try:
        text = importlib.metadata.distribution("speccompile").read_text("direct_url.json")
        record = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        record = {}
    url = urlsplit(record.get("url", ""))
    if url.scheme != "file":
        return "speccompile", ""
    return unquote(url.path), "-e " if record.get("dir_info", {}).get("editable") else ""
