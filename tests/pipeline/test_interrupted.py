# SPDX-License-Identifier: Apache-2.0
"""Builds that are killed at every message, or run out of disk."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.stage_cache import StageCache
from speccompile.bundle.staging import disk_faults
from speccompile.errors import BuildError
from speccompile.pipeline import build
from tests.pipeline import fakes
from tests.pipeline.fakes import make_plan

pytestmark = pytest.mark.live

CHILD = Path(__file__).with_name("build_child.py")
RunChild = Callable[[Path, Path, Path, str], subprocess.CompletedProcess[str]]
STAGES = (
    "prepare kernels",
    "check checkpoints",
    "export target",
    "compile target",
    "export draft",
    "compile draft",
    "compile rollback",
    "tune target",
    "tune draft",
    "check graphs",
    "bundle",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that has imported all that a build needs and forks one for every build: see `build_child`."""
    command = [sys.executable, str(CHILD), "serve"]
    folder = tmp_path_factory.mktemp("server")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run_child(server: subprocess.Popen[str], tmp_path: Path) -> RunChild:
    def run(recipe: Path, dest: Path, cache: Path, how: str) -> subprocess.CompletedProcess[str]:
        assert server.stdin is not None and server.stdout is not None
        arguments = [str(recipe), str(dest), str(cache), how]
        files = [tmp_path / "child.out", tmp_path / "child.err"]
        print(json.dumps([arguments, *map(str, files)]), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in files))

    return run


def hidden_folders(parent: Path) -> list[Path]:
    return [p for p in parent.rglob(".*") if ".building-" in p.name]


def test_the_stages_are_the_ones_killed_below(run_child, recipe, tmp_path):
    done = run_child(recipe, tmp_path / "out", tmp_path / "cache", "none")
    messages = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert tuple(m for m in messages if ":" not in m) == STAGES


@pytest.mark.parametrize("has_old", [False, True], ids=["fresh", "replacing"])
def test_a_build_killed_at_any_message_leaves_what_was_there(run_child, exported, recipe, tmp_path, has_old):
    dest, cache = tmp_path / "outs" / "out", tmp_path / "cache"
    messages = run_child(recipe, tmp_path / "probe", tmp_path / "probe-cache", "none").stdout.splitlines()
    assert len(messages) >= 18
    old = None
    if has_old:
        old = build(make_plan(recipe, "decoding.seed=77"), dest, cache=StageCache(None)).manifest["digest"]
    for number in range(len(messages)):
        # A cache of its own for every kill, so that each stage really runs.
        done = run_child(recipe, dest, tmp_path / f"cache-{number}", f"kill={number}")
        assert done.returncode == -signal.SIGKILL, (number, done.stdout, done.stderr)
        if has_old:
            assert read_bundle(dest).manifest["digest"] == old
        else:
            assert not dest.exists()
        visible = [p.name for p in dest.parent.iterdir() if not p.name.startswith(".")]
        assert visible == ["out"] * has_old
        assert len(hidden_folders(dest.parent)) <= 2, "a later build removes what an earlier one left"
    bundle = build(make_plan(recipe), dest, cache=StageCache(cache))
    assert read_bundle(dest).manifest["digest"] == bundle.manifest["digest"] != old
    assert hidden_folders(dest.parent) == []


def test_a_cache_whose_writer_was_killed_is_used_and_cleaned(run_child, exported, recipe, tmp_path):
    cache = tmp_path / "cache"
    messages = run_child(recipe, tmp_path / "probe", tmp_path / "probe-cache", "none").stdout.splitlines()
    number = next(i for i, m in enumerate(messages) if m.endswith("compile draft: save"))
    run_child(recipe, tmp_path / "out", cache, f"kill={number}")
    assert hidden_folders(cache)
    manifest = build(make_plan(recipe), tmp_path / "out", cache=StageCache(cache)).manifest
    cached = {s["name"] for s in manifest["stages"] if s["cached"]}
    assert cached == {"export target", "compile target"}, "what was whole is used, what was half-written is not"
    assert hidden_folders(cache) == []


