# SPDX-License-Identifier: Apache-2.0
"""A hybrid with a multi-token prediction module inside becomes TensorRT plans, without a GPU."""

import importlib.util
import json

import pytest

if importlib.util.find_spec("tensorrt_rtx") is None:
    pytest.skip("TensorRT-RTX is not installed: NO PLAN IS BUILT", allow_module_level=True)

from speccompile.core.specs import spec_from_json
from speccompile.pipeline import build
from tests import store
from tests.pipeline import fakes

pytestmark = [pytest.mark.export, pytest.mark.plan]

CONFIG = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 32, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 96, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "mtp_num_hidden_layers": 1,
}  # fmt: skip


def test_target_and_module_build_with_states_in_float32(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "target/tokenizer.json").write_text(json.dumps(fakes.tokenizer(32)))
    (tmp_path / "r.yaml").write_text(
        "target: {model: target, weights: random, dtype: float16}\nspeculator: {method: mtp}\n"
        "engine: {backend: tensorrt, max_seq_len: 48, max_draft_nodes: 6, max_batch_size: 2}\n"
    )
    with store.cheap_stages():
        bundle = build(fakes.make_plan(tmp_path / "r.yaml"), tmp_path / "out", cache=store.stages())
    target, draft = (bundle.graphs[name] for name in ("target", "draft"))
    spec = spec_from_json(target["spec"])
    assert spec.states == ("state.0", "pending.0", "conv_rows.0")
    # 7 rows may be pending; 8 of them are a multiple of 256 bytes.
    held = [(spec.input(name).dims, spec.input(name).dtype) for name in (*spec.states, *spec.caches)]
    states = [("batch", 4, 16, 16), ("batch", 8, 104), ("batch", 11, 128)]
    assert held == [*((dims, "float32") for dims in states), *((("batch", 2, 56, 16), "float16"),) * 2]
    assert [t.dtype for t in spec.outputs if t.name.startswith(("state", "pending", "conv"))] == ["float32"] * 3
    assert (target["tensorrt"]["cleared_flags"], draft["tensorrt"]["cleared_flags"]) == (["TF32"], [])
    ops = target["op_histogram"]["after"]
    assert (ops["speccompile::GatedDelta"], ops["speccompile::ConvRows"]) == (1, 1)
    assert target["tensorrt"]["plugin_layers"] == {"SpecVerify": 1}, "a chain has no rows to move"
    assert all(bundle.graph_path(name).stat().st_size > 10_000 for name in ("target", "draft"))
