# SPDX-License-Identifier: Apache-2.0
"""Bundles on the hub, which is a folder here: what is pushed, what is fetched, what the card says."""

import json
import shutil
import sys
import types
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from speccompile.bundle.bundle import Bundle, read_bundle
from speccompile.bundle.format import digest_from_manifest, digests_from_folder, write_json
from speccompile.bundle.publish import card_from_manifest, fetch_bundle, find_bundle, is_hub_id
from speccompile.errors import BundleError

NAME = "org/tiny-bundle"
COMMIT = "c0ffee"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a hub in a folder in the place of huggingface_hub; returns that folder."""
    remote, local = tmp_path / "remote", tmp_path / "hub-cache"

    def snapshot_download(
        name: str, *, revision: str | None = None, allow_patterns: list[str], tqdm_class: Any = None
    ) -> str:
        if not (remote / name).is_dir():
            raise OSError(f"404: {name}\nmore lines")
        folder = local / name / "snapshots" / COMMIT
        blobs = local / name / "blobs"
        for file in (f for f in (remote / name).rglob("*") if f.is_file()):
            path = file.relative_to(remote / name)
            if any(fnmatch(str(path), pattern) for pattern in allow_patterns) and not (folder / path).exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                blobs.mkdir(parents=True, exist_ok=True)
                blob = shutil.copyfile(file, blobs / str(path).replace("/", "-"))
                (folder / path).symlink_to(blob)  # as the hub's client does
        return str(folder)

    class Add:
        def __init__(self, path: str, content: bytes | str) -> None:
            self.path = path
            self.data = content if isinstance(content, bytes) else Path(content).read_bytes()

    class Api:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
            assert exist_ok
            (remote / name).mkdir(parents=True, exist_ok=True)

        def create_commit(self, name: str, operations: list[Add], *, commit_message: str) -> Any:
            for operation in operations:
                path = remote / name / operation.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(operation.data)
            return types.SimpleNamespace(commit_url=f"https://hub/{name}/{commit_message}")

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    module.try_to_load_from_cache = lambda name, file: next(  # type: ignore[attr-defined]
        (str(path) for path in local.glob(f"{name}/snapshots/*/{file}")), None
    )
    module.HfApi, module.CommitOperationAdd = Api, Add  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return remote


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Returns a bundle of one graph that is no graph."""
    folder = tmp_path / "bundle"
    (folder / "graphs/target").mkdir(parents=True)
    (folder / "graphs/target/graph [1].onnx").write_text("graph")
    spec = {"name": "target", "inputs": [], "outputs": [], "caches": [], "vocab_size": 4}
    target = {
        "file": "graphs/target/graph [1].onnx",
        "spec": spec,
        "form": "int8/packed",
        "tuning": {"threads": 1, "step_ms": {"1": 2.0, "16": 9.25}},
        "form_distances": {"int8/packed": {"kl": 0.0001, "top1": 0.99}},
    }
    engine = {"backend": "onnxruntime", "device": "cpu", "max_batch_size": 8, "max_seq_len": 64, "max_draft_nodes": 4}
    manifest: dict[str, Any] = {
        "schema_version": 4,
        "speccompile_version": "1",
        "created_at": "2026-11-23",
        "recipe": {"target": {"model": "owner/model"}, "speculator": {"method": "suffix"}, "engine": engine},
        "versions": {},
        "graphs": {"target": target},
        "files": digests_from_folder(folder),
        "tokenizer": None,
        "eos_token_ids": [],
        "bos_token_id": None,
        "stages": [],
    }
    del manifest["tokenizer"], manifest["bos_token_id"]
    manifest["digest"] = digest_from_manifest(manifest)
    write_json(folder / "manifest.json", manifest)
    return read_bundle(folder)


def test_what_was_pushed_is_fetched_and_nothing_else(hub, bundle):
    assert bundle.push_to_hub(NAME, message="first") == f"https://hub/{NAME}/first"
    (hub / NAME / ".gitattributes").write_text("lfs")
    (hub / NAME / "notes.txt").write_text("mine")
    assert (hub / NAME / "README.md").read_text().startswith("---\nlibrary_name: speccompile\n")
    found = read_bundle(fetch_bundle(NAME))
    assert found.manifest == bundle.manifest
    names = {file.relative_to(found.path).as_posix() for file in found.path.rglob("*") if file.is_file()}
    assert names == {"manifest.json", *bundle.manifest["files"]}


