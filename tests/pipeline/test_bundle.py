# SPDX-License-Identifier: Apache-2.0
"""Reading bundles: every kind of file, changed in every way, is refused by name."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.format import digest_from_manifest, list_foreign_files
from speccompile.bundle.stage_cache import StageCache
from speccompile.errors import BundleError
from speccompile.pipeline import build
from speccompile.runtime.engine import load
from tests.pipeline import fakes
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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that every test gets a copy of."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        fakes.install(patch.setattr, lambda name, module: patch.setitem(sys.modules, name, module))
        recipe = fakes.write_recipe(folder / "in")
        return build(make_plan(recipe), folder / "out", cache=StageCache(None)).path


@pytest.fixture
def bundle(exported: list[Path], built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "out"))


def refused(path: Path, verify: bool = True) -> BundleError:
    with pytest.raises(BundleError) as caught:
        read_bundle(path, verify)
    error = caught.value
    assert error.where and error.got and error.expected and error.todo
    return error


def read_manifest(bundle: Path) -> dict[str, object]:
    manifest: dict[str, object] = json.loads((bundle / "manifest.json").read_text())
    return manifest


def edit_manifest(bundle: Path, change: Callable[[dict[str, object]], object], sign: bool = False) -> None:
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    if sign:
        manifest["digest"] = digest_from_manifest(manifest)
    path.write_text(json.dumps(manifest))


def test_a_copied_or_moved_bundle_is_still_good(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "copy")
    assert read_bundle(tmp_path / "copy").manifest == read_bundle(str(bundle)).manifest


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused(bundle, name):
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bundle / name).write_bytes(data)
    error = refused(bundle)
    assert error.where == str(bundle / name)
    assert error.got.startswith("sha256 ") and "changed" in error.todo
    read_bundle(bundle, verify=False)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_refused_even_unverified(bundle, name, verify):
    size = (bundle / name).stat().st_size
    (bundle / name).write_bytes((bundle / name).read_bytes()[:-1])
    error = refused(bundle, verify)
    assert (error.where, error.got, error.expected) == (str(bundle / name), f"{size - 1} bytes", f"{size} bytes")
    (bundle / name).unlink()
    error = refused(bundle, verify)
    assert (error.where, error.got) == (str(bundle / name), "no such file")


def test_no_bundle_is_refused(tmp_path):
    assert refused(tmp_path / "absent").got == "no such folder"
    (tmp_path / "f").write_text("")
    assert refused(tmp_path / "f").got == "a file"
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").where.endswith("manifest.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 5}', "\x00"])
def test_a_broken_manifest_is_refused(bundle, text):
    (bundle / "manifest.json").write_text(text)
    assert "manifest.json" in refused(bundle).where


def test_another_schema_version_is_refused_before_anything_else(bundle):
    edit_manifest(bundle, lambda m: m.update(schema_version=1, files=3))
    error = refused(bundle)
    assert (error.got, error.expected) == ("schema version 1", "schema version 4")


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
def test_an_edited_manifest_is_refused(bundle, change):
    edit_manifest(bundle, change)
    assert "its own digest" in refused(bundle).got


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret"])
def test_a_path_out_of_the_bundle_is_refused(bundle, name):
    (bundle.parent / "secret").write_text("x")

    def change(manifest: dict[str, object]) -> None:
        files = manifest["files"]
        assert isinstance(files, dict)
        files[name] = {"sha256": "0" * 64, "size_bytes": 1}

    edit_manifest(bundle, change, sign=True)
    assert "bad record" in refused(bundle).got


@pytest.mark.parametrize("where", ["graphs", "tokenizer"])
def test_a_manifest_that_points_to_unlisted_files_is_refused(bundle, where):
    def change(manifest: dict[str, object]) -> None:
        if where == "tokenizer":
            manifest["tokenizer"] = "manifest.json"
        else:
            manifest["graphs"] = {"target": {"file": "elsewhere.onnx"}}

    edit_manifest(bundle, change, sign=True)
    assert where in refused(bundle).where


def test_a_key_of_another_type_is_refused(bundle):
    edit_manifest(bundle, lambda m: m.update(graphs=[]), sign=True)
    assert refused(bundle).where.endswith("(graphs)")


def test_graphs_that_run_code_are_compared_whatever_was_asked(bundle, monkeypatch):
    """A plan may carry a library: nothing of it is opened before its digest holds."""
    opened: list[Path] = []
    monkeypatch.setattr(FakeBackend, "load", lambda self, path, *_, **__: opened.append(path), raising=False)
    monkeypatch.setattr(FakeBackend, "runs_code_on_load", True, raising=False)
    graph = bundle / "graphs/target/graph.onnx"
    graph.write_bytes(graph.read_bytes()[::-1])
    with pytest.raises(BundleError, match=r"graph\.onnx: got sha256"):
        load(bundle, verify=False)
    assert opened == []


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "name", ["tokenizer/chat_template.jinja", "notes.txt", "graphs/target/graph.onnx.data.1", "mine/deep/file"]
)
def test_a_file_that_the_manifest_does_not_list_is_refused(bundle, name, verify):
    (bundle / name).parent.mkdir(parents=True, exist_ok=True)
    (bundle / name).write_text("planted")
    assert list_foreign_files(bundle, read_manifest(bundle)) == [name]
    error = refused(bundle, verify)
    assert (error.where, error.got) == (str(bundle / name), "a file that the manifest does not list")
    assert "Move it out" in error.todo
    with pytest.raises(BundleError, match="does not list"):
        load(bundle, verify=verify)


def test_the_refusal_counts_the_other_files(bundle):
    for name in ("b", "a", "c"):
        (bundle / name).write_text("")
    error = refused(bundle)
    assert error.where == str(bundle / "a") and error.got.endswith("(2 more)")


def test_links_to_folders_are_refused_and_not_followed(bundle):
    (bundle / "loop").symlink_to(bundle)
    assert list_foreign_files(bundle, read_manifest(bundle)) == ["loop"]
    assert refused(bundle).where == str(bundle / "loop")


def test_hidden_files_are_foreign_but_do_not_stop_a_load(bundle):
    """Operating systems, NFS and download tools leave them; nothing reads them."""
    for name in (".DS_Store", "graphs/.nfs0001", ".cache/huggingface/x.metadata"):
        (bundle / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle / name).write_text("")
    (bundle / "lost+found").mkdir()
    read_bundle(bundle)
    assert len(list_foreign_files(bundle, read_manifest(bundle))) == 3


def test_a_bundle_may_lie_under_a_link_or_a_hidden_folder(bundle, tmp_path):
    (tmp_path / "link").symlink_to(bundle)
    read_bundle(tmp_path / "link")
    shutil.copytree(bundle, tmp_path / ".hidden/made")
    read_bundle(tmp_path / ".hidden/made")