def test_a_running_build_is_not_taken_for_a_dead_one(run_child, exported, recipe, tmp_path):
    dest = tmp_path / "outs" / "out"
    other_folders: list[list[Path]] = []

    def build_the_same(message: str) -> None:
        if message == "bundle" and not other_folders:
            other_folders.append([])
            run_child(recipe, dest, tmp_path / "cache-2", "none")
            other_folders[0] = hidden_folders(dest.parent)

    bundle = build(make_plan(recipe, "decoding.seed=5"), dest, build_the_same, StageCache(tmp_path / "cache"))
    assert len([p for p in other_folders[0] if p.suffix != ".lock"]) == 1, (
        "the outer build's folder survived the inner build"
    )
    assert read_bundle(dest).recipe.decoding["seed"] == 5 == bundle.recipe.decoding["seed"]
    assert hidden_folders(dest.parent) == []


def test_a_full_disk_is_a_build_error_and_leaves_nothing(run_child, recipe, tmp_path):
    # A limit on the size of a file: write() fails in the middle of a file, as it does on a full disk.
    done = run_child(recipe, tmp_path / "outs" / "out", tmp_path / "cache", "fsize=60000")
    assert done.returncode == BuildError.exit_code, done.stdout + done.stderr
    assert "BuildError" in done.stdout and "Free space" in done.stdout
    assert list((tmp_path / "outs").iterdir()) == []
    assert hidden_folders(tmp_path / "cache") == []


@pytest.mark.parametrize("stage", ["compile target", "tune target", "bundle"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_disk_faults_in_any_stage_are_build_errors(exported, recipe, tmp_path, monkeypatch, stage, number):
    dest = tmp_path / "outs" / "out"

    def fill_disk(message: str) -> None:
        if message == stage:
            monkeypatch.setattr(Path, "write_text", full)

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number), str(self))

    with pytest.raises(BuildError) as caught:
        build(make_plan(recipe), dest, fill_disk, StageCache(tmp_path / "cache"))
    assert os.strerror(number) in caught.value.got
    expected_todo = "can be written" if number == errno.EACCES else "Free space"
    assert expected_todo in caught.value.todo
    assert list(dest.parent.iterdir()) == []
    assert hidden_folders(tmp_path / "cache") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_file_system(run_child, recipe, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        done = run_child(recipe, disk / "out", tmp_path / "cache", "none")
        assert done.returncode == 0, done.stdout + done.stderr
        before = read_bundle(disk / "out").manifest["digest"]
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        (disk / "filler").write_bytes(bytes(free - 8192))
        done = run_child(recipe, disk / "out", tmp_path / "cache", "none")
        assert done.returncode == BuildError.exit_code, done.stdout + done.stderr
        assert "No space left" in done.stdout and "Free space" in done.stdout
        assert read_bundle(disk / "out").manifest["digest"] == before
        assert sorted(p.name for p in disk.iterdir()) == ["filler", "out"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_cache_disk_names_the_cache(exported, recipe, tmp_path):
    (tmp_path / "cache").write_text("a file where the cache's folder should be")
    with pytest.raises(BuildError) as caught:
        build(make_plan(recipe), tmp_path / "outs" / "out", cache=StageCache(tmp_path / "cache"))
    assert str(tmp_path / "cache") in caught.value.where
    assert list((tmp_path / "outs").iterdir()) == []


@pytest.mark.parametrize(("number", "says"), [(errno.ENOSPC, "speccompile cache clear"), (errno.EROFS, "Set ")])
@pytest.mark.parametrize("name", ["cache/graphs/.x", "elsewhere"])
def test_a_fault_of_the_cache_says_how_to_move_it(number, says, name, tmp_path, monkeypatch):
    """Also where what is written lies elsewhere, as a bundle that is copied from the cache."""
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BuildError) as caught, disk_faults(tmp_path / "out"):
        raise OSError(number, os.strerror(number), str(tmp_path / name / "file"))
    assert caught.value.where == str(tmp_path / "out") and f"at {tmp_path / name}" in caught.value.got
    todo = caught.value.todo
    assert (says in todo and "SPECCOMPILE_CACHE to a folder on another disk" in todo) == (name != "elsewhere")
    assert ("Free space" in todo) == (number == errno.ENOSPC)


def test_the_fakes_do_not_hide_a_write(exported, recipe, tmp_path):
    bundle = build(make_plan(recipe), tmp_path / "out", cache=StageCache(None))
    assert bundle.manifest["files"]["graphs/target/graph.onnx.data"]["size_bytes"] == fakes.FakeBackend.weights_bytes
