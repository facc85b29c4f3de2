# SPDX-License-Identifier: Apache-2.0
"""One-node models of the ops, on every executor; random cases for verification."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from speccompile.core.sampling import draw, warp
from speccompile.ops.op import DOMAIN, OPSET, VERSION, Op
from speccompile.ops.registry import OPS, functions
from speccompile.ops.spec_verify import spec_verify

MARGIN = 1e-6  # a uniform draw or top_p this close to a decision boundary may fall on either side of it

_TYPES = {"float32": TensorProto.FLOAT, "int8": TensorProto.INT8, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}
Case = dict[str, np.ndarray]


def mutated(model: onnx.ModelProto, op: Op, right: str, wrong: str, vocab: int | None = None) -> onnx.ModelProto:
    """A copy of the model in which the body of one op says `wrong` in the place of `right`."""
    body = op.body if vocab is None or op.sized_body is None else op.sized_body(vocab)
    assert body.count(right) == 1
    made = onnx.ModelProto()
    made.CopyFrom(model)
    (function,) = (f for f in made.functions if f.name == op.name)
    function.CopyFrom(replace(op, body=body.replace(right, wrong), sized_body=None).function())
    return made


def model_of(name: str, pins: Mapping[str, int] | None = None, **attributes: Any) -> onnx.ModelProto:
    """A model of one node of the op, with its body attached; `pins` makes named dims static."""
    op, pins = OPS[name], pins or {}

    def values(tensors: Iterable[Any]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(t.name, _TYPES[t.dtype], [pins.get(d, d) for d in t.dims]) for t in tensors
        ]

    node = helper.make_node(
        name,
        [t.name for t in op.inputs],
        [t.name for t in op.outputs],
        domain=DOMAIN,
        **{**op.attributes, **attributes},
    )
    model = helper.make_model(
        helper.make_graph([node], name, values(op.inputs), values(op.outputs)),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        functions=functions([name], pins.get("vocab")),
        ir_version=11,
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def _parents(rng: np.random.Generator, batch: int, nodes: int, is_chain: bool) -> np.ndarray:
    """Ragged; in a tree, later siblings may have children before earlier ones do."""
    parents = np.full((batch, nodes), -1, np.int64)
    for slot in range(batch):
        for node in range(1, rng.integers(1, nodes + 1)):
            parents[slot, node] = node - 1 if is_chain else rng.integers(max(0, node - 4), node)
    return parents


def _sibling_dists(rng: np.random.Generator, tokens: np.ndarray, parents: np.ndarray, probs: np.ndarray) -> np.ndarray:
    """Draft distributions of siblings that are far from, near to or equal to the target's; or one-hot ones of each."""
    dists = np.zeros_like(probs)
    vocab = probs.shape[-1]
    for slot, node in np.ndindex(tokens.shape):
        target, elder = probs[slot, max(parents[slot, node], 0)], np.flatnonzero(parents[slot] == parents[slot, node])
        kind = rng.integers(4)
        if kind == 2 and not target[tokens[slot, elder]].all():
            kind = 3  # a refusal under equal distributions would leave rounding noise as residual
        dist = rng.dirichlet(np.full(vocab, 0.5)) if kind < 2 else target.astype(np.float64)
        if kind == 1:
            dist = 0.9 * target + 0.1 * dist
        if elder[0] == node:
            dists[slot, elder] = np.eye(vocab)[tokens[slot, elder]] if kind == 3 else dist
    return dists


def zero_residual_case(has_probs: bool) -> Case:
    """A call of SpecVerify: a one-hot target and a draft distribution equal to it, with a draft outside both."""
    logits = np.full((1, 3, 5), -50, np.float32)
    logits[0, :, 2] = 50
    return {
        "logits": logits,
        "tokens": np.array([[0, 1, 3]]),
        "parents": np.array([[-1, 0, 0]]),
        "draft_probs": np.eye(5, dtype=np.float32)[[[2, 2, 2]]] if has_probs else np.zeros((1, 3, 1), np.float32),
        "uniforms": np.full((1, 3, 2), 0.999999, np.float32),
        "temperature": np.array([1.0], np.float32),
        "top_k": np.array([1]),
        "top_p": np.array([1.0], np.float32),
    }


