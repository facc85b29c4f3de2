# SPDX-License-Identifier: Apache-2.0
"""The cache's folder: what stands in its way is named; what can be done without it is done where nobody chose it."""

import logging
import os
from pathlib import Path

import pytest

from speccompile.common.cache_root import cache_root, find_cache_folder, make_cache_folder
from speccompile.errors import BuildError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("mine")
    return path


def test_the_variable_or_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "deep/cache"))
    assert cache_root() == tmp_path / "deep/cache" and not cache_root().exists()
    assert make_cache_folder("tuning") == cache_root() / "tuning" and (cache_root() / "tuning").is_dir()
    monkeypatch.setenv("SPECCOMPILE_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_cache_folder() == tmp_path / ".cache/speccompile"


@pytest.mark.parametrize("below", ["", "cache"])
def test_a_file_in_the_way_is_named(file, below, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(file / below))
    for find in (make_cache_folder, find_cache_folder):
        with pytest.raises(BuildError) as caught:
            find("graphs")
        assert caught.value.where == "SPECCOMPILE_CACHE" and caught.value.got == f"a file at {file}"
        assert caught.value.todo == "Set SPECCOMPILE_CACHE to a folder that can be written."
    assert file.read_text() == "mine"


def test_no_permission_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write everywhere
    with pytest.raises(BuildError, match=rf"got no permission to write at {tmp_path}/graphs"):
        make_cache_folder("graphs")


def test_a_folder_that_cannot_be_made_is_named(monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", "/proc/cache")
    with pytest.raises(BuildError, match=r"SPECCOMPILE_CACHE: got .+ at /proc/cache; expected a folder in which"):
        make_cache_folder()


def test_the_default_folder_may_be_done_without(file, monkeypatch, caplog):
    monkeypatch.delenv("SPECCOMPILE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(file))
    with caplog.at_level(logging.WARNING, "speccompile"):
        assert find_cache_folder("tuning") is None
    assert "nothing is kept for the next start" in caplog.text and f"a file at {file}" in caplog.text
    with pytest.raises(BuildError, match=f"the cache folder {file}/.cache/speccompile: got a file at {file};"):
        make_cache_folder("graphs")


def test_a_user_without_a_home_folder(monkeypatch):
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPECCOMPILE_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    with pytest.raises(BuildError, match="SPECCOMPILE_CACHE: got no value, and no home folder"):
        cache_root()
