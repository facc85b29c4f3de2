# SPDX-License-Identifier: Apache-2.0
"""Markers: their rules name fixtures that exist, and tests/README.md explains each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import tiers

TESTS = Path(__file__).parents[1]


def test_every_fixture_that_gives_a_marker_exists() -> None:
    sources = "".join(path.read_text() for path in TESTS.rglob("conftest.py"))
    assert [name for name in tiers.FIXTURES if f"def {name}(" not in sources] == []
    used = {marker for markers in tiers.FIXTURES.values() for marker in markers}
    assert used | set(tiers.IMPORTS.values()) <= set(tiers.MARKERS)


def test_the_readme_of_the_tests_explains_every_marker() -> None:
    explained = re.findall(r"^\| `(\w+)` \|", (TESTS / "README.md").read_text(), re.MULTILINE)
    assert sorted(explained) == sorted(tiers.MARKERS)


@pytest.mark.parametrize(
    ("path", "fixtures", "expected"),
    [
        ("core/test_tree.py", (), set()),
        ("e2e/test_greedy.py", ("tmp_path",), {"export"}),  # of its folder
        ("passes/test_tensorrt_numbers.py", (), {"export", "plan"}),  # its own
        ("passes/test_attach_candidates.py", ("pair", "live"), {"export", "live"}),  # of fixtures
        ("doctor/test_doctor.py", (), {"export"}),  # of what it imports
        ("fuzz/test_recipes.py", (), {"fuzz"}),
    ],
)
def test_markers_come_from_modules_and_fixtures(path: str, fixtures: tuple[str, ...], expected: set[str]) -> None:
    assert tiers.markers_of(TESTS / path, fixtures) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", {"export"}),
        ("import torch.nn", {"export"}),
        ("from transformers import (\n    AutoConfig,\n)", {"export"}),
        ("from tests.checkpoints import lab_files", {"export"}),  # which imports torch
        ("from tests.checkpoints.lab_files import (\n    save,\n)", {"export"}),
        ("def test():\n    import torch", set()),
        ("pytestmark = pytest.mark.live", {"live"}),
        ("pytestmark = [\n    pytest.mark.plan,\n    pytest.mark.skipif(True, reason=''),\n]", {"plan"}),
        ("import torchless", set()),
    ],
)
def test_imports_and_marks_are_read(tmp_path: Path, source: str, expected: set[str]) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n{source}\n")
    assert tiers.markers_of_module(tmp_path / "test_it.py") == expected