def verify_case(rng: np.random.Generator, vocab: int, *, is_chain: bool, has_probs: bool, heat: str) -> Case:
    """A random call of SpecVerify; `heat` is greedy, sampled or mixed."""
    batch, nodes = int(rng.integers(1, 9)), int(rng.integers(1, 10))
    logits = rng.normal(size=(batch, nodes, vocab)) * rng.choice([0.3, 3.0])
    if rng.random() < 0.3:
        logits = np.round(logits)  # ties at the maximum, at top_k and at top_p
    logits = logits.astype(np.float32)
    hot = {"greedy": np.zeros(batch), "sampled": np.ones(batch), "mixed": rng.integers(0, 2, batch)}[heat]
    temperature = (hot * rng.uniform(0.4, 1.6, batch)).astype(np.float32)
    top_k = (rng.integers(0, 2, batch) * rng.integers(1, vocab + 3, batch)).astype(np.int64)
    top_p = np.where(rng.random(batch) < 0.5, 1, rng.uniform(0.05, 1, batch)).astype(np.float32)
    parents = _parents(rng, batch, nodes, is_chain)
    probs = warp(logits, temperature, top_k, top_p)
    best = np.take_along_axis(logits.argmax(-1), np.maximum(parents, 0), axis=1)
    tokens = np.where(rng.random((batch, nodes)) < 0.6, best, rng.integers(0, vocab, (batch, nodes)))
    draft_probs = np.zeros((batch, nodes, 1), np.float32)
    if has_probs:
        draft_probs = _sibling_dists(rng, tokens, parents, probs)
    tokens[parents < 0] = rng.choice([0, -1, vocab, 10**6])  # roots and padding have arbitrary values
    uniforms = rng.random((batch, nodes, 2)).astype(np.float32)
    return {
        "logits": logits,
        "tokens": tokens,
        "parents": parents,
        "draft_probs": draft_probs,
        "uniforms": uniforms,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }


def is_at_boundary(case: Case) -> bool:
    """True when a shift of the draws (of the temperature, for a race), or of top_p, by MARGIN changes the verdict."""
    here = spec_verify(**case)
    shifted = []
    for sign in (-1, 1):
        is_drawn = (case["parents"][:, 1:] >= 0).any(axis=1) & (case["draft_probs"].shape[-1] > 1)
        draws = np.clip(case["uniforms"].astype(np.float64) + sign * MARGIN, 0, 1 - 2**-24).astype(np.float32)
        draws = np.where(is_drawn[:, None, None], draws, case["uniforms"])
        heat = (case["temperature"] * np.where(is_drawn, 1, 1 + sign * MARGIN)).astype(np.float32)
        shifted.append({**case, "uniforms": draws, "temperature": heat})
        masses = np.where(case["top_p"] < 1, np.clip(case["top_p"] + sign * MARGIN, 1e-6, 1), 1).astype(np.float32)
        shifted.append({**case, "top_p": masses})
    return any(not same(spec_verify(**other), here) for other in shifted)


def same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def check_unread_parent(session):
    """A prefill leaves a number of any size as the parent of its root, which no walk reads."""
    case = verify_case(np.random.default_rng(3), 97, is_chain=True, has_probs=False, heat="greedy")
    case = {n: a[:, :1] if a.ndim > 1 else a for n, a in case.items()}
    case["parents"] = np.full_like(case["parents"], 510)
    path, num_accepted, next_token = session.run(None, case)
    assert (path == 0).all() and (num_accepted == 0).all()
    np.testing.assert_array_equal(next_token, case["logits"][:, 0].argmax(-1))


def draw_case(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns distributions [4, 5, vocab], the first of each row on one token, and draws, the ends among them."""
    rng = np.random.default_rng(vocab)
    probs = rng.dirichlet(np.full(vocab, 0.2), size=(4, 5)).astype(np.float32)
    probs[:, 0] = 0
    probs[:, 0, vocab // 2] = 1
    uniforms = rng.random((4, 5)).astype(np.float32)
    uniforms[0], uniforms[1] = 0, 1 - 2**-24
    return probs, uniforms


def check_drawn(drawn: np.ndarray, probs: np.ndarray, uniforms: np.ndarray, edge: float) -> float:
    """Tokens have mass, and are those of a draw within `edge`; returns the share of those of the very draw."""
    near = [draw(probs, np.clip(uniforms.astype(np.float64) + e, 0, 1 - 2**-53)) for e in (-edge, 0, edge)]
    np.testing.assert_array_equal(drawn[:, 0], probs.shape[-1] // 2)
    assert (np.take_along_axis(probs, drawn[..., None], axis=-1) > 0).all()
    assert ((drawn >= near[0]) & (drawn <= near[2])).all()
    return float((drawn == near[1]).mean())
