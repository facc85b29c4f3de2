# SPDX-License-Identifier: Apache-2.0
"""Folders are written atomically."""

import errno
import os
from pathlib import Path

import pytest

from speccompile.bundle import staging
from speccompile.bundle.staging import copy_folder, remove_leftovers, staged_folder
from speccompile.errors import BuildError


def fill(dest: Path, text: str) -> None:
    with staged_folder(dest) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text(text)
        assert not dest.exists() or (dest / "deep" / "file").read_text() != text


def test_a_folder_appears_when_the_block_ends(tmp_path):
    fill(tmp_path / "a" / "out", "one")
    fill(tmp_path / "a" / "out", "two")
    assert (tmp_path / "a" / "out" / "deep" / "file").read_text() == "two"
    assert os.listdir(tmp_path / "a") == ["out"]


def test_without_an_exchange_it_is_replaced_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_exchange", lambda first, second: False)
    fill(tmp_path / "out", "one")
    fill(tmp_path / "out", "two")
    assert (tmp_path / "out" / "deep" / "file").read_text() == "two"
    assert os.listdir(tmp_path) == ["out"]


def test_an_exchange_swaps_two_folders(tmp_path):
    fill(tmp_path / "a", "one")
    fill(tmp_path / "b", "two")
    if not staging._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system has no exchange")
    assert (tmp_path / "a" / "deep" / "file").read_text() == "two"
    assert (tmp_path / "b" / "deep" / "file").read_text() == "one"


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, SystemExit])
def test_any_exception_leaves_what_was_there(tmp_path, fault):
    fill(tmp_path / "out", "one")

    def fail_halfway() -> None:
        with staged_folder(tmp_path / "out") as folder:
            (folder / "half").write_text("written")
            raise fault

    with pytest.raises(fault):
        fail_halfway()
    assert (tmp_path / "out" / "deep" / "file").read_text() == "one"
    assert os.listdir(tmp_path) == ["out"]


def test_leftovers_without_a_living_owner_are_removed(tmp_path):
    for name in (".out.building-0000dead", ".out.building-1111dead", ".other.building-0000dead"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.lock").write_text("123\n")
    (tmp_path / ".out.building-nolock00").mkdir()  # no name that a build gives
    (tmp_path / ".out.building-2222dead").mkdir()
    (tmp_path / ".out.building-3333dead.lock").touch()
    (tmp_path / "out.building-0000dead").mkdir()
    with staged_folder(tmp_path / "mine") as folder:
        assert remove_leftovers(tmp_path, "out") == 3
        assert remove_leftovers(tmp_path, "mine") == 0
        assert remove_leftovers(tmp_path, "*") == 0
        assert folder.exists()
    assert sorted(os.listdir(tmp_path)) == [
        ".other.building-0000dead",
        ".other.building-0000dead.lock",
        ".out.building-nolock00",
        "mine",
        "out.building-0000dead",
    ]
    assert remove_leftovers(tmp_path) == 1


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_folder_that_was_moved_aside_is_put_back(tmp_path, is_placed):
    """A build without an exchange, killed between its two renames, or after them."""
    old = tmp_path / ".out.building-0000dead.old"
    (old / "deep").mkdir(parents=True)
    (tmp_path / ".out.building-0000dead").mkdir()
    (tmp_path / ".out.building-0000dead.lock").touch()
    if is_placed:
        (tmp_path / "out").mkdir()
    assert remove_leftovers(tmp_path, "out") == 1
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "deep").exists() is not is_placed


def test_a_place_under_a_file_is_a_build_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError) as caught, staged_folder(tmp_path / "file" / "out"):
        pass
    assert "can be written" in caught.value.todo


@pytest.mark.parametrize("fault", [LookupError(), ConnectionResetError(errno.ECONNRESET, "reset"), OSError("odd")])
def test_faults_that_are_not_of_the_disk_pass_through(tmp_path, fault):
    with pytest.raises(type(fault)), staged_folder(tmp_path / "out"):
        raise fault


def test_a_folder_is_copied_whole_or_the_fault_is_seen(tmp_path):
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "deep" / "file").write_text("x")
    copy_folder(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "deep" / "file").read_text() == "x"
    with pytest.raises(FileNotFoundError):
        copy_folder(tmp_path / "absent", tmp_path / "c")
