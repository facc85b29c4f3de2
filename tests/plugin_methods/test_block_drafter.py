# SPDX-License-Identifier: Apache-2.0
"""A method of a new kind is a folder and an entry point: no file of the package names it.

The tests take it from end to end: recipe, build, checks of the graph, ONNX Runtime, decoding, doctor.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile
from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.format import digest_from_package
from speccompile.bundle.graphs import NOT_OF_GRAPHS
from speccompile.core import registry
from speccompile.core.sampling import SamplingParams
from speccompile.core.specs import spec_from_json
from speccompile.doctor.doctor import examine
from speccompile.errors import RecipeError
from speccompile.recipe import find_device, load_recipe, resolve
from speccompile.recipe.models import speculator_section
from speccompile.runtime.spec_engine import SpecEngine
from tests.certificate.shifting import check_that_a_shift_shows
from tests.e2e.conftest import build_bundle
from tests.e2e.test_mlp import write_target
from tests.pipeline import fakes

pytestmark = pytest.mark.export

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1], [8], [8, 2, 8, 1, 8], [30, 4, 9, 9]]
HIDDEN, VOCAB, BLOCK, HEAD_DIM = 64, fakes.VOCAB, 4, 8
HOME = "tests.plugin_methods.block_drafter"
BACKENDS = ("onnxruntime", "reference")


def write_drafter(folder: Path, target: Path) -> None:
    """Returns a drafter with a table of successors; the target's features have a small influence."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    table = np.zeros((VOCAB, BLOCK, VOCAB))
    for prompt in PROMPTS:
        text = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
        for ahead in range(BLOCK):
            np.add.at(table, (text[: -1 - ahead], ahead, text[1 + ahead :]), 1)
    rng = np.random.default_rng(7)
    tensors = {f"{name}_proj.weight": 0.1 * rng.normal(size=(HEAD_DIM, HIDDEN)) for name in "qkv"}
    tensors["out_proj.weight"] = 0.1 * rng.normal(size=(VOCAB, HEAD_DIM))
    tensors["successors.weight"] = table.reshape(VOCAB, -1)
    folder.mkdir()
    sizes = {"hidden_size": HIDDEN, "head_dim": HEAD_DIM, "vocab_size": VOCAB, "block_size": BLOCK}
    (folder / "config.json").write_text(json.dumps({"model_type": "block_drafter", **sizes}))
    save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Returns the `dist-info` of an installed package with the method."""
    site = tmp_path_factory.mktemp("site")
    info = site / "block_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: block-drafter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.METHOD_GROUP}]\nblock_drafter = {HOME}.config:BlockMethod\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("block")
    write_target(folder / "big")
    write_drafter(folder / "drafter", folder / "big")
    return folder


RECIPE = (
    "target: {model: big}\nspeculator: {method: block_drafter, model: drafter}\n"
    "engine: {max_batch_size: 4, max_seq_len: 60, max_draft_nodes: 4, threads: 1}\n"
)


@pytest.fixture(scope="module")
def bundles(folder: Path) -> dict[str, Path]:
    return {name: build_bundle(folder, name, RECIPE, (f"engine.backend={name}",)) for name in BACKENDS}


def load(bundles: dict[str, Path], backend: str = "onnxruntime") -> SpecEngine:
    return speccompile.load(bundles[backend], verify=False)


def greedy(num: int) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=num + i) for i in range(len(PROMPTS))]


def test_the_recipe_has_its_fields(folder):
    assert {"model", "num_draft_tokens", "block_size"} <= set(speculator_section("block_drafter").model_fields)
    path = folder / "wrong.yaml"
    path.write_text(RECIPE)
    for override, words in (
        ("speculator.block=3", "unknown key 'block'"),
        ("speculator.num_draft_tokens=0", r"speculator\.num_draft_tokens: got 0"),
        ("speculator.num_draft_tokens=5", r"at most engine\.max_draft_nodes = 4"),
        ("speculator.method=block_draftr", "block_drafter"),
    ):
        with pytest.raises(RecipeError, match=words):
            resolve(load_recipe(path, [override]), find_device("cpu"))


def test_the_graph_is_built_checked_and_measured(bundles):
    bundle = read_bundle(bundles["onnxruntime"])
    record = bundle.graphs["block"]
    assert record["role"] == "block drafter" and record["checks"] == {"num_tokens": BLOCK}
    assert record["dims"]["num_params"] == VOCAB * BLOCK * VOCAB + HEAD_DIM * (3 * HIDDEN + VOCAB)
    assert record["tuning"]["step_ms"]["1"] > 0
    attention = "Attention" if record["form"] == "fp32" else "speccompile::CachedAttention"
    assert record["op_histogram"]["after"][attention] == 1
    spec = spec_from_json(record["spec"])
    assert (spec.num_drafts, spec.reads_prompts, spec.own_caches) == (BLOCK, True, ("block_k_cache", "block_v_cache"))
    assert bundle.recipe.speculator["block_size"] == 0


@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_text_equals_plain_decoding(bundles, batch_size):
    engine = load(bundles)
    plain = engine.generate(PROMPTS, greedy(40), speculative=False, batch_size=1)
    fast = engine.generate(PROMPTS, greedy(40), batch_size=batch_size)
    assert [r.tokens for r in fast] == [r.tokens for r in plain]
    assert sum(r.stats["num_accepted"] for r in fast) >= 40
    assert len(set(plain[0].tokens)) > 3


def test_sampled_text_equals_plain_decoding_as_drafts_are_not_drawn(bundles):
    engine = load(bundles)
    params = [SamplingParams(max_new_tokens=30, temperature=heat, seed=i) for i, heat in enumerate((1, 0.7, 0, 1.2, 1))]
    plain = engine.generate(PROMPTS, params, speculative=False)
    for batch_size in (1, 4):
        assert [r.tokens for r in engine.generate(PROMPTS, params, batch_size=batch_size)] == [r.tokens for r in plain]


def test_backends_agree_and_a_full_cache_ends_where_plain_decoding_ends(bundles):
    ends = [SamplingParams(max_new_tokens=100)] * len(PROMPTS)
    engine = load(bundles)
    plain = [r.tokens for r in engine.generate(PROMPTS, ends, speculative=False)]
    assert [r.tokens for r in engine.generate(PROMPTS, ends, batch_size=4)] == plain
    short = [r.tokens for r in load(bundles, "reference").generate(PROMPTS[:2], greedy(6)[:2], batch_size=2)]
    assert short == [text[: 6 + i] for i, text in enumerate(plain[:2])]


def test_what_it_drafts_reads_the_features(bundles):
    """Without this no test here would show that prompts and steps reach its cache."""
    engine = load(bundles)
    drafter = engine.proposer.engine  # type: ignore[attr-defined]
    seen: list[tuple[int, int]] = []
    run = drafter.run

    def watched(feeds: dict[str, np.ndarray], first_slot: int = 0) -> object:
        assert np.abs(feeds["block_features"]).max() > 0
        seen.append((int(feeds["lengths"][0]), feeds["block_features"].shape[1]))
        return run(feeds, first_slot)

    drafter.run = watched
    (result,) = engine.generate(PROMPTS[:1], greedy(12)[:1])
    # The prompt but its last token; from then on each run begins where the one before has ended.
    assert seen[0] == (0, len(PROMPTS[0]) - 1) and seen[1] == (len(PROMPTS[0]) - 1, 1)
    for (start, width), (following, _) in itertools.pairwise(seen[1:]):
        assert following == start + width - 1
    assert seen[-1][0] + seen[-1][1] <= len(PROMPTS[0]) + len(result.tokens)


def test_the_doctor_knows_its_layout(folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    report = examine(str(folder / "drafter"), str(folder / "big"))
    assert (report.format, report.method, report.errors) == ("block_drafter/ours", "block_drafter", ())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "drafter/config.json").read_text())
    tensors = load_file(folder / "drafter/model.safetensors")
    tensors["k_proj.weight"] = tensors["k_proj.weight"][:, ::2].copy()
    del tensors["v_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    faults = " ".join(fault.text() for fault in examine(str(broken)).errors)
    assert "k_proj.weight" in faults and "v_proj.weight" in faults


def test_another_target_is_refused(folder, tmp_path):
    from speccompile.bundle.graphs import open_source

    path = folder / "other.yaml"
    path.write_text(RECIPE)
    plan = resolve(load_recipe(path), find_device("cpu"))
    dims = open_source(plan, plan.target, None).dims
    with pytest.raises(RecipeError, match="a hidden size of 64; expected 32, as the target has"):
        open_source(plan, plan.drafts[0], dataclasses.replace(dims, hidden_size=32))


def test_the_check_of_acceptance_fails_where_every_draft_is_shifted_by_one(bundles):
    check_that_a_shift_shows(load(bundles), PROMPTS * 6, 45)


def test_its_sources_are_in_the_cache_key(tmp_path, monkeypatch):
    package = tmp_path / "blocks"
    package.mkdir()
    for name in ("__init__", "model", "proposer"):
        (package / f"{name}.py").write_text("")
    (tmp_path / "alone.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def key() -> str:
        return digest_from_package("blocks.checkpoint", leave_out=NOT_OF_GRAPHS)

    first, alone = key(), digest_from_package("alone")
    (package / "proposer.py").write_text("x = 1")
    assert key() == first
    (package / "model.py").write_text("x = 1")
    (tmp_path / "alone.py").write_text("x = 1")
    assert key() != first and digest_from_package("alone") != alone


def test_no_file_of_the_package_names_it():
    package = Path(speccompile.__file__).parent
    assert not [path for path in package.rglob("*.py") if "block_drafter" in path.read_text()]
    assert "block_drafter" not in registry.METHODS and registry.method("block_drafter").name == "block_drafter"
