# SPDX-License-Identifier: Apache-2.0

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from speccompile.core.sampling import warp
from speccompile.errors import PassError
from speccompile.ops.registry import attach_functions
from speccompile.ops.spec_verify import spec_verify
from speccompile.passes.expand_draft_probs import EXPAND_DRAFT_DISTS
from tests.ops.op_lab import is_at_boundary, same, session_of, verify_case

VOCAB, DRAFT_VOCAB = 40, 13
FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
NAMES = ["logits", "tokens", "parents", "draft_probs", "uniforms", "temperature", "top_k", "top_p"]
OUTPUTS = ["path", "num_accepted", "next_token"]


def _model(d2t: np.ndarray | None, width: int | str) -> ir.Model:
    dims = {
        "logits": ["batch", "nodes", VOCAB],
        "draft_probs": ["batch", "nodes", width],
        "uniforms": ["batch", "nodes", 2],
        "tokens": ["batch", "nodes"],
        "parents": ["batch", "nodes"],
    }
    ints = {"tokens", "parents", "top_k"}
    inputs = [helper.make_tensor_value_info(n, INT64 if n in ints else FLOAT, dims.get(n, ["batch"])) for n in NAMES]
    constants = [] if d2t is None else [numpy_helper.from_array(d2t, "d2t")]
    if d2t is None:
        inputs.append(helper.make_tensor_value_info("d2t", INT64, [DRAFT_VOCAB]))
    outputs = [
        helper.make_tensor_value_info(n, INT64, ["batch", "nodes"] if n == "path" else ["batch"]) for n in OUTPUTS
    ]
    node = helper.make_node("SpecVerify", [*NAMES, "d2t"], OUTPUTS, domain="speccompile")
    graph = helper.make_graph([node], "verify", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("speccompile", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=11))


def _case(rng: np.random.Generator, d2t: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Feeds over the draft's vocabulary, and the same over the target's."""
    case = verify_case(rng, VOCAB, is_chain=False, has_probs=False, heat="sampled")
    batch, nodes = case["tokens"].shape
    narrow = rng.dirichlet(np.full(DRAFT_VOCAB, 0.5), size=(batch, nodes)).astype(np.float32)
    wide = np.zeros((batch, nodes, VOCAB), np.float32)
    wide[:, :, d2t] = narrow
    drawn = (narrow.cumsum(-1) < rng.random((batch, nodes, 1))).sum(-1).clip(0, DRAFT_VOCAB - 1)
    case["tokens"] = np.where(case["parents"] >= 0, d2t[drawn], case["tokens"])
    return {**case, "draft_probs": narrow}, {**case, "draft_probs": wide}


@pytest.mark.parametrize("dialect", ["onnx", "tensorrt"])
def test_dists_are_read_over_the_targets_vocabulary(dialect):
    rng = np.random.default_rng(0)
    d2t = rng.permutation(VOCAB)[:DRAFT_VOCAB]
    model = _model(d2t, DRAFT_VOCAB)
    assert EXPAND_DRAFT_DISTS.run(model) == 1
    attach_functions(model, dialect=dialect)  # type: ignore[arg-type]
    session = session_of(ir.to_proto(model))
    num_accepted = num_differing = 0
    for _ in range(60):
        narrow, wide = _case(rng, d2t)
        expected = spec_verify(**wide)
        if not same(session.run(None, narrow), expected):
            assert is_at_boundary(wide)
            num_differing += 1
        num_accepted += int(expected[1].sum())
    assert num_accepted > 30 and num_differing <= 1


def test_a_wrong_map_is_noticed():
    rng = np.random.default_rng(1)
    d2t = rng.permutation(VOCAB)[:DRAFT_VOCAB]
    model = _model(np.roll(d2t, 1), DRAFT_VOCAB)
    EXPAND_DRAFT_DISTS.run(model)
    attach_functions(model, dialect="tensorrt")
    session = session_of(ir.to_proto(model))
    cases = [_case(rng, d2t) for _ in range(20)]
    assert not all(same(session.run(None, narrow), spec_verify(**wide)) for narrow, wide in cases)


def test_deterministic_drafts_need_no_map():
    model = _model(np.arange(DRAFT_VOCAB), 1)
    assert EXPAND_DRAFT_DISTS.run(model) == 1
    attach_functions(model, dialect="tensorrt")
    session = session_of(ir.to_proto(model))
    case = verify_case(np.random.default_rng(2), VOCAB, is_chain=True, has_probs=False, heat="greedy")
    assert same(session.run(None, case), spec_verify(**case))
    assert (warp(case["logits"], case["temperature"], case["top_k"], case["top_p"]).sum(-1) > 0.99).all()


def test_it_does_not_fire_without_a_map():
    model = _model(np.arange(DRAFT_VOCAB), DRAFT_VOCAB)
    EXPAND_DRAFT_DISTS.run(model)
    before = [n.op_type for n in model.graph]
    assert EXPAND_DRAFT_DISTS.run(model) == 0
    assert [n.op_type for n in model.graph] == before


def test_what_is_known_at_run_time_only_is_refused():
    with pytest.raises(PassError, match=r"got draft_vocab known at run time only; expected known at build\. Pin"):
        EXPAND_DRAFT_DISTS.run(_model(np.arange(DRAFT_VOCAB), "draft_vocab"))
    with pytest.raises(PassError, match="got d2t known at run time only"):
        EXPAND_DRAFT_DISTS.run(_model(None, DRAFT_VOCAB))
