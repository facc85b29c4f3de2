# SPDX-License-Identifier: Apache-2.0
"""Candidates of a draft with a part of the vocabulary are chosen before its logits are spread."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from speccompile.ops.registry import attach_functions
from speccompile.passes.cleanup import remove_dead
from speccompile.passes.spread_late import spread_late
from tests.passes.graphs import ops

UNKNOWN_LOGIT = -60000.0  # that of speccompile.export.draft_vocab, which imports torch
VOCAB, TOKENS = 11, np.array([1, 2, 5, 9])
NUM = len(TOKENS)
INDEX = np.full(VOCAB, NUM)
INDEX[TOKENS] = np.arange(NUM)


def draft(index: np.ndarray = INDEX, fill: float = UNKNOWN_LOGIT, num: int = 3) -> ir.Model:
    text = f"""<ir_version: 11, opset_import: ["": 24, "speccompile": 1]>
    draft (float[batch, nodes, {NUM}] logits, float[batch] temperature, int64[batch] top_k, float[batch] top_p)
        => (int64[batch, nodes, {num}] candidates, float[batch, nodes, {num}] probs, float[batch, nodes, d] dists)
        <float[1] fill = {{{fill}}}, int64[{VOCAB}] index = {{{", ".join(map(str, index))}}}> {{
        leading = Shape <end = 2> (logits)
        last = Shape <start = 0, end = 1> (fill)
        shape = Concat <axis = 0> (leading, last)
        nothing = Expand (fill, shape)
        padded = Concat <axis = 2> (logits, nothing)
        spread = Gather <axis = 2> (padded, index)
        candidates, probs = speccompile.TopTokens <num_candidates = {num}> (spread)
        dists = speccompile.NodeProbs (spread, temperature, top_k, top_p)
    }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    values = {value.name: value for node in model.graph for value in node.outputs}
    values["nothing"].shape, values["padded"].shape = ir.Shape(["b", "n", 1]), ir.Shape(["b", "n", NUM + 1])
    return model


def run(model: ir.Model, temperature: float) -> list[np.ndarray]:
    attach_functions(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    logits = np.random.default_rng(0).standard_normal((2, 3, NUM)).astype(np.float32)
    logits[0, 0] = 1  # a tie: the first token is the first candidate
    warp = {"temperature": np.array([0, temperature], np.float32), "top_p": np.ones(2, np.float32)}
    return session.run(None, {"logits": logits, "top_k": np.zeros(2, np.int64), **warp})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_candidates_and_distributions_are_the_same(temperature):
    model = draft()
    assert spread_late(model) == 2 and spread_late(model) == 0
    assert remove_dead(model) > 0 and ops(model)["Gather"] == 2
    (wanted, sure, dists), got = run(draft(), temperature), run(model, temperature)
    assert got[0].tolist() == wanted.tolist() and got[0][0, 0].tolist() == TOKENS[:3].tolist()
    np.testing.assert_allclose(got[1], sure, rtol=1e-6)  # float32 sums of one order or another
    assert got[2].shape == (2, 3, VOCAB if temperature else 1) and np.array_equal(got[2], dists)


@pytest.mark.parametrize(
    "model",
    [draft(index=INDEX[::-1]), draft(fill=-1.0), draft(index=np.arange(VOCAB) % NUM), draft(num=NUM + 1)],
    ids=["tokens in another order", "a likely fill", "a logit of several tokens", "more candidates than logits"],
)
def test_other_spreads_stay(model):
    assert spread_late(model) == 0
