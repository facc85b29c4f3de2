# SPDX-License-Identifier: Apache-2.0
"""Files and folders are written atomically, and some are never replaced by a rename."""

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from speccompile.bundle import staging
from speccompile.bundle.files import check_file, write_file
from speccompile.bundle.format import SPECULATOR, write_record
from speccompile.bundle.staging import copy_folder, remove_leftovers, staged_folder
from speccompile.errors import BuildError


def refusal(path: Path) -> BuildError:
    with pytest.raises(BuildError) as caught:
        check_file(path)
    with pytest.raises(BuildError):
        write_file(path, "text")
    return caught.value


def make_device(path: Path, kind: int, numbers: tuple[int, int]) -> None:
    try:
        os.mknod(path, kind | 0o666, os.makedev(*numbers))
    except PermissionError:
        pytest.skip("device nodes need root")


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path):
    path = tmp_path / "out.json"
    write_file(path, "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o640)
    write_file(path, "two é")
    assert path.read_text(encoding="utf-8") == "two é" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["out.json"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_device_is_written_into(tmp_path):
    null = tmp_path / "null"
    make_device(null, stat.S_IFCHR, (1, 3))
    try:
        with null.open("w"):
            pass
    except PermissionError:
        pytest.skip("this file system allows no devices")
    write_file(null, "text")
    assert stat.S_ISCHR(null.stat().st_mode)
    write_file(Path("/dev/null"), "text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_pipe_is_written_into(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    check_file(pipe)
    write_file(pipe, "text")
    reader.join()
    assert read == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_may_be_named(tmp_path):
    code = "from pathlib import Path; from speccompile.bundle.files import write_file\n"
    code += "write_file(Path('/dev/stdout'), 'text')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("text", "")


def test_a_link_is_followed(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "latest.json").symlink_to("deep/first.json")
    for text in ("one", "two"):  # first it leads nowhere yet
        write_file(tmp_path / "latest.json", text)
        assert (tmp_path / "deep" / "first.json").read_text() == text
    assert (tmp_path / "latest.json").readlink() == Path("deep/first.json")
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links" in refusal(tmp_path / "loop").got


def test_what_cannot_be_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(tmp_path).got == "a folder"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        assert refusal(Path("socket")).got == "a socket"
    assert refusal(tmp_path / "no" / "out.json").got == f"no folder {tmp_path}/no"
    assert "File name too long" in refusal(tmp_path / ("n" * 250)).got
    make_device(tmp_path / "disk", stat.S_IFBLK, (7, 250))
    assert refusal(tmp_path / "disk").got == "a block device"


def test_no_file_is_written_into_a_written_folder(tmp_path):
    write_record(tmp_path, SPECULATOR)
    assert "a trained speculator that speccompile wrote" in refusal(tmp_path / "bench.json").got
    (tmp_path / "deep").mkdir()
    (tmp_path.parent / "link.json").unlink(missing_ok=True)
    (tmp_path.parent / "link.json").symlink_to(tmp_path / "deep" / "out.json")
    assert "that speccompile wrote" in refusal(tmp_path.parent / "link.json").got


def test_a_read_only_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("mine")
    monkeypatch.setattr(os, "access", lambda checked, mode: Path(checked) != path)  # root may write everywhere
    assert "Permission denied" in refusal(path).got and path.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_full_and_mounted(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], check=False).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        with pytest.raises(BuildError, match=r"No space left.*Free space"):
            write_file(disk / "new.json", "x" * 50_000)
        assert os.listdir(disk) == []
        (disk / "old.json").write_text("mine")
        with pytest.raises(BuildError, match="No space left"):
            write_file(disk / "old.json", "x" * 50_000)
        assert os.listdir(disk) == ["old.json"] and (disk / "old.json").read_text() == "mine"
        subprocess.run(["mount", "--bind", str(disk / "old.json"), str(disk / "old.json")], check=True)
        write_file(disk / "old.json", "a mounted file cannot be renamed over")
        assert "mounted" in (disk / "old.json").read_text() and os.listdir(disk) == ["old.json"]
        subprocess.run(["umount", str(disk / "old.json")], check=True)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert "no permission" in refusal(disk / "new.json").got
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_leftovers_of_dead_writers_are_removed(tmp_path):
    (tmp_path / ".out.json.0000dead.part").write_text("half")
    (tmp_path / ".out.json.mine.part").write_text("the user's")
    os.mkfifo(tmp_path / ".out.json.1111dead.part")
    write_file(tmp_path / "out.json", "whole")
    assert sorted(os.listdir(tmp_path)) == [".out.json.mine.part", "out.json"]


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


@pytest.mark.parametrize("is_removed", [False, True])
def test_another_build_that_looks_for_leftovers_leaves_a_new_one(tmp_path, monkeypatch, is_removed):
    lock, calls = fcntl.flock, []

    def sweep(handle: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:  # of the build, which has made its file and not locked it yet
            if is_removed:
                remove_leftovers(tmp_path)
            else:
                (name,) = os.listdir(tmp_path)
                other = os.open(tmp_path / name, os.O_RDWR)
                lock(other, fcntl.LOCK_EX)
                threading.Timer(0.1, os.close, [other]).start()
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", sweep)
    with staged_folder(tmp_path / "a") as folder:
        assert remove_leftovers(tmp_path) == 0 and folder.is_dir()
    assert os.listdir(tmp_path) == ["a"]


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
