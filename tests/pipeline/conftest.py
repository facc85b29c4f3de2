# SPDX-License-Identifier: Apache-2.0
"""The fakes in place, a recipe of two tiny checkpoints, and a cache of the test's own."""

import sys
from pathlib import Path

import pytest

from speccompile.bundle.stage_cache import StageCache
from tests.pipeline import fakes


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The fakes; the folders exported so far."""
    return fakes.install(monkeypatch.setattr, lambda name, module: monkeypatch.setitem(sys.modules, name, module))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return fakes.write_recipe(tmp_path / "in")


@pytest.fixture
def cache(tmp_path: Path) -> StageCache:
    return StageCache(tmp_path / "cache")
