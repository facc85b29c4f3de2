# SPDX-License-Identifier: Apache-2.0
"""What may be written, and that no other file is ever deleted or replaced."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.format import BUNDLE, MODEL, RECORD, SPECULATOR, write_record
from speccompile.bundle.stage_cache import StageCache
from speccompile.bundle.staging import claim_folder, copy_folder, is_mount, staged_folder
from speccompile.errors import BuildError
from speccompile.pipeline import build
from tests.pipeline.fakes import make_plan


def write_folder(dest: Path, text: str = "one") -> None:
    """Writes as a command that writes a speculator."""
    claim = claim_folder(dest, SPECULATOR)
    with staged_folder(claim.path, claim.hold) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text(text)
        (folder / "config.json").write_text("{}")
        (folder / "empty").mkdir()
        write_record(folder, SPECULATOR)


def refusal(dest: Path, kind: str | None = SPECULATOR) -> BuildError:
    with pytest.raises(BuildError) as caught:
        claim_folder(dest, kind)
    return caught.value


def test_what_was_written_is_replaced_and_empty_folders_do_not_count(tmp_path):
    (tmp_path / "out" / "nothing" / "in").mkdir(parents=True)
    for text in ("one", "two"):
        write_folder(tmp_path / "out", text)
        assert (tmp_path / "out" / "deep" / "file").read_text() == text
    assert os.listdir(tmp_path) == ["out"]
    (tmp_path / "out" / "config.json").unlink()
    write_folder(tmp_path / "out", "a missing file is no loss")


FOREIGN = {
    "notes.txt": lambda out: (out / "notes.txt").write_text("precious"),
    ".hidden": lambda out: (out / ".hidden").write_text("precious"),
    "mine/": lambda out: ((out / "mine" / "deep").mkdir(parents=True), (out / "mine" / "deep" / "a").touch()),
    "deep/a": lambda out: (out / "deep" / "a").touch(),
    "link": lambda out: (out / "link").symlink_to("nowhere"),
    "folder": lambda out: (out / "folder").symlink_to(out.parent),
    "pipe": lambda out: os.mkfifo(out / "pipe"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_named_and_refused(tmp_path, name):
    write_folder(tmp_path / "out")
    FOREIGN[name](tmp_path / "out")
    error = refusal(tmp_path / "out")
    assert error.got == f"files in it that speccompile did not write: {name}"
    assert "Move them away" in error.todo


def test_many_foreign_files_are_cut_to_three(tmp_path):
    for name in "abcde":
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).touch()
    assert refusal(tmp_path / "out").got == "a folder with other things in it: a, b, c and 2 more"


def edit_the_record(out: Path) -> None:
    record = json.loads((out / RECORD).read_text())
    record["files"]["notes.txt"] = {"sha256": "", "size_bytes": 8}
    (out / RECORD).write_text(json.dumps(record))


CHANGES = {
    "config.json": lambda out: (out / "config.json").write_text("[]"),  # as long as it was
    "deep/file": lambda out: (out / "deep" / "file").write_text("longer"),
    RECORD: edit_the_record,
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_edited_file_is_the_users(tmp_path, name):
    write_folder(tmp_path / "out")
    CHANGES[name](tmp_path / "out")
    error = refusal(tmp_path / "out")
    assert error.got == f"files in it that were changed since speccompile wrote them: {name}"
    assert "remove" in error.todo


def test_a_link_instead_of_a_file_is_a_change(tmp_path):
    write_folder(tmp_path / "out")
    (tmp_path / "out" / "config.json").rename(tmp_path / "elsewhere")
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "elsewhere")
    assert "changed since speccompile wrote them: config.json" in refusal(tmp_path / "out").got


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{", '{"files": {}}', '{"schema_version": 1}', "[" * 100_000])
def test_a_manifest_of_something_else_is_no_record(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    assert "other things in it: manifest.json" in refusal(tmp_path, BUNDLE).got


def test_a_folder_of_another_kind_is_not_replaced(tmp_path):
    write_folder(tmp_path / "out")
    for kind, expected in ((BUNDLE, "a bundle to replace, or nothing"), (None, "a new or empty folder")):
        error = refusal(tmp_path / "out", kind)
        assert (error.got, error.expected) == ("a trained speculator", expected)


def test_no_folder_is_written_inside_of_a_written_one(tmp_path):
    write_folder(tmp_path / "out")
    for dest in ("out/deep", "out/new", "out/new/deeper"):
        error = refusal(tmp_path / dest)
        assert error.got == f"a path inside {tmp_path}/out, a trained speculator that speccompile wrote"


def test_a_file_that_comes_during_the_work_is_kept(tmp_path):
    write_folder(tmp_path / "out")
    claim = claim_folder(tmp_path / "out", SPECULATOR)

    def work() -> None:
        with staged_folder(claim.path, claim.hold):
            (tmp_path / "out" / "notes.txt").write_text("precious")

    with pytest.raises(BuildError, match=r"did not write: notes\.txt"):
        work()
    assert (tmp_path / "out" / "notes.txt").read_text() == "precious"
    assert os.listdir(tmp_path) == ["out"]


def test_another_writer_of_the_same_kind_does_not_stop_this_one(tmp_path):
    for dest in ("fresh", "old"):
        claim = claim_folder(tmp_path / dest, SPECULATOR)
        write_folder(tmp_path / dest)
        claim.hold()


def test_a_link_is_followed(tmp_path):
    (tmp_path / "current").symlink_to("v1")
    for text in ("one", "two"):  # first it leads nowhere yet
        write_folder(tmp_path / "current", text)
        assert (tmp_path / "v1" / "deep" / "file").read_text() == text
    assert (tmp_path / "current").readlink() == Path("v1")
    (tmp_path / "loop").symlink_to("loop")
    assert refusal(tmp_path / "loop").got == "a link that leads nowhere that is there already"


def test_files_and_what_is_below_them_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may be too long
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        assert refusal(tmp_path / "s").got == "a socket that is there already"
    assert refusal(tmp_path / "file").got == "a file that is there already"
    assert refusal(tmp_path / "pipe").got == "a pipe that is there already"
    assert refusal(tmp_path / "file" / "out").got == f"{tmp_path}/file, which is a file"


def test_a_name_that_is_too_long_is_noticed_first(tmp_path):
    assert "File name too long" in refusal(tmp_path / ("n" * 240)).got


def test_the_working_folder_is_not_replaced(tmp_path, monkeypatch):
    write_folder(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out" / "deep")
    for dest in (".", "..", tmp_path / "out"):
        error = refusal(Path(dest))
        assert "this command runs in" in error.got or "a path inside" in error.got
    monkeypatch.chdir(tmp_path / "out")
    assert "Run the command from outside" in refusal(Path()).todo
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert refusal(Path("out")).got == "a working folder that was removed"
    claim_folder(tmp_path / "new", SPECULATOR)


def test_a_folder_that_may_not_be_written_is_noticed_first(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    assert f"no permission to write in {tmp_path}" in refusal(tmp_path / "out").got


@pytest.fixture
def mounted(tmp_path: Path):
    """A file system of 64 KiB."""
    disk = tmp_path / "my disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this container may not mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_mount_point_is_not_replaced(mounted):
    assert refusal(mounted).got == "a mount point"
    write_folder(mounted / "out")
    (mounted / "bound").mkdir()
    subprocess.run(["mount", "--bind", str(mounted / "out"), str(mounted / "bound")], check=True)
    try:
        assert not os.path.ismount(mounted / "bound") and is_mount(mounted / "bound")
        assert refusal(mounted / "bound").got == "a mount point"
    finally:
        subprocess.run(["umount", str(mounted / "bound")], check=True)


def test_models_go_into_a_repository_that_is_mounted(mounted):
    (mounted / "other").mkdir()
    with staged_folder(mounted, keeps_others=True) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "file").write_text("x")
    assert sorted(os.listdir(mounted)) == ["model", "other"]


def test_a_full_disk_names_what_could_not_be_written(mounted, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "big").write_bytes(bytes(200_000))
    with pytest.raises(BuildError) as caught, staged_folder(mounted / "out") as folder:
        copy_folder(tmp_path / "source", folder / "copy")
    assert "No space left" in caught.value.got and f"{mounted}/.out.building-" in caught.value.got
    assert str(tmp_path / "source") not in caught.value.got and os.listdir(mounted) == []


def test_numpys_short_writes_are_a_full_disk(mounted):
    import numpy as np

    with pytest.raises(BuildError) as caught, staged_folder(mounted / "out") as folder:
        np.save(folder / "array.npy", np.zeros(200_000))
    assert "stopped short, as on a full disk" in caught.value.got and "Free space" in caught.value.todo


def test_graphs_on_a_full_disk(mounted):
    ir = pytest.importorskip("onnx_ir")
    import numpy as np

    from speccompile.passes.save import save_model

    weights = ir.Value(name="w", const_value=ir.tensor(np.zeros(100_000, np.float32), name="w"))
    graph = ir.Graph([], [weights], nodes=[], opset_imports={"": 24}, name="g", initializers=[weights])
    with pytest.raises(BuildError) as caught:
        save_model(ir.Model(graph, ir_version=11), mounted / "g.onnx")
    assert "as on a full disk" in caught.value.got or "No space left" in caught.value.got


def test_a_bundle_with_notes_is_not_replaced(exported, recipe, tmp_path):
    dest, cache = tmp_path / "out", StageCache(tmp_path / "cache")
    first = build(make_plan(recipe), dest, cache=cache)
    second = build(make_plan(recipe, "decoding.seed=5"), dest, cache=cache)
    assert first.manifest["digest"] != second.manifest["digest"]
    (dest / "mine").mkdir()
    (dest / "mine" / "a").touch()
    stages: list[str] = []
    with pytest.raises(BuildError, match="did not write: mine/"):
        build(make_plan(recipe), dest, stages.append, cache)
    assert stages == [] and (dest / "mine" / "a").exists()
    (dest / "mine" / "a").unlink()
    manifest = json.loads((dest / "manifest.json").read_text())
    (dest / "manifest.json").write_text(json.dumps({**manifest, "git_sha": "edited"}))
    with pytest.raises(BuildError, match=r"changed since speccompile wrote them: manifest\.json"):
        build(make_plan(recipe), dest, cache=cache)


def test_no_bundle_is_built_inside_another(exported, recipe, tmp_path):
    dest, cache = tmp_path / "out", StageCache(tmp_path / "cache")
    build(make_plan(recipe), dest, cache=cache)
    with pytest.raises(BuildError, match="a bundle that speccompile wrote"):
        build(make_plan(recipe), dest / "graphs" / "sub", cache=cache)
    assert read_bundle(dest).path == dest


def test_the_cache_removes_its_own_entries_alone(tmp_path):
    (tmp_path / "photos" / "2026").mkdir(parents=True)
    (tmp_path / "photos" / "2026" / "a.jpg").write_bytes(bytes(100))
    cache = StageCache(tmp_path, limit_bytes=10)
    cache.fetch("graphs", "key", tmp_path / "out", lambda folder: (folder / "f").write_bytes(bytes(20)) and None)
    assert (tmp_path / "photos" / "2026" / "a.jpg").exists() and not (tmp_path / "graphs" / "key").exists()


def test_others_beside_stay(tmp_path):
    (tmp_path / "repo" / "resnet").mkdir(parents=True)
    for text in ("one", "two"):
        with staged_folder(tmp_path / "repo", keeps_others=True) as folder:
            (folder / "ours").mkdir()
            (folder / "ours" / "file").write_text(text)
            write_record(folder / "ours", MODEL)
        assert (tmp_path / "repo" / "ours" / "file").read_text() == text
    assert sorted(os.listdir(tmp_path / "repo")) == ["ours", "resnet"] and os.listdir(tmp_path) == ["repo"]
