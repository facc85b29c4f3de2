# SPDX-License-Identifier: Apache-2.0
"""Manifests with values of other types, absurd numbers and deep nesting are refused with the key."""

import copy
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from speccompile.bundle.bundle import Bundle, check_fields, check_types, read_bundle
from speccompile.bundle.format import digest_from_manifest
from speccompile.bundle.manifest_records import EngineRecord, RecipeRecord, SpecRow, TargetRecord
from speccompile.cli.main import main
from speccompile.core.specs import GraphSpec, spec_from_json
from speccompile.errors import BundleError
from tests.backends.hybrid_lab import hybrid_spec

SPEC = {
    "name": "target", "inputs": [{"name": "tokens", "dims": ["batch", 1], "dtype": "int64"}], "outputs": [],
    "caches": ["k"], "vocab_size": 8, "max_rows": 4, "borrowed": [{"name": "a", "cache": "b", "owner": "target"}],
}  # fmt: skip
MANIFEST: Any = {
    "schema_version": 4,
    "recipe": {
        "target": {"model": "m"},
        "engine": {"backend": "onnxruntime", "max_batch_size": 1, "max_seq_len": 32, "max_draft_nodes": 4},
        "speculator": {"method": "none"},
    },
    "versions": {}, "eos_token_ids": [1], "bos_token_id": None, "tokenizer": None,
    "graphs": {"target": {"file": "g", "spec": SPEC, "tuning": {"threads": 1, "step_ms": {"1": 0.5}}}},
    "files": {"g": {"sha256": "0" * 64, "size_bytes": 1}},
    "stages": [{"name": "export", "seconds": 1.0, "peak_rss_bytes": 1}],
}  # fmt: skip
WRONG: list[tuple[str, Any]] = [
    ("recipe", "x"), ("recipe", -1), ("recipe", None), ("recipe.engine", []), ("recipe.engine.max_batch_size", 2**62),
    ("recipe.engine.max_seq_len", "x"), ("recipe.engine.max_draft_nodes", True), ("recipe.engine.threads", 0),
    ("recipe.engine.backend", ["onnxruntime"]), ("recipe.speculator.method", None), ("recipe.decoding", [1]),
    ("graphs", []), ("graphs.target", 1), ("graphs.target.file", None), ("graphs.target.file", "x" * 300),
    ("graphs.target.spec.inputs", {}), ("graphs.target.spec.inputs.0.dims", "x"),
    ("graphs.target.spec.inputs.0.dims.1", -1), ("graphs.target.spec.caches.0", 1),
    ("graphs.target.spec.vocab_size", 1.5), ("graphs.target.spec.borrowed.0", "x"),
    ("graphs.target.spec.scores", "all"), ("graphs.target.spec.tail", 1), ("graphs.target.spec.reads_prompts", 1),
    ("graphs.target.spec.rows_written_ahead", -1), ("graphs.target.spec.inputs.0.probe", "x"),
    ("graphs.target.tuning.threads", 10**6), ("graphs.target.tuning.step_ms", {"x": 1.0}),
    ("graphs.target.tuning.step_ms.1", float("nan")), ("graphs.target.tuning.step_ms.1", float("inf")),
    ("files", []), ("files.g", "x"), ("files.g.size_bytes", -1), ("files.g.sha256", 0), ("eos_token_ids", 1),
    ("eos_token_ids.0", "1"), ("bos_token_id", -1), ("tokenizer", {}), ("stages.0.seconds", "x"),
]  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    """Returns the manifest with one value, signed."""
    manifest: Any = copy.deepcopy(MANIFEST)
    *parents, last = [int(k) if k.isdigit() and "step_ms" not in path else k for k in path.split(".")]
    section = manifest
    for key in parents:
        section = section[key]
    section[last] = value
    return {**manifest, "digest": digest_from_manifest(manifest)}


def write(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text(text)
    return folder


def test_a_whole_manifest_is_taken():
    check_types("m", MANIFEST)


def test_a_graph_with_recurrent_states_is_taken():
    manifest: Any = copy.deepcopy(MANIFEST)
    manifest["graphs"]["target"]["spec"] = json.loads(json.dumps(hybrid_spec().json_from_spec()))
    check_types("m", manifest)
    manifest["graphs"]["target"]["spec"]["max_pending"] = -1
    with pytest.raises(BundleError, match="max_pending"):
        check_types("m", manifest)


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_a_value_of_another_type_is_refused_by_its_key(tmp_path, path, value):
    folder = write(tmp_path / "b", json.dumps(changed(path, value)))
    with pytest.raises(BundleError) as caught:
        read_bundle(folder)
    assert f"({path}" in caught.value.where
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"recipe":' * 50_000, json.dumps(changed("recipe", "x")), json.dumps(changed("recipe", -1))],
    ids=["lists", "objects", "text", "number"],
)
def test_inspect_ends_with_the_code_of_a_bundle(tmp_path, text, capsys):
    folder = write(tmp_path / "b", text)
    try:
        code: Any = main(["inspect", str(folder), "--json"])
    except SystemExit as leave:
        code = leave.code
    assert code == 7
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "BundleError"


