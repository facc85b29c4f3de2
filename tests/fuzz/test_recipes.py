# SPDX-License-Identifier: Apache-2.0
"""Mutated recipes and overrides through `build --dry-run`: a plan, or a RecipeError."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.mutate import command, damage, fuzz, look_up, mutate, odd_value, paths_in, text_of

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("**/*.yaml"))
ADDED: dict[str, Any] = {  # keys that few recipes have, with valid values
    "decoding": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 7, "stop": ["\n\n"]},
    "engine": {"backend": "onnxruntime", "threads": 1, "device": "cpu", "max_seq_len": 256, "max_draft_nodes": 8},
}


def seeds() -> list[dict[str, Any]]:
    """Returns all recipes of the repository, with more keys, and folders that do not depend on where the file lies."""
    found = []
    for path in RECIPES:
        values = yaml.safe_load(path.read_text())
        for section in (values.get("target", {}), values.get("speculator", {})):
            for key in ("model", "config"):
                if isinstance(section.get(key), str) and (path.parent / section[key]).exists():
                    section[key] = str((path.parent / section[key]).resolve())
        if "tensorrt" not in str(values.get("engine", {})):
            for name, keys in ADDED.items():
                values[name] = {**keys, **(values.get(name) or {})}
        found.append(values)
    return found


def make_case(rng: random.Random) -> tuple[bytes, list[str]]:
    """Returns (text of the file, overrides)."""
    values = rng.choice(SEEDS)
    kind = rng.random()
    if kind < 0.15:
        path = rng.choice([p for p in paths_in(values) if all(isinstance(k, str) for k in p)])
        value = rng.choice((odd_value(rng), look_up(values, path), {"a": 1}))
        dotted = ".".join(path) + rng.choice(("", "", "", ".x", "."))
        return text_of(values).encode(), [f"{dotted}={text_of(value)}"]
    if kind < 0.25:
        return damage(rng, yaml.safe_dump(values).encode()), []
    changed = mutate(rng, values)
    try:
        text = json.dumps(changed) if rng.random() < 0.3 else yaml.safe_dump(changed, allow_unicode=rng.random() < 0.5)
    except RecursionError:
        text = "[" * 100_000
    return text.encode(errors="surrogatepass"), []


SEEDS = seeds()


def test_a_mutated_recipe_gives_a_plan_or_an_error_with_four_parts(tmp_path):
    path = tmp_path / "recipe.yaml"

    def attempt(case: tuple[bytes, list[str]]) -> str:
        text, overrides = case
        path.write_bytes(text)
        return command("build", path, "--dry-run", "--json", *(part for o in overrides for part in ("--set", o)))

    counts = fuzz("recipes", make_case, attempt)
    assert set(counts) <= {"ok", "RecipeError", "CheckpointError", "BuildError"}
