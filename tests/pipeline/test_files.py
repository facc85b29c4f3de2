# SPDX-License-Identifier: Apache-2.0
"""Files are written atomically, and some are never replaced by a rename."""

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from speccompile.bundle.files import check_file, write_file
from speccompile.bundle.folder_records import SPECULATOR, write_record
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
