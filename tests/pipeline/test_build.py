# SPDX-License-Identifier: Apache-2.0
"""The pipeline: what a bundle holds, what is redone, and that bad input leaves no file."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.stage_cache import StageCache
from speccompile.errors import BuildError, BundleError, CheckpointError, RecipeError, SpecCompileError
from speccompile.pipeline import build
from speccompile.runtime.engine import load
from tests.pipeline import fakes
from tests.pipeline.fakes import make_plan


def cached_stages(bundle_manifest: dict[str, object]) -> set[str]:
    stages = bundle_manifest["stages"]
    assert isinstance(stages, list)
    return {s["name"] for s in stages if s["cached"]}


def test_a_bundle_holds_what_its_manifest_says(exported, recipe, cache, tmp_path):
    messages: list[str] = []
    build(make_plan(recipe), tmp_path / "out", messages.append, cache)
    bundle = read_bundle(tmp_path / "out")
    manifest = bundle.manifest
    assert set(bundle.graphs) == {"target", "draft", "rollback"}
    assert bundle.graph_spec("target").name == "target"
    assert bundle.graph_spec("draft").output("candidates").dims == ("batch", "scored", 1)
    assert bundle.graphs["target"]["dims"]["num_params"] == 123
    assert bundle.graphs["target"]["checks"] == {"num_tokens": 7, "num_equal": 7}
    assert bundle.graphs["target"]["tuning"]["threads"] == 1
    assert bundle.graphs["target"]["max_rows"] == 48
    assert manifest["eos_token_ids"] == [1, 2]
    assert manifest["bos_token_id"] == 0
    assert manifest["recipe"]["speculator"]["model"] == str(recipe.parent / "small")
    assert manifest["versions"]["numpy"]
    on_disk = {p.relative_to(bundle.path).as_posix() for p in bundle.path.rglob("*") if p.is_file()}
    assert on_disk == set(manifest["files"]) | {"manifest.json"}
    assert "tokenizer/tokenizer.json" in on_disk and "report.html" in on_disk
    assert exported == [recipe.parent / "big", recipe.parent / "small"]
    stages = [s["name"] for s in manifest["stages"]]
    assert stages[:4] == ["prepare kernels", "check checkpoints", "export target", "compile target"]
    assert set(stages) <= set(messages)
    assert all(s["peak_rss_bytes"] > 1e6 and s["seconds"] >= 0 for s in manifest["stages"])


def test_a_second_build_that_changes_only_the_draft_length_exports_nothing(exported, recipe, cache, tmp_path):
    build(make_plan(recipe), tmp_path / "a", cache=cache)
    num_exports = len(exported)
    second = build(make_plan(recipe, "speculator.num_draft_tokens=3"), tmp_path / "b", cache=cache)
    assert len(exported) == num_exports
    names = ("export target", "compile target", "tune target", "export draft", "compile draft", "tune draft")
    assert cached_stages(second.manifest) == set(names)
    assert second.recipe.speculator["num_draft_tokens"] == 3
    assert read_bundle(tmp_path / "b").graphs["target"] == read_bundle(tmp_path / "a").graphs["target"]


@pytest.mark.parametrize(
    ("change", "redone"),
    [
        ("target.quantization=int8", {"target"}),
        ("speculator.quantization=int4", {"draft"}),
        ("engine.max_seq_len=40", {"target", "draft"}),
        ("target.weights=random", {"target", "draft"}),
        ("engine.max_batch_size=4", set()),
        ("decoding.temperature=0.5", set()),
    ],
)
def test_only_what_depends_on_a_key_is_redone(exported, recipe, cache, tmp_path, change, redone):
    build(make_plan(recipe), tmp_path / "out", cache=cache)
    manifest = build(make_plan(recipe, change), tmp_path / "out", cache=cache).manifest
    assert {"target", "draft"} - {s.split()[1] for s in cached_stages(manifest)} == redone


def test_synthetic_acceptance_is_in_the_manifest_of_a_recipe_that_asks_for_it_alone(exported, recipe, cache, tmp_path):
    plain = build(make_plan(recipe), tmp_path / "plain", cache=cache)
    made = build(make_plan(recipe, "engine.synthetic_acceptance=[0.8, 1]"), tmp_path / "out", cache=cache)
    assert {s.split()[1] for s in cached_stages(made.manifest)} == {"target", "draft"}
    engine = made.manifest["recipe"]["engine"]
    assert made.recipe.engine.synthetic_acceptance == engine.pop("synthetic_acceptance") == [0.8, 1]
    assert engine == plain.manifest["recipe"]["engine"] and not plain.recipe.engine.synthetic_acceptance
    with pytest.raises(BundleError, match=r"engine.synthetic_acceptance\): got \[0.8, 1.0\]; expected drafts that"):
        load(made.path)


@pytest.mark.parametrize("rates", ["[0.8, 1.1]", "[-0.1]", "0.8", "[half]"])
def test_synthetic_rates_are_probabilities(recipe, rates):
    with pytest.raises(RecipeError, match=r"engine.synthetic_acceptance"):
        make_plan(recipe, f"engine.synthetic_acceptance={rates}")


def test_new_weights_with_the_old_size_and_time_are_noticed(exported, recipe, cache, tmp_path):
    import os

    build(make_plan(recipe), tmp_path / "out", cache=cache)
    weights = recipe.parent / "big" / "model.safetensors"
    before = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    manifest = build(make_plan(recipe), tmp_path / "out", cache=cache).manifest
    assert cached_stages(manifest) == {"export draft", "compile draft", "tune draft"}


def test_threads_are_measured_again_when_the_recipe_fixes_them(exported, recipe, cache, tmp_path):
    build(make_plan(recipe), tmp_path / "out", cache=cache)
    bundle = build(make_plan(recipe, "engine.threads=2"), tmp_path / "out", cache=cache)
    assert bundle.graphs["target"]["tuning"]["threads"] == 2
    assert "tune target" not in cached_stages(bundle.manifest)
    assert "export target" in cached_stages(bundle.manifest)


def test_a_damaged_cache_entry_is_redone(exported, recipe, cache, tmp_path):
    build(make_plan(recipe), tmp_path / "out", cache=cache)
    assert cache.root is not None
    for data in cache.root.glob("graphs/*/result/graph.onnx.data"):
        content = bytearray(data.read_bytes())
        content[10] ^= 255
        data.write_bytes(content)
    bundle = build(make_plan(recipe), tmp_path / "out", cache=cache)
    assert cached_stages(bundle.manifest) == {"tune target", "tune draft"}
    read_bundle(bundle.path)


def test_editing_a_bundle_does_not_reach_the_cache(exported, recipe, cache, tmp_path):
    build(make_plan(recipe), tmp_path / "a", cache=cache)
    with (tmp_path / "a" / "graphs" / "target" / "graph.onnx").open("r+b") as handle:
        handle.write(b"????")
    bundle = build(make_plan(recipe), tmp_path / "b", cache=cache)
    assert "compile target" in cached_stages(bundle.manifest)
    read_bundle(bundle.path)


def test_without_a_cache_every_stage_is_redone(exported, recipe, tmp_path):
    for _ in range(2):
        manifest = build(make_plan(recipe), tmp_path / "out", cache=StageCache(None)).manifest
        assert cached_stages(manifest) == set()


def test_the_cache_drops_its_oldest_entries(exported, recipe, tmp_path):
    cache = StageCache(tmp_path / "cache", limit_bytes=6000)
    for rows in (37, 38, 39):  # of one build: 3800 bytes
        build(make_plan(recipe, f"engine.max_seq_len={rows}"), tmp_path / "out", cache=cache)
    size = sum(f.stat().st_size for f in (tmp_path / "cache").rglob("*") if f.is_file())
    assert size <= 6000
    manifest = build(make_plan(recipe, "engine.max_seq_len=39"), tmp_path / "out", cache=cache).manifest
    assert "tune target" in cached_stages(manifest)


def test_an_existing_bundle_is_replaced_and_other_folders_are_not(exported, recipe, cache, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    build(make_plan(recipe), out, cache=cache)
    build(make_plan(recipe), out, cache=cache)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("precious")
    for output, got in ((full, "other things"), (full / "thesis.tex", "a file")):
        with pytest.raises(BuildError) as caught:
            build(make_plan(recipe), output, cache=cache)
        assert got in caught.value.got
    assert (full / "thesis.tex").read_text() == "precious"


def _truncate(folder: Path) -> None:
    file = folder / "big" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def _drop_layer(folder: Path) -> None:
    shutil.rmtree(folder / "big")
    fakes.make_checkpoint(folder / "big", layers=1)
    config = folder / "big" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))


def _other_words(folder: Path) -> None:
    path = folder / "small" / "tokenizer.json"
    path.write_text(path.read_text().replace('"w7"', '"other"'))


def _larger_tokenizer(folder: Path) -> None:
    for name in ("big", "small"):
        (folder / name / "tokenizer.json").write_text(json.dumps(fakes.tokenizer(fakes.VOCAB + 1)))


def _larger_draft_vocabulary(folder: Path) -> None:
    shutil.rmtree(folder / "small")
    fakes.make_checkpoint(folder / "small", vocab=fakes.VOCAB + 8)


def _pad(folder: Path, name: str, vocab: int) -> None:
    """Rows of the vocabulary for which the tokenizer has no token."""
    shutil.rmtree(folder / name)
    fakes.make_checkpoint(folder / name, vocab=vocab)
    (folder / name / "tokenizer.json").write_text(json.dumps(fakes.tokenizer(fakes.VOCAB)))


def _draft_without_all_tokens(folder: Path) -> None:
    _pad(folder, "small", fakes.VOCAB - 1)


BAD_INPUTS: list[tuple[Callable[[Path], object], type[SpecCompileError], str, str]] = [
    (lambda f: (f / "big" / "model.safetensors").unlink(), CheckpointError, "big", "no weights"),
    (_truncate, CheckpointError, "model.safetensors", "truncated"),
    (_drop_layer, CheckpointError, "big", "layer 1"),
    (lambda f: (f / "big" / "config.json").write_text("{"), CheckpointError, "config.json", ""),
    (lambda f: (f / "big" / "config.json").unlink(), CheckpointError, "config.json", "no such file"),
    (lambda f: (f / "big" / "tokenizer.json").unlink(), CheckpointError, "tokenizer.json", "no such file"),
    (lambda f: (f / "big" / "tokenizer.json").write_text('{"model": 3}'), CheckpointError, "tokenizer.json", "Type"),
    (_larger_tokenizer, CheckpointError, "tokenizer.json", "token ids up to 32"),
    (_other_words, RecipeError, "small", "a WordLevel tokenizer of 32 tokens"),
    (lambda f: (f / "small" / "tokenizer.json").unlink(), RecipeError, "small", "no tokenizer.json"),
    (_larger_draft_vocabulary, RecipeError, "small", "a WordLevel tokenizer of 40 tokens"),
    (_draft_without_all_tokens, RecipeError, "small", "a vocabulary of 31 tokens"),
]


@pytest.mark.parametrize("case", range(len(BAD_INPUTS)))
def test_bad_input_is_refused_and_leaves_nothing(exported, recipe, cache, tmp_path, case):
    damage, kind, where, got = BAD_INPUTS[case]
    damage(recipe.parent)
    with pytest.raises(kind) as caught:
        build(make_plan(recipe), tmp_path / "outs" / "out", cache=cache)
    assert where in caught.value.where
    assert got in caught.value.got
    assert caught.value.expected and caught.value.todo
    assert list((tmp_path / "outs").iterdir()) == []
    assert exported == []


def test_a_recipe_may_allow_another_tokenizer(exported, recipe, cache, tmp_path):
    allow = "speculator.allow_tokenizer_mismatch=true"
    _other_words(recipe.parent)
    build(make_plan(recipe, allow), tmp_path / "out", cache=cache)
    _larger_draft_vocabulary(recipe.parent)
    bundle = build(make_plan(recipe, allow), tmp_path / "out", cache=cache)
    assert bundle.graphs["draft"]["spec"]["vocab_size"] == fakes.VOCAB


@pytest.mark.parametrize(("name", "padded"), [("big", fakes.VOCAB), ("big", 48), ("small", 40)])
def test_the_same_tokenizer_may_be_padded_differently(exported, recipe, cache, tmp_path, name, padded):
    _pad(recipe.parent, name, padded)
    graphs = build(make_plan(recipe), tmp_path / "out", cache=cache).graphs
    target = padded if name == "big" else fakes.VOCAB
    assert [graphs[n]["spec"]["vocab_size"] for n in ("target", "draft")] == [target, target]
    own = graphs["draft"]["dims"]["vocab_size"]
    assert own == (padded if name == "small" else fakes.VOCAB)


def test_more_rows_than_positions_are_refused(exported, recipe, cache, tmp_path):
    with pytest.raises(RecipeError, match="at most 64"):
        build(make_plan(recipe, "engine.max_seq_len=65"), tmp_path / "out", cache=cache)


def test_a_device_the_backend_does_not_know_is_refused(exported, recipe, cache, tmp_path):
    with pytest.raises(RecipeError, match=r"engine\.device"):
        build(make_plan(recipe, "engine.device=cuda"), tmp_path / "out", cache=cache)


def test_random_weights_need_a_config_alone(exported, recipe, cache, tmp_path):
    for name in ("big", "small"):
        for file in ("model.safetensors", "tokenizer.json", "generation_config.json"):
            (recipe.parent / name / file).unlink()
    bundle = build(make_plan(recipe, "target.weights=random"), tmp_path / "out", cache=cache)
    assert bundle.tokenizer_path is None
    assert bundle.manifest["eos_token_ids"] == [1]


def test_no_more_tokens_are_scored_by_a_check_than_by_a_step(exported, recipe, cache, tmp_path):
    overrides = ("engine.max_draft_nodes=3", "speculator.num_draft_tokens=2")
    bundle = build(make_plan(recipe, *overrides), tmp_path / "out", cache=cache)
    assert bundle.graphs["target"]["checks"] == {"num_tokens": 3, "num_equal": 3}


def test_a_graph_that_rejects_its_own_tokens_is_refused(exported, recipe, cache, tmp_path, monkeypatch):
    def wrong(self: fakes.CountingEngine, feeds: object, first_slot: int = 0) -> object:
        return {**right(self, feeds), "num_accepted": [0]}  # type: ignore[arg-type]

    right = fakes.CountingEngine.run
    monkeypatch.setattr(fakes.CountingEngine, "run", wrong)
    with pytest.raises(BuildError, match="0 of 7 of the target's own tokens"):
        build(make_plan(recipe), tmp_path / "outs" / "out", cache=cache)
    assert list((tmp_path / "outs").iterdir()) == []


def test_a_machine_without_torch_is_told_what_to_install(exported, recipe, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "speccompile.export.decoder", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BuildError, match=r"no package torch.*pip install .*\[build\]"):
        build(make_plan(recipe), tmp_path / "out", cache=StageCache(None))


@pytest.mark.usefixtures("with_wait_share")
def test_a_tuning_taken_beside_other_work_is_noted_and_not_kept(exported, recipe, cache, tmp_path, monkeypatch):
    shares = iter([0.5, 0.0, 0.01])
    monkeypatch.setattr(fakes.FakeBackend, "tune", lambda *_: {"threads": 1, "step_ms": {}, "wait_share": next(shares)})
    bundle = build(make_plan(recipe), tmp_path / "out", cache=cache)
    notes = {stage["name"]: stage.get("note", "") for stage in bundle.manifest["stages"]}
    assert "50% of the time waiting" in notes["tune target"] and not notes["tune draft"]
    assert "50% of the time waiting" in (bundle.path / "report.html").read_text()
    bundle = build(make_plan(recipe), tmp_path / "out", cache=cache)
    assert "tune target" not in cached_stages(bundle.manifest) and "tune draft" in cached_stages(bundle.manifest)
    assert bundle.graphs["target"]["tuning"]["wait_share"] == 0.01
