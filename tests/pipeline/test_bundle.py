# SPDX-License-Identifier: Apache-2.0
"""Reading bundles: every kind of file, changed in every way, is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from speccompile.bundling.stage_cache import StageCache
from speccompile.errors import BundleError
from speccompile.pipeline import build
from speccompile.runtime.bundle import digest_from_manifest, read_bundle
from speccompile.runtime.engine import load
from tests.pipeline.fakes import FakeBackend, make_plan

FILES = (
    "graphs/target/graph.onnx",
    "graphs/target/graph.onnx.data",
    "graphs/draft/graph.onnx.data",
    "graphs/rollback/graph.onnx",
    "tokenizer/tokenizer.json",
    "tokenizer/generation_config.json",
    "report.html",
)


@pytest.fixture
def bundle(exported: list[Path], recipe: Path, tmp_path: Path) -> Path:
    return build(make_plan(recipe), tmp_path / "out", cache=StageCache(None)).path


def refused(path: Path, verify: bool = True) -> BundleError:
    with pytest.raises(BundleError) as caught:
        read_bundle(path, verify)
    error = caught.value
    assert error.where and error.got and error.expected and error.todo
    return error


def edit_manifest(bundle: Path, change: Callable[[dict[str, object]], object], sign: bool = False) -> None:
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    if sign:
        manifest["digest"] = digest_from_manifest(manifest)
    path.write_text(json.dumps(manifest))


def test_a_copied_or_moved_bundle_is_still_good(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "copy")
    assert read_bundle(tmp_path / "copy").manifest == read_bundle(str(bundle)).manifest


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused(bundle: Path, name: str) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / name).write_bytes(data)
    error = refused(bundle)
    assert error.where == str(bundle / name)
    assert error.got.startswith("sha256 ") and "changed" in error.todo
    read_bundle(bundle, verify=False)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_refused_even_unverified(bundle: Path, name: str, verify: bool) -> None:
    size = (bundle / name).stat().st_size
    (bundle / name).write_bytes((bundle / name).read_bytes()[:-1])
    error = refused(bundle, verify)
    assert (error.where, error.got, error.expected) == (str(bundle / name), f"{size - 1} bytes", f"{size} bytes")
    (bundle / name).unlink()
    error = refused(bundle, verify)
    assert (error.where, error.got) == (str(bundle / name), "no such file")


def test_no_bundle_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "absent").got == "no such folder"
    (tmp_path / "f").write_text("")
    assert refused(tmp_path / "f").got == "a file"
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").where.endswith("manifest.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 1}', "\x00"])
def test_a_broken_manifest_is_refused(bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_text(text)
    assert "manifest.json" in refused(bundle).where


def test_another_schema_version_is_refused_before_anything_else(bundle: Path) -> None:
    edit_manifest(bundle, lambda m: m.update(schema_version=2, files=3))
    error = refused(bundle)
    assert (error.got, error.expected) == ("schema version 2", "schema version 1")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["eos_token_ids"].append(5),
        lambda m: m["recipe"]["engine"].update(max_seq_len=10_000),
        lambda m: m["graphs"]["target"]["spec"]["inputs"].pop(),
        lambda m: m["files"].pop("report.html"),
        lambda m: m.pop("digest"),
    ],
)
def test_an_edited_manifest_is_refused(bundle: Path, change: Callable[[dict[str, object]], object]) -> None:
    edit_manifest(bundle, change)
    assert "its own digest" in refused(bundle).got


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_a_path_out_of_the_bundle_is_refused(bundle: Path, name: str) -> None:
    (bundle.parent / "secret").write_text("x")

    def change(manifest: dict[str, object]) -> None:
        files = manifest["files"]
        assert isinstance(files, dict)
        files[name] = {"sha256": "0" * 64, "size_bytes": 1}

    edit_manifest(bundle, change, sign=True)
    assert "bad record" in refused(bundle).got


@pytest.mark.parametrize("where", ["graphs", "tokenizer"])
def test_a_manifest_that_points_to_unlisted_files_is_refused(bundle: Path, where: str) -> None:
    def change(manifest: dict[str, object]) -> None:
        if where == "tokenizer":
            manifest["tokenizer"] = "manifest.json"
        else:
            manifest["graphs"] = {"target": {"file": "elsewhere.onnx"}}

    edit_manifest(bundle, change, sign=True)
    assert where in refused(bundle).where


def test_a_key_of_another_type_is_refused(bundle: Path) -> None:
    edit_manifest(bundle, lambda m: m.update(graphs=[]), sign=True)
    assert refused(bundle).where.endswith("(graphs)")


def test_graphs_that_run_code_are_compared_whatever_was_asked(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may carry a library: nothing of it is opened before its digest holds."""
    opened: list[Path] = []
    monkeypatch.setattr(FakeBackend, "load", lambda self, path, *_, **__: opened.append(path), raising=False)
    monkeypatch.setattr(FakeBackend, "runs_code_on_load", True, raising=False)
    graph = bundle / "graphs/target/graph.onnx"
    graph.write_bytes(graph.read_bytes()[::-1])
    with pytest.raises(BundleError, match=r"graph\.onnx: got sha256"):
        load(bundle, verify=False)
    assert opened == []
