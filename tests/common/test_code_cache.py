# SPDX-License-Identifier: Apache-2.0
"""Compiled code is loaded only where nobody but root and the running user could have written it."""

import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from speccompile.bundle.stage_cache import StageCache
from speccompile.common.cache_root import make_cache_folder
from speccompile.common.code_cache import find_code_file, write_file

NAME = "kernels/cpu-0123456789abcdef.so"
OTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with compiled code that may be loaded, and a folder for temporary files."""
    (tmp_path / "tmp").mkdir(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "above/cache"))
    write_file(tmp_path / "above/cache" / NAME, b"code")
    return tmp_path / "above/cache"


def _link(path: Path) -> None:
    moved = path.with_name(f"{path.name}.moved")
    path.rename(moved)
    path.symlink_to(moved)


def _dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))


def _give(path: Path) -> None:
    os.chown(path, OTHER, OTHER)


def _give_link(path: Path) -> None:
    _link(path)
    os.lchown(path, OTHER, OTHER)


def _open(mode: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(mode)


def test_what_the_user_alone_can_write_is_loaded(cache, caplog):
    assert find_code_file(NAME) == cache / NAME
    (cache / NAME).chmod(0o755)
    (cache / "kernels").chmod(0o755)
    cache.chmod(0o755)
    cache.parent.chmod(0o775)  # of the user's own group, as a umask of 002 makes it
    assert find_code_file(NAME) == cache / NAME and find_code_file("cpu-1.so", cache) == cache / "cpu-1.so"
    assert not caplog.messages


def test_a_link_to_the_cache_that_is_the_users_own_is_followed(cache, tmp_path):
    (tmp_path / "link").symlink_to(cache)
    assert find_code_file(NAME, tmp_path / "link") == cache / NAME


@pytest.mark.parametrize("change", [_open(0o777), _open(0o720), _link, _dangle, pytest.param(_give, marks=needs_root)])
def test_a_file_that_others_could_write_is_made_anew(change, cache, caplog):
    change(cache / NAME)
    with caplog.at_level(logging.WARNING):
        assert find_code_file(NAME) == cache / NAME
    assert not os.path.lexists(cache / NAME) and "removed and made anew" in caplog.text


FOLDERS = [
    ("kernels", _open(0o777), "writable by others"),
    ("kernels", _open(0o770), "writable by others"),
    ("kernels", _open(0o1777), "writable by others"),
    ("kernels", _link, "a link"),
    (".", _open(0o775), "writable by others"),
    ("..", _open(0o777), "writable by others"),
]
ROOTS = [("kernels", _give), (".", _give), ("..", _give), ("..", _give_link)]


@pytest.mark.parametrize(
    ("folder", "change", "reason"),
    [*FOLDERS, *(pytest.param(*row, f"owned by user {OTHER}", marks=needs_root) for row in ROOTS)],
)
def test_a_folder_that_others_can_write_gives_way_to_a_private_one(folder, change, reason, cache, tmp_path, caplog):
    change(Path(os.path.normpath(cache / folder)))
    with caplog.at_level(logging.WARNING):
        found = find_code_file(NAME)
    assert found == tmp_path / f"tmp/speccompile-{os.geteuid()}" / NAME and not found.exists()
    assert reason in caplog.text and "set SPECCOMPILE_CACHE to a folder of your own" in caplog.text
    write_file(found, b"anew")
    assert find_code_file(NAME) == found  # the next process finds it
    assert (cache / NAME).read_bytes() == b"code"


def test_a_cache_that_cannot_be_made_or_written_gives_way_too(cache, tmp_path, monkeypatch):
    private = tmp_path / f"tmp/speccompile-{os.geteuid()}"
    assert find_code_file(NAME, cache / NAME) == private / NAME  # a file stands there
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).is_relative_to(private))
    assert find_code_file(NAME) == cache / NAME  # what is there is read
    assert find_code_file("kernels/other.so") == private / "kernels/other.so"


def test_where_the_private_folder_is_somebody_elses_the_code_is_of_this_process_alone(cache, tmp_path, caplog):
    cache.chmod(0o777)
    (tmp_path / f"tmp/speccompile-{os.geteuid()}").mkdir()
    (tmp_path / f"tmp/speccompile-{os.geteuid()}").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        found = find_code_file(NAME)
    assert found.parent.parent == tmp_path / "tmp" and stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    assert found != find_code_file(NAME) and "for this process alone" in caplog.text


def test_no_umask_opens_what_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "new/cache"))
    before = os.umask(0)
    try:
        write_file(make_cache_folder("kernels") / "a.so", b"")
        file = find_code_file("tensorrt/a.kernels")
        StageCache(tmp_path / "new/cache").fetch("graphs", "0", tmp_path / "out", lambda folder: None)
    finally:
        os.umask(before)
    cache = tmp_path / "new/cache"
    for folder in (tmp_path / "new", cache, cache / "kernels", cache / "graphs", file.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    assert stat.S_IMODE((tmp_path / "new/cache/kernels/a.so").stat().st_mode) == 0o600


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def refuse(source: str, dest: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "a.so", b"code")
    assert not list(tmp_path.iterdir())
