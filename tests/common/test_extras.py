# SPDX-License-Identifier: Apache-2.0
"""Messages about a missing package give a command that works where the package was installed from."""

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from speccompile.common import extras

WHEEL = "speccompile-0.1.0-py3-none-any.whl"


def test_in_a_clone_it_is_the_clone():
    assert extras.install_command("serve") == f"pip install -e '{Path(__file__).parents[2]}[serve]'"


@pytest.mark.parametrize(
    ("record", "source"),
    [
        (f'{{"url": "file:///a%20b/{WHEEL}", "archive_info": {{}}}}', f"/a b/{WHEEL}"),
        ('{"url": "file:///src", "dir_info": {}}', "/src"),
        (f'{{"url": "https://host/{WHEEL}"}}', f"https://host/{WHEEL}"),
        *((text, "speccompile") for text in (None, "", "{", "[]", "null", "{}")),
    ],
)
def test_elsewhere_it_is_what_pip_has_recorded(record, source, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages/speccompile/common/extras.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: record))
    assert extras.install_command("ort") == f"pip install '{source}[ort]'"
