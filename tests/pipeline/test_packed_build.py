# SPDX-License-Identifier: Apache-2.0
"""A checkpoint with packed weights builds and decodes as the plain one that it means."""

import json
import shutil

import pytest

from speccompile.bundle.stage_cache import StageCache
from speccompile.pipeline import build
from tests import store
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402

pytestmark = pytest.mark.export


def test_a_packed_checkpoint_builds_as_the_plain_one(tmp_path):
    from safetensors.torch import save_file

    from tests.checkpoints.packed_lab import pack_folder

    fakes.make_checkpoint(tmp_path / "packed", hidden=64, layers=1)
    shutil.copytree(tmp_path / "packed", tmp_path / "plain")
    values = pack_folder(tmp_path / "packed", "gptq 4 ordered")
    save_file({key: torch.from_numpy(value) for key, value in values.items()}, tmp_path / "plain/model.safetensors")
    assert "quantization_config" in json.loads((tmp_path / "packed/config.json").read_text())
    texts, sizes = [], []
    for name in ("packed", "plain"):
        recipe = tmp_path / f"{name}.yaml"
        engine = "{max_seq_len: 48, max_draft_nodes: 16, threads: 1}"
        recipe.write_text(f"target: {{model: {name}}}\nspeculator: {{method: ngram}}\nengine: {engine}\n")
        with store.cheap_stages():
            bundle = build(fakes.make_plan(recipe), tmp_path / f"out-{name}", cache=StageCache(tmp_path / "cache"))
        loaded = speccompile.load(bundle.path)
        made = loaded.generate([[3, 5, 7, 5, 7]], SamplingParams(max_new_tokens=24))
        texts.append(made[0].tokens)
        sizes.append(bundle.graphs["target"]["dims"]["num_params"])
    assert texts[0] == texts[1] and len(texts[0]) > 2
    assert sizes[0] == sizes[1]
