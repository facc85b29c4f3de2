# SPDX-License-Identifier: Apache-2.0
"""Bundles that the end-to-end tests share: built once a session, through the whole pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import store

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "examples/models"


def build_bundle(folder: Path, name: str, text: str, overrides: tuple[str, ...] = ()) -> Path:
    """Build a recipe given as YAML text; one cache for all workers and runs, so a graph is exported once.

    Measured times mean nothing here; see `tests.store.cheap_stages`.
    """
    from speccompile.pipeline import build
    from speccompile.recipe import find_device, load_recipe, resolve

    recipe = folder / f"{name}.yaml"
    recipe.write_text(text)
    plan = resolve(load_recipe(recipe, overrides), find_device("cpu"))
    with store.locked("build"), store.cheap_stages():
        return build(plan, folder / name, cache=store.stages()).path


def pair_recipe(quantization: str) -> str:
    """Returns recipes/pycode.yaml in its sizes, so that a build of that finds the graphs in the tests' cache."""
    return (
        f"target: {{model: {MODELS / 'pycode-16m'}, quantization: {quantization}}}\n"
        f"speculator: {{method: draft_model, model: {MODELS / 'pycode-16m-draft'}}}\n"
        "engine: {max_batch_size: 8, max_seq_len: 1024, threads: 1}\n"
    )


@pytest.fixture(scope="session")
def int8_pair(e2e_folder) -> Path:
    """Returns the example pair with an int8 target."""
    return build_bundle(e2e_folder, "int8_pair", pair_recipe("int8"))


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    """Returns transformers' greedy fp32 output for examples/prompts.jsonl: see make_golden.py."""
    return json.loads((Path(__file__).parent / "golden/greedy.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def _cheap(cheap_measurements: None) -> None:
    """No test here looks at measured times."""


@pytest.fixture(autouse=True)
def without_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no clock decide whether to draft: on targets as small as these plain decoding is often faster."""
    monkeypatch.setattr("speccompile.runtime.spec_engine.controller_of", lambda proposer: None)
