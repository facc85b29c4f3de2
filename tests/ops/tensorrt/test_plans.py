# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX parses and builds the bodies, with dynamic batch and nodes, and no plugin is in the network."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from speccompile.errors import PassError
from speccompile.ops.registry import attach_functions
from tests.ops.tensorrt.lab import TYPES, Parsed, Shape, body_model

pytestmark = pytest.mark.plan

NODES = 8
Profile = dict[str, tuple[Shape, Shape, Shape]]


def _rows(*tail: int) -> tuple[Shape, Shape, Shape]:
    return (1, *tail), (2, *tail), (4, *tail)


def _nodes(*tail: int) -> tuple[Shape, Shape, Shape]:
    return (1, 1, *tail), (2, 4, *tail), (4, NODES, *tail)


WARP: Profile = {"temperature": _rows(), "top_k": _rows(), "top_p": _rows()}


@pytest.mark.parametrize(
    ("form", "low", "high", "dtype"),  # the dtype is that of the logits, which every form reads by the same Cast
    [("tokens", 1, 1, "bfloat16"), ("dists", 200, 200, "float16"), ("both", 1, 200, "float16")],
)
def test_verification_builds(form, low, high, dtype):
    pins = {"vocab": 200, **({"draft_vocab": high} if low == high else {})}
    model = body_model("SpecVerify", pins, max_nodes=NODES, dtypes={"logits": dtype})
    dists = ((1, 1, low), (2, 4, high), (4, NODES, high))
    nodes: Profile = {"logits": _nodes(200), "tokens": _nodes(), "parents": _nodes(), "uniforms": _nodes(2)}
    made = Parsed(model, {**nodes, **WARP, "draft_probs": dists})
    assert made.plan_bytes > 0
    assert not {k for k in made.kinds if "PLUGIN" in k or "LOOP" in k or "CONDITION" in k or k == "TOPK"}
    # The walk, unrolled for so many nodes, has no sum a node.
    assert made.kinds.count("REDUCE") == body_reduces("SpecVerify", form)


def body_reduces(name: str, form: str) -> int:
    """Reductions of the bodies for trees of two nodes."""
    pins = {"vocab": 200, **{"tokens": {"draft_vocab": 1}, "dists": {"draft_vocab": 200}, "both": {}}[form]}
    functions = {f.name: f for f in body_model(name, pins, max_nodes=2).functions}

    def count(body: str) -> int:
        called = [n for n in functions[body].node if n.domain == "speccompile"]
        own = sum(n.op_type.startswith("Reduce") for n in functions[body].node)
        return own + sum(count(n.op_type) for n in called)

    return count(name)


def test_sampling_builds():
    model = body_model("SampleToken", {"vocab": 4097}, dtypes={"logits": "float16"})
    made = Parsed(model, {"logits": _rows(1, 4097), "uniforms": _rows(), **WARP})
    assert made.plan_bytes > 0 and not {k for k in made.kinds if "PLUGIN" in k or k == "TOPK"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_compaction_builds_as_a_cache_update(dtype):
    pins = {"kv_heads": 2, "max_seq": 64, "head_dim": 16}
    model = body_model("KVRollback", pins, dtypes={"cache": dtype, "updated": dtype})
    made = Parsed(model, {"cache": _rows(2, 64, 16), "lengths": _rows(), "path": _nodes()})
    assert made.plan_bytes > 0
    assert [k for k in made.kinds if k in ("GATHER", "KV_CACHE_UPDATE") or "PLUGIN" in k] == [
        "GATHER",
        "KV_CACHE_UPDATE",
    ]


def _verify_node(vocab: int | str, num_inputs: int) -> ir.Model:
    shapes = {"logits": (1, 4, vocab), "draft_probs": (1, 4, "draft_vocab"), "uniforms": (1, 4, 2)}
    names = ["logits", "tokens", "parents", "draft_probs", "uniforms", "temperature", "top_k", "top_p", "d2t"]
    ints = {"tokens", "parents", "top_k", "d2t"}
    inputs = [
        helper.make_tensor_value_info(n, TYPES["int64" if n in ints else "float32"], shapes.get(n, (1,)))
        for n in names[:num_inputs]
    ]
    outputs = [helper.make_tensor_value_info(n, TYPES["int64"], None) for n in ("path", "num", "next")]
    node = helper.make_node("SpecVerify", names[:num_inputs], ["path", "num", "next"], domain="speccompile")
    return ir.from_proto(helper.make_model(helper.make_graph([node], "g", inputs, outputs), ir_version=11))


def test_what_has_no_body_is_refused():
    with pytest.raises(PassError, match=r"SpecVerify: got a vocabulary of unknown size; expected a static one\. Give"):
        attach_functions(_verify_node("vocab", 8), dialect="tensorrt")
    with pytest.raises(
        PassError, match=r"got 9 inputs; expected 8 inputs where there is no plugin.*Spread the draft distributions"
    ):
        attach_functions(_verify_node(97, 9), dialect="tensorrt")


def test_the_other_dialect_is_left_as_it_was():
    model = _verify_node(97, 8)
    assert attach_functions(model) > 0
    body = next(f for f in model.functions.values() if f.name == "SpecVerify")
    assert "If" in {n.op_type for n in body.all_nodes()}
    plain = _verify_node(97, 8)
    attach_functions(plain, dialect="tensorrt")
    kinds = {n.op_type for f in plain.functions.values() for n in f.all_nodes()}
    assert not kinds & {"If", "Loop", "TopK", "ScatterElements", "ArgMax"}
    for function in plain.functions.values():
        for node in function.all_nodes():
            held = [a.as_tensor() for a in node.attributes.values() if a.type == ir.AttributeType.TENSOR]
            assert not any(t.dtype == ir.DataType.DOUBLE for t in held)
    assert np.array_equal(*([sorted(str(k) for k in m.graph.opset_imports)] for m in (model, plain)))
