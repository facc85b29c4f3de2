# SPDX-License-Identifier: Apache-2.0
"""The cache command: what is kept is listed by kind, and only what speccompile wrote is removed."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.pipeline import fakes

DIGEST = "0123456789abcdef"


@pytest.fixture
def cache(run: Run, recipe: Path, tmp_path: Path) -> Path:
    """Returns a cache after a build, with texts of a training, a measurement, and things of a user."""
    assert run("build", recipe, "-o", "made")[0] == 0
    root = tmp_path / "cache"
    for name in (
        f"training/plain/{DIGEST}/0.npy",
        f"tuning/{DIGEST}.json",
        f"machines/{DIGEST}.json",
        "tuning/notes.txt",
        "tuning/mine.json",
        "mine/thesis.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * 100)
    (root / "training/plain/thesis").mkdir()
    return root


def kinds(run: Run, *arguments: object) -> dict[str, int]:
    code, out, err = run("cache", *arguments, "--json")
    assert code == 0, err
    found: dict[str, int] = {}
    for entry in json.loads(out)["entries"]:
        found[entry["kind"]] = found.get(entry["kind"], 0) + 1
    return found


def test_kinds_and_sizes_are_shown(run, cache, monkeypatch):
    assert kinds(run) == {"graphs": 2, "tunings": 2, "training/plain": 1, "tuning": 1, "machines": 1}
    facts = json.loads(run("cache", "--json")[1])
    assert facts["folder"] == str(cache) and facts["limit_bytes"] == 40 * 2**30
    assert facts["size_bytes"] == sum(entry["size_bytes"] for entry in facts["entries"])
    monkeypatch.setenv("SPECCOMPILE_CACHE_GIB", "0.5")
    out = run("cache")[1]
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["graphs", "2"], ["machines", "1"]]
    assert "kept up to 512.0 MiB ($SPECCOMPILE_CACHE_GIB)" in out
    assert len(run("cache", "list", "--kind", "graphs")[1].splitlines()) == 1 + 2 + 1


def test_clearing_removes_entries_and_nothing_else(run, recipe, cache):
    code, out, _ = run("cache", "clear", "--kind", "training/plain")
    assert (code, out) == (0, f"{cache}: 1 entry removed, 100 B\n")
    assert kinds(run) == {"graphs": 2, "tunings": 2, "tuning": 1, "machines": 1}
    assert run("cache", "clear")[0] == 0
    assert kinds(run) == {}
    left = sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file() or p.name == "thesis")
    assert left == ["mine/thesis.txt", "training/plain/thesis", "tuning/mine.json", "tuning/notes.txt"]
    code, out, _ = run("build", recipe, "-o", "again", "--json")
    assert code == 0 and not any(stage["cached"] for stage in json.loads(out)["stages"])


def test_old_entries_alone(run, cache):
    old = next((cache / "graphs").iterdir())
    os.utime(old, (time.time() - 5 * 86400,) * 2)
    assert kinds(run, "clear", "--older-than", 3) == {"graphs": 1}
    assert not old.exists() and kinds(run)["graphs"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("wipe",), 2, "expected one of size, list, clear"),
        (("--kind", "graph"), 2, "expected one of graphs, machines, training/plain, tuning, tunings"),
    ],
)
def test_wrong_usage(run, cache, arguments, code, words):
    found, _, err = run("cache", *arguments)
    assert found == code and words in err


@pytest.mark.parametrize("value", ["many", "-1", "nan", "inf"])
def test_a_limit_that_is_no_size_is_named(run, monkeypatch, recipe, value):
    monkeypatch.setenv("SPECCOMPILE_CACHE_GIB", value)
    for arguments in (("cache",), ("build", recipe, "-o", "made")):
        code, _, err = run(*arguments)
        assert code == 6 and "SPECCOMPILE_CACHE_GIB" in err and "a number of GiB" in err


def test_no_cache_yet(run):
    code, out, _ = run("cache")
    assert code == 0 and ": 0 B; build stages are kept up to" in out


@pytest.mark.parametrize("command", [("build",), ("generate", "--prompt", "w1"), ("serve", "--port", "0")])
def test_a_cache_that_cannot_be_written_is_named(run, tmp_path, monkeypatch, command):
    model = fakes.make_checkpoint(tmp_path / "tiny")
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "file"))
    code, _, err = run(command[0], model, *command[1:])
    assert code == 6 and err.startswith("BuildError  SPECCOMPILE_CACHE"), err
    assert f"a file at {tmp_path}/file" in err and "Set SPECCOMPILE_CACHE to a folder" in err and "Traceback" not in err
