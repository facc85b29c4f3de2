# SPDX-License-Identifier: Apache-2.0
"""A build from Python with the package's public names, as the README writes it."""

import os

from speccompile import build, find_device, load_recipe, resolve


def test_a_recipe_becomes_a_bundle(exported, recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    loaded = load_recipe(str(recipe), ["engine.max_batch_size=4"])
    bundle = build(resolve(loaded, find_device(loaded.engine.device)), os.fspath(tmp_path / "made"))
    assert bundle.path == tmp_path / "made"
    assert bundle.recipe.engine.max_batch_size == 4