@dataclass(frozen=True)
class Fields:
    count: int | Literal["auto"] = 1
    share: float = 0.5
    name: str | None = None
    widths: tuple[int, ...] = ()
    form: Annotated[Literal["a", "b"], "..."] = "a"
    is_on: bool = False


@pytest.mark.parametrize(
    "values",
    [
        {"count": "x"}, {"count": True}, {"count": 10**30}, {"count": [1]}, {"share": "1"}, {"share": float("nan")},
        {"name": 1}, {"widths": 1}, {"widths": ["x"]}, {"form": "c"}, {"form": []}, {"is_on": 1},
    ],
)  # fmt: skip
def test_fields_of_other_types_are_refused(values):
    with pytest.raises(BundleError) as caught:
        check_fields("speculator", Fields, values)
    assert caught.value.where == f"speculator.{next(iter(values))}"


def test_fields_of_their_types_are_taken():
    check_fields("s", Fields, {"count": "auto", "share": 1, "name": None, "widths": [1, 2], "form": "b", "is_on": True})


@pytest.mark.parametrize(
    "where", ["graphs.target.spec", "graphs.target.spec.inputs.0", "graphs.target.spec.borrowed.0"]
)
def test_unknown_keys_of_a_graph_s_spec_are_refused_by_name(where):
    with pytest.raises(BundleError, match=r"got an unknown key 'probe_'.*expected the keys .*name") as caught:
        check_types("manifest.json", changed(f"{where}.probe_", "x"))
    assert where in caught.value.where


def test_a_graph_s_spec_with_nulls_has_the_defaults():
    row = {**SPEC["inputs"][0], "probe": None}  # type: ignore[index]
    spec = spec_from_json({**SPEC, "inputs": [row], "max_rows": None, "scores": None, "borrowed": None})
    assert spec == spec_from_json({**SPEC, "max_rows": 0, "borrowed": []})


def test_a_bundle_without_a_target_is_refused(tmp_path):
    manifest: Any = copy.deepcopy(MANIFEST)
    manifest["graphs"]["other"] = manifest["graphs"].pop("target")
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "digest": digest_from_manifest(manifest)}))
    with pytest.raises(BundleError, match="got no graph 'target'"):
        read_bundle(tmp_path)


def test_every_field_of_a_graphs_spec_may_be_recorded():
    assert set(SpecRow.__annotations__) == {field.name for field in fields(GraphSpec)}


def test_what_a_manifest_records_is_read_with_types_and_defaults():
    bundle = Bundle(Path("b"), MANIFEST)
    engine = EngineRecord(backend="onnxruntime", max_batch_size=1, max_seq_len=32, max_draft_nodes=4)
    assert bundle.recipe == RecipeRecord(engine=engine, speculator={"method": "none"}, target=TargetRecord(model="m"))
    assert (engine.device, engine.threads, bundle.recipe.target.weights) == ("cpu", "auto", "checkpoint")
    assert (bundle.recipe.method, bundle.recipe.decoding, bundle.eos_token_ids) == ("none", {}, (1,))
    graph = bundle.graph("target")
    assert (graph.file, graph.tuning["threads"], graph.dims.max_positions, graph.max_rows) == ("g", 1, 0, 0)
    assert bundle.graph_path("target") == Path("b/g") and bundle.graph_spec("target") == spec_from_json(SPEC)


def test_keys_of_other_versions_and_nulls_are_no_hindrance():
    """A section may hold what this version does not know, and null where a key may be missing."""
    recipe = {**MANIFEST["recipe"], "later": 1, "target": None, "decoding": None}
    recipe["engine"] = {**recipe["engine"], "variant": "auto", "threads": None, "device": None}
    graph = {**MANIFEST["graphs"]["target"], "form": "int8", "dims": {"max_positions": 64, "hidden": 8}, "tuning": None}
    manifest = {**MANIFEST, "recipe": recipe, "graphs": {"target": graph}}
    check_types("m", manifest)
    bundle = Bundle(Path("b"), manifest)
    assert bundle.recipe.target == TargetRecord() and bundle.recipe.decoding == {}
    assert (bundle.recipe.engine.threads, bundle.recipe.engine.device) == ("auto", "cpu")
    assert bundle.graph("target").dims.max_positions == 64 and bundle.graph("target").tuning == {}