def test_all_files_of_a_branch_are_of_the_commit_that_its_manifest_was_of(hub, bundle, monkeypatch):
    bundle.push_to_hub(NAME)
    module, asked = sys.modules["huggingface_hub"], []
    plain = module.snapshot_download

    def download(name: str, *, revision: str | None = None, **options: Any) -> str:
        asked.append(revision)
        return plain(name, revision=revision, **options)

    monkeypatch.setattr(module, "snapshot_download", download)
    fetch_bundle(NAME, "a-branch")
    assert asked == ["a-branch", COMMIT]


def test_a_bundle_that_was_changed_is_not_pushed(hub, bundle):
    (bundle.path / "graphs/target/graph [1].onnx").write_text("other")
    with pytest.raises(BundleError, match="sha256"):
        bundle.push_to_hub(NAME)
    assert not (hub / NAME).exists()


def test_files_that_were_changed_on_the_hub_are_refused(hub, bundle):
    bundle.push_to_hub(NAME)
    (hub / NAME / "graphs/target/graph [1].onnx").write_text("grapf")
    with pytest.raises(BundleError, match="The file was changed"):
        read_bundle(fetch_bundle(NAME))


def test_a_missing_name_says_what_the_hub_said(hub):
    with pytest.raises(BundleError, match=r"the hub said: 404: org/none; expected a bundle on the hub"):
        fetch_bundle("org/none")


def test_a_downloaded_checkpoint_is_none_without_asking(hub, bundle, tmp_path):
    bundle.push_to_hub(NAME)
    found = find_bundle(NAME)
    assert found is not None and find_bundle("org/checkpoint") is None
    snapshot = tmp_path / "hub-cache/org/checkpoint/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (hub / "org").rename(tmp_path / "no-network")
    sys.modules["huggingface_hub"].snapshot_download = _must_not_be_asked  # type: ignore[attr-defined]
    assert find_bundle("org/checkpoint") is None
    (found / "config.json").write_text("{}")  # a bundle may hold one, too
    with pytest.raises(AssertionError, match="asked"):
        find_bundle(NAME)


def _must_not_be_asked(name: str, **options: Any) -> str:
    raise AssertionError(f"asked for {options['allow_patterns']} of {name}")


def test_a_checkpoint_on_the_hub_is_no_bundle(hub):
    (hub / "org/checkpoint").mkdir(parents=True)
    (hub / "org/checkpoint/config.json").write_text("{}")
    with pytest.raises(BundleError, match=r"org/checkpoint: got a repository without manifest\.json"):
        fetch_bundle("org/checkpoint")
    assert find_bundle("org/checkpoint") is None


def test_names_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundles").mkdir()
    assert is_hub_id(NAME)
    assert not any(map(is_hub_id, ("bundles/tiny", "tiny", "/org/tiny", "./org/tiny", "org/tiny/x", "org/")))


def test_the_card_says_what_was_built_and_measured(bundle):
    bench = {
        "modes": {
            "speculative": {"tokens_per_s": 812.34, "mean_acceptance_length": 2.5, "num_equal": 3, "num_texts": 4}
        }
    }
    card = card_from_manifest(bundle.manifest, NAME, json.loads(json.dumps(bench)))
    head = yaml.safe_load(card.split("---")[1])
    assert head == {
        "library_name": "speccompile",
        "base_model": "owner/model",
        "tags": ["speculative-decoding", "speccompile"],
    }
    for line in (
        "# tiny-bundle",
        f"speccompile serve {NAME}",
        "| speculation method | suffix |",
        "| weights | int8/packed |",
        "| caches | 8 sequences of 64 tokens |",
        "| 16 | 9.25 |",
        "KL 1.0e-04 nats, the same likeliest token after 99.0%",
        "| speculative | 812.3 | 2.50 | 3 of 4 |",
    ):
        assert line in card
    assert "bench" not in card_from_manifest(bundle.manifest, NAME) and "certificate" not in card
    manifest = json.loads(json.dumps(bundle.manifest))
    manifest["recipe"]["target"] |= {"model": "/srv/models/llama", "lora": "/srv/adapter"}
    assert "| target | llama |\n| LoRA adapter | adapter |\n" in card_from_manifest(manifest, NAME)
    facts = {"verdict": "passed", "created_at": "today", "is_stale": False, "changed_files": [], "checks": {}}
    assert "| certificate | passed, today |" in card_from_manifest(bundle.manifest, NAME, None, facts)
