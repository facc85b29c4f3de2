# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe is valid and builds: those of the example pair from any directory, others from their configs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speccompile.bundle.choices import complete_plan
from speccompile.recipe import Device, load_recipe, resolve
from tests import store

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
LARGE = sorted(path for path in RECIPES if path.stem.startswith(("llama13b", "vicuna13b")))
HUB = {"qwen3-8b", "gemma4-assistant", "smollm2"}  # examples for people with a network
# Numbers of parameters of the models that these recipes name; of Medusa's heads, those of four out of five.
PARAMS = {"target": 13_015_864_320, "draft": 1_100_048_384}
HEADS = {"llama13b": 840_982_528, "vicuna13b-medusa": 760_238_080}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_shipped_recipe_resolves(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = resolve(load_recipe(path), Device("cpu", 2))
    # A job that names another job's checkpoint has none of its own.
    own = [job for job in plan.jobs if job.model not in {other.name for other in plan.jobs}]
    folders = [job.model if job.model.startswith("/") else job.config for job in own]
    assert all(folders) == (path.stem not in HUB)
    assert all((Path(folder) / "config.json").is_file() for folder in folders if folder)


def test_the_demo_recipe_is_the_pair_on_onnxruntime():
    plan = complete_plan(resolve(load_recipe(ROOT / "recipes/pycode.yaml"), Device("cpu", 2)))
    assert plan.engine.backend == "onnxruntime"
    assert plan.method == "draft_model"
    assert [Path(job.model).name for job in plan.jobs] == ["pycode-16m", "pycode-16m-draft"]
    assert {job.quantization for job in plan.jobs} == {"none"}


def command(*arguments):
    from speccompile.cli.main import app

    done = CliRunner().invoke(app, ["build", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.export
@pytest.mark.parametrize("path", LARGE, ids=lambda p: p.stem)
def test_a_large_recipe_plans_without_a_network(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    planned = command(path, "--dry-run")
    graphs = planned["predicted"]["graphs"]
    known = {**PARAMS, "heads": HEADS.get(path.stem)}
    assert {name: graph["num_params"] for name, graph in graphs.items()} == {name: known[name] for name in graphs}
    assert planned["plan"]["engine"]["backend"] == "tensorrt"
    short = command(path, "--dry-run", "--weights", "random", "--set", "target.num_layers=2")
    layers = graphs["target"]["num_params"] - short["predicted"]["graphs"]["target"]["num_params"]
    assert layers == 38 * (4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120)


@pytest.mark.export
@pytest.mark.parametrize("path", LARGE, ids=lambda p: p.stem)
def test_a_large_recipe_builds_small_on_onnxruntime(path, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    plan = resolve(load_recipe(path), Device("cpu", 2))
    options = []
    for section, job in zip(("target", "speculator"), plan.jobs, strict=True):
        config = json.loads((Path(job.config) / "config.json").read_text())
        small = {"hidden_size": 40, "intermediate_size": 48, "emb_dim": 40, "inner_dim": 24, "vocab_size": 96}
        small |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
        folder = tmp_path / section
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({k: small.get(k, v) for k, v in config.items()}))
        options += ["--set", f"{section}.config={folder}"]
    for setting in ("engine.backend=onnxruntime", "engine.max_seq_len=64", "target.num_layers=1", "engine.threads=1"):
        options += ["--set", setting]
    with store.cheap_stages():
        made = command(path, "--weights", "random", *options, "-o", tmp_path / "out")
    assert set(made["graphs"]) == {"target", "rollback", plan.drafts[0].name}
    import speccompile
    from speccompile.core.sampling import SamplingParams

    engine, params = speccompile.load(tmp_path / "out"), SamplingParams(max_new_tokens=10, ignore_eos=True)
    drafted, plain = (engine.generate([[1, 5, 9], [7]], params, speculative=s) for s in (True, False))
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
