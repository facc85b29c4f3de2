# SPDX-License-Identifier: Apache-2.0
"""Markers: their rules name files and fixtures that exist, and tests/README.md explains each."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests import tiers

TESTS = Path(__file__).parents[1]


def test_every_pattern_matches_a_test_file() -> None:
    files = [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]
    patterns = [pattern for patterns in tiers.PATHS.values() for pattern in patterns]
    assert [p for p in patterns if not any(fnmatchcase(file, p) for file in files)] == []


def test_every_fixture_that_gives_a_marker_exists() -> None:
    sources = "".join(path.read_text() for path in TESTS.rglob("conftest.py"))
    assert [name for name in tiers.FIXTURES if f"def {name}(" not in sources] == []
    used = {marker for markers in tiers.FIXTURES.values() for marker in markers}
    assert used | set(tiers.PATHS) <= set(tiers.MARKERS)


def test_the_readme_of_the_tests_explains_every_marker() -> None:
    explained = re.findall(r"^\| `(\w+)` \|", (TESTS / "README.md").read_text(), re.MULTILINE)
    assert sorted(explained) == sorted(tiers.MARKERS)


@pytest.mark.parametrize(
    ("path", "fixtures", "expected"),
    [
        ("core/test_tree.py", (), set()),
        ("e2e/test_greedy.py", ("tmp_path",), {"export"}),
        ("passes/test_tensorrt_numbers.py", (), {"export", "plan"}),
        ("serving/openai/test_client.py", ("pair", "live"), {"export", "live"}),
    ],
)
def test_markers_come_from_paths_and_fixtures(path: str, fixtures: tuple[str, ...], expected: set[str]) -> None:
    assert tiers.markers_of(path, fixtures) == expected
