# SPDX-License-Identifier: Apache-2.0
"""RotaryCrossAttention where heads are rotated by constant tables; other graphs are left as they are."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.ops.registry import attach_functions
from speccompile.passes.base import histogram_from_model, run_pipeline
from speccompile.passes.cleanup import remove_dead
from speccompile.passes.edit import OPS_DOMAIN, Editor, add_input
from speccompile.passes.fuse_cross_attention import fuse_cross_attention
from tests.passes.test_lowering import add_output, empty_model, run

TOLERANCE = 2e-6  # of numbers of order 1, float32
HEADS, KV_HEADS, DIM, ROWS = 4, 2, 6, 24


@dataclass(frozen=True)
class Layer:
    """What surrounds the attention."""

    rotary: bool = True
    rotary_dim: int = 0
    interleaved: int = 0
    has_norm: bool = False
    is_peeked: bool = False  # the heads of the output are an output as well


def layer_model(layer: Layer) -> ir.Model:
    """Rows of the product for Q -> rows for the output product, in the nodes of an export."""
    rng = np.random.default_rng(0)
    model = empty_model()
    rows = add_input(model, "q", ["batch", "nodes", HEADS * DIM], "float32")
    caches = [add_input(model, n, ["batch", KV_HEADS, "rows", DIM], "float32") for n in ("k_cache", "v_cache")]
    positions, limits = (add_input(model, n, ["batch", "nodes"], "int64") for n in ("positions", "limits"))
    edit = Editor(model)
    value = edit.op("Transpose", edit.op("Reshape", rows, edit.ints([0, 0, HEADS, DIM])), perm=[0, 2, 1, 3])
    if layer.has_norm:
        value = edit.op("RMSNormalization", value, edit.const(np.ones(DIM, np.float32), "gamma"), axis=-1)
    if layer.rotary:
        half = (layer.rotary_dim or DIM) // 2
        tables = [edit.const(rng.normal(size=(ROWS, half)).astype(np.float32), n) for n in ("cos", "sin")]
        kinds = {"interleaved": layer.interleaved, "rotary_embedding_dim": layer.rotary_dim}
        value = edit.op("RotaryEmbedding", value, *tables, positions, **kinds)
    value.shape, value.type = ir.Shape(["batch", HEADS, "nodes", DIM]), rows.type
    attended = edit.op("CrossAttention", value, *caches, limits, domain=OPS_DOMAIN, scale=0.4)
    out = edit.op("Reshape", attended, edit.ints([0, 0, HEADS * DIM]))
    add_output(model, edit.op("Identity", out), "out", ["batch", "nodes", HEADS * DIM])
    if layer.is_peeked:
        add_output(model, edit.op("Identity", attended), "heads", ["batch", "nodes", HEADS, DIM])
    return model


@pytest.mark.parametrize("layer", [Layer(), Layer(rotary_dim=4), Layer(interleaved=1)], ids=str)
def test_fused_attention_keeps_the_function(layer):
    before, after = layer_model(layer), layer_model(layer)
    assert fuse_cross_attention(after) == 1
    run_pipeline(after, (remove_dead,))
    assert histogram_from_model(after) == {f"{OPS_DOMAIN}::RotaryCrossAttention": 1}
    for model in (before, after):
        attach_functions(model)
    rng = np.random.default_rng(1)
    for batch, nodes in ((1, 1), (3, 5)):
        feeds = {
            "q": rng.standard_normal((batch, nodes, HEADS * DIM)).astype(np.float32),
            "k_cache": rng.standard_normal((batch, KV_HEADS, ROWS, DIM)).astype(np.float32),
            "v_cache": rng.standard_normal((batch, KV_HEADS, ROWS, DIM)).astype(np.float32),
            "positions": rng.integers(0, ROWS, (batch, nodes)),
            "limits": rng.integers(1, ROWS + 1, (batch, nodes)),
        }
        for got, wanted in zip(run(after, feeds), run(before, feeds), strict=True):
            assert got.shape == wanted.shape
            assert np.abs(got - wanted).max() < TOLERANCE


@pytest.mark.parametrize("layer", [Layer(rotary=False), Layer(has_norm=True), Layer(is_peeked=True)], ids=str)
def test_other_attention_is_left_alone(layer):
    model = layer_model(layer)
    before = histogram_from_model(model)
    assert fuse_cross_attention(model) == 0
    assert histogram_from_model(model) == before
