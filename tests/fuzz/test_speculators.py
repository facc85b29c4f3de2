# SPDX-License-Identifier: Apache-2.0
"""Mutated speculators through `doctor` and `convert`: findings or an error, never a traceback or a hang."""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import checkpoint_lab as lab
from tests.fuzz.mutate import command, damage, fuzz, mutate, text_of

MAKERS: tuple[Callable[[Path], Path], ...] = (
    lab.medusa_ours, lab.medusa_hf, lab.medusa_modelopt, lab.medusa_vllm, lab.mlp_plain, lab.mlp_tied, lab.eagle_ours,
    lab.eagle3_ours, lab.eagle3_specforge, lab.eagle3_numbered, lab.eagle3_speculators, lab.eagle3_windowed,
    lab.glide_ours, lab.prophet_ours, lab.early_exit_ours, lab.peagle_numbered, lab.peagle_speculators,
)  # fmt: skip
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns one valid folder of each layout, with the target that it is for."""
    top = tmp_path_factory.mktemp("seeds")
    lab.write_target(top / "target")
    return [make(top / make.__name__) for make in MAKERS]


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns (header, the tensors' bytes) of a safetensors file."""
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:end]), raw[end:]


def make_case(rng: random.Random, seeds: list[Path]) -> dict[str, Any]:
    """Returns {"seed": folder, "config": text, "weights": bytes or None, "to": layout, "set": overrides}."""
    folder = rng.choice(seeds)
    config, weights, kind = json.loads((folder / "config.json").read_text()), None, rng.random()
    case = {"seed": folder, "to": rng.choice(("ours", "ours", "ours", "speculators", "vllm")), "set": []}
    if kind < 0.6:
        text = text_of(mutate(rng, config)).encode()
    elif kind < 0.7:
        text = damage(rng, json.dumps(config).encode())
    elif kind < 0.95:
        text = json.dumps(config).encode()
        header, data = split(folder / WEIGHTS)
        raw = text_of(mutate(rng, header)).encode() if rng.random() < 0.9 else damage(rng, json.dumps(header).encode())
        weights = struct.pack("<Q", len(raw)) + raw + data
    else:
        text, key = json.dumps(config).encode(), rng.choice(list(config))
        case["set"] = [f"{key}={text_of(mutate(rng, {'x': config[key]}).get('x'))}"]
    return {**case, "config": text, "weights": weights}


def write(case: dict[str, Any], folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_bytes(case["config"])
    if case["weights"] is None:
        (folder / WEIGHTS).symlink_to(case["seed"] / WEIGHTS)
    else:
        (folder / WEIGHTS).write_bytes(case["weights"])
    return folder


def overrides(case: dict[str, Any]) -> list[str]:
    return [part for pair in case["set"] for part in ("--set", pair)]


def test_the_doctor_reports_whatever_a_speculator_holds(seeds, tmp_path):
    target = seeds[0].parent / "target"

    def attempt(case: dict[str, Any]) -> str:
        folder = write(case, tmp_path / "case")
        aim = ("--target", target) if len(case["config"]) % 2 else ()
        return command("doctor", folder, "--json", *aim, *overrides(case))

    counts = fuzz("doctor", lambda rng: make_case(rng, seeds), attempt)
    assert set(counts) <= {"ok", "findings", "CheckpointError"}


def test_a_conversion_writes_a_speculator_or_refuses(seeds, tmp_path):
    def attempt(case: dict[str, Any]) -> str:
        folder = write(case, tmp_path / "case")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return command("convert", folder, "-o", tmp_path / "out", "--to", case["to"], "--json", *overrides(case))

    counts = fuzz("convert", lambda rng: make_case(rng, seeds), attempt)
    assert set(counts) <= {"ok", "CheckpointError", "RecipeError"}
