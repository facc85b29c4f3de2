# SPDX-License-Identifier: Apache-2.0
"""A drafter whose LM head is two products builds in each precision, and the text is the target's own."""

import numpy as np
import pytest

from speccompile.bundle.stage_cache import StageCache
from speccompile.pipeline import build
from tests import store
from tests.pipeline import fakes

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import onnx_ir as ir  # noqa: E402

import speccompile  # noqa: E402
from speccompile import SamplingParams  # noqa: E402

pytestmark = pytest.mark.export

RANK, HIDDEN = 32, 64


def test_both_products_of_a_low_rank_head_are_quantised(tmp_path):
    from tests.speculators import eagle_lab

    fakes.make_checkpoint(tmp_path / "target", hidden=HIDDEN, layers=4)
    config = eagle_lab.config_of(
        hidden_size=HIDDEN, target_hidden_size=HIDDEN, intermediate_size=64, head_dim=16, vocab_size=fakes.VOCAB,
        draft_vocab_size=fakes.VOCAB, head_rank=RANK,
    )  # fmt: skip
    eagle_lab.write_eagle3(tmp_path / "draft", eagle_lab.random_eagle3(config))
    texts = []
    for form in ("int8", "int4"):
        recipe = tmp_path / f"{form}.yaml"
        speculator = f"{{method: eagle3, model: draft, quantization: {form}, num_draft_tokens: 2}}"
        engine = "{max_seq_len: 48, max_draft_nodes: 8, threads: 1}"
        recipe.write_text(f"target: {{model: target}}\nspeculator: {speculator}\nengine: {engine}\n")
        with store.cheap_stages():
            bundle = build(fakes.make_plan(recipe), tmp_path / f"out-{form}", cache=StageCache(tmp_path / "cache"))
        dims = bundle.graphs["draft"]["dims"]
        assert dims["head_rank"] == RANK
        graph = ir.load(bundle.graph_path("draft")).graph
        held = [v for v in graph.initializers.values() if v.name and "lm_head" in v.name]
        # Scales of blocks are floats too, where a form with them is the faster one: one number for 32.
        whole = {v.name for v in held if v.dtype == ir.DataType.FLOAT and np.prod(v.shape) >= RANK * fakes.VOCAB / 8}
        assert not whole, form
        assert {str(v.name).partition(".weight")[0] for v in held} == {"body.lm_head", "body.lm_head_down"}
        loaded = speccompile.load(bundle.path)
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        [fast] = loaded.generate([[3, 5, 7, 5, 7]], params)
        [plain] = loaded.generate([[3, 5, 7, 5, 7]], params, speculative=False)
        assert fast.tokens == plain.tokens and fast.stats["num_draft_tokens"] > 0
        texts.append(fast.tokens)
    assert texts[0] == texts[1]  # whatever the draft's precision
