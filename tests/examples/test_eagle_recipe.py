# SPDX-License-Identifier: Apache-2.0
"""The recipe of a published EAGLE-3 drafter: planned whole without a network, built small through the command."""

import json
from pathlib import Path

import pytest

from tests.examples.test_recipes import command

pytestmark = pytest.mark.export

RECIPE = Path(__file__).parents[2] / "recipes/llama3.1-8b-eagle3.yaml"
# Of the drafter: attention over two vectors, MLP, LM head of 32000 tokens, norms; and the target's embeddings.
LAYER = 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
DRAFT = LAYER + 32_000 * 4096 + 4 * 4096 + 128_256 * 4096
PARAMS = {"target": 8_030_261_248, "draft": DRAFT, "fusion": 3 * 4096 * 4096}
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "draft_vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip


def test_it_plans_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    planned = command(RECIPE, "--dry-run")
    assert {n: graph["num_params"] for n, graph in planned["predicted"]["graphs"].items()} == PARAMS
    assert planned["plan"]["engine"]["backend"] == "tensorrt"


def test_it_builds_small_with_layers_that_follow_the_targets(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))
    options = []
    for section, name in (("target", "llama3.1-8b"), ("speculator", "eagle3-llama3.1-8b")):
        config = json.loads((RECIPE.parent / "configs" / name / "config.json").read_text())
        held = {k: SMALL.get(k, v) for k, v in config.items() if not k.endswith("token_id")}
        (tmp_path / section).mkdir()
        (tmp_path / section / "config.json").write_text(json.dumps(held))
        options += ["--set", f"{section}.config={tmp_path / section}"]
    settings = ("engine.backend=onnxruntime", "engine.max_seq_len=64", "target.num_layers=4", "engine.threads=1")
    for setting in (*settings, "engine.max_draft_nodes=8"):
        options += ["--set", setting]
    made = command(RECIPE, "--weights", "random", *options, "-o", tmp_path / "out")
    assert set(made["graphs"]) == {"target", "rollback", "draft", "fusion"}
    import speccompile
    from speccompile.core.sampling import SamplingParams

    engine, params = speccompile.load(tmp_path / "out"), SamplingParams(max_new_tokens=10, ignore_eos=True)
    inputs = [t.name for t in engine.bundle.graph_spec("fusion").inputs]
    assert inputs == ["hidden.0", "hidden.2", "hidden.3"]
    drafted, plain = (engine.generate([[1, 5, 9], [7]], params, speculative=s) for s in (True, False))
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
