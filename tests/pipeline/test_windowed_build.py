# SPDX-License-Identifier: Apache-2.0
"""A drafter with a window through the whole pipeline: its bundle states how few cache rows it keeps."""

import json

import pytest

from speccompile.bundle.stage_cache import StageCache
from speccompile.cli.main import app
from speccompile.pipeline import build
from tests import store
from tests.pipeline import fakes

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import speccompile
from speccompile import SamplingParams

pytestmark = pytest.mark.export

MAX_SEQ, WINDOW, HIDDEN = 600, 20, 32
ROWS = 256  # 19 of a window, 128 of a chunk, 3 x 9 of a step: 174, rounded up


def test_a_bundle_states_and_holds_the_rows_of_a_window(tmp_path, capsys):
    from tests.speculators import eagle_lab

    fakes.make_checkpoint(tmp_path / "target", hidden=HIDDEN, layers=4)
    config = tmp_path / "target/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": MAX_SEQ}))
    config = eagle_lab.config_of(
        hidden_size=HIDDEN, target_hidden_size=HIDDEN, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=fakes.VOCAB, draft_vocab_size=fakes.VOCAB,
        layer_types=["sliding_attention"], sliding_window=WINDOW,
    )  # fmt: skip
    eagle_lab.write_eagle3(tmp_path / "draft", eagle_lab.random_eagle3(config))
    recipe = tmp_path / "recipe.yaml"
    speculator = "{method: eagle3, model: draft, tree: {widths: [2, 1]}}"
    engine = f"{{max_seq_len: {MAX_SEQ}, max_draft_nodes: 8, max_batch_size: 2, threads: 1}}"
    recipe.write_text(f"target: {{model: target}}\nspeculator: {speculator}\nengine: {engine}\n")
    with store.cheap_stages():
        bundle = build(fakes.make_plan(recipe), tmp_path / "bundle", cache=StageCache(tmp_path / "cache"))
    row_bytes = 2 * 4 * 1 * 16  # K and V, float32, one head of 16 columns
    caches = {"rows": ROWS, "slot_bytes": ROWS * row_bytes, "dtype": "float32", "slides": True}
    assert bundle.graphs["draft"]["caches"] == caches
    assert "caches" not in bundle.graphs["target"] and bundle.graph_spec("draft").window == WINDOW
    with pytest.raises(SystemExit) as end:
        app(["inspect", str(bundle.path)])
    assert end.value.code == 0
    assert f"caches keep {ROWS} rows of a sequence (32.0 KiB): windows see no others" in capsys.readouterr().out
    loaded = speccompile.load(bundle.path)
    assert [held.max_rows for held in loaded.engines[:2]] == [MAX_SEQ + 9, ROWS]
    prompts = [[3 + i % 29 for i in range(num)] for num in (330, 5)]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    fast, plain = (loaded.generate(prompts, params, speculative=drafts) for drafts in (True, False))
    assert [r.tokens for r in fast] == [r.tokens for r in plain]
    assert all(r.stats["num_draft_tokens"] > 20 for r in fast)
    assert loaded.proposer.rows.rows.firsts[0] > MAX_SEQ / 4
