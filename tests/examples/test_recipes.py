# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe is valid, and those of the example pair find their models from any directory."""

from pathlib import Path

import pytest

from speccompile.recipe import Device, load_recipe, resolve

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_shipped_recipe_resolves(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = resolve(load_recipe(path), Device("cpu", 2))
    local = [job.model for job in plan.jobs if job.model.startswith("/")]
    assert all((Path(model) / "config.json").is_file() for model in local)
    # A recipe of the hub is an example for people with a network; the others must build without one.
    assert (len(local) == len(plan.jobs)) == (path.stem != "qwen3-8b")


def test_the_demo_recipe_is_the_pair_on_onnxruntime():
    plan = resolve(load_recipe(ROOT / "recipes/pycode.yaml"), Device("cpu", 2))
    assert plan.engine.backend == "onnxruntime"
    assert plan.method == "draft_model"
    assert [Path(job.model).name for job in plan.jobs] == ["pycode-16m", "pycode-16m-draft"]
    assert {job.quantization for job in plan.jobs} == {"none"}
