# SPDX-License-Identifier: Apache-2.0
"""Mutated configs, tokenizers and indices of a target: what a build reads of it before it loads any weight."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from speccompile.bundle.tokenizers import check_tokenizer, copy_tokenizer
from speccompile.checkpoints.checkpoint import check_checkpoint, count_params, read_config, read_dims, special_tokens
from speccompile.doctor.doctor import find_target
from speccompile.recipe.predict import predict
from tests.fuzz.mutate import damage, fuzz, mutate, text_of
from tests.pipeline import fakes

ROOT = Path(__file__).parents[2]
CONFIGS = [json.loads(p.read_text()) for p in sorted(ROOT.glob("recipes/configs/*/config.json"))]
NAMES = ("config.json", "config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json")
MORE = {"num_local_experts": 4, "moe_intermediate_size": 8, "head_dim": 4, "layer_types": ["full_attention"] * 2}


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint with an index of its one shard."""
    folder = fakes.make_checkpoint(tmp_path_factory.mktemp("seed") / "model")
    shard = (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    from speccompile.checkpoints.safetensors import read_header

    index = {"metadata": {}, "weight_map": dict.fromkeys(read_header(shard), shard.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def make_case(rng: random.Random, seed: Path) -> tuple[str, bytes]:
    """Returns (name of a file, its new contents)."""
    name = rng.choice(NAMES)
    values: Any = json.loads((seed / name).read_text())
    if name == "config.json":
        values |= rng.choice(({}, {}, MORE))
        if rng.random() < 0.2:
            values = rng.choice(CONFIGS)
    text = json.dumps(values).encode()
    return name, damage(rng, text) if rng.random() < 0.1 else text_of(mutate(rng, values)).encode()


def test_what_a_build_reads_of_a_target_is_right_or_refused(seed, tmp_path):
    def attempt(case: tuple[str, bytes]) -> str:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(seed, folder)
        (folder / case[0]).write_bytes(case[1])
        dims = read_dims(folder)
        json.dumps(predict(read_config(folder), dims, "none", 8, 1024).json_from_prediction())
        find_target(str(folder))
        count_params(folder)
        check_checkpoint(folder, dims)
        check_tokenizer(folder, dims, "checkpoint")
        ids, bos = special_tokens(folder)
        assert all(isinstance(i, int) for i in (*ids, *(() if bos is None else (bos,))))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        copy_tokenizer(folder, tmp_path / "out")
        return "ok"

    counts = fuzz("targets", lambda rng: make_case(rng, seed), attempt)
    assert set(counts) <= {"ok", "CheckpointError"}
