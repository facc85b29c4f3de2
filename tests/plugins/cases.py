# SPDX-License-Identifier: Apache-2.0
"""Calls of SpecVerify for the kernels' tests, beside the random ones of tests/ops/op_lab."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from speccompile.core.acceptance import accept
from speccompile.core.sampling import warp
from speccompile.core.tree import TokenTree
from speccompile.ops.spec_verify import spec_verify
from tests.ops.op_lab import Case, is_at_boundary, same
from tests.plugins.host_lab import NUMPY_DTYPES

CHAIN, TREE = (-1, 0, 1, 2), (-1, 0, 0, 1, 1, 0, 2)
Run = Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]


def in_dtype(case: Case, dtype: str) -> Case:
    """The case with logits that `dtype` holds exactly, still as float32 (the twin's type)."""
    return {**case, "logits": case["logits"].astype(NUMPY_DTYPES[dtype]).astype(np.float32)}


def as_dtype(case: Case, dtype: str) -> Case:
    return {**case, "logits": case["logits"].astype(NUMPY_DTYPES[dtype])}


def wide_case(
    rng: np.random.Generator, vocab: int, batch: int, form: Sequence[int], *, spread: float, dtype: str, **fields: float
) -> Case:
    """Deterministic drafts over a large vocabulary; about half of the slots have their whole first path accepted."""
    nodes = len(form)
    case = {
        "logits": (rng.normal(size=(batch, nodes, vocab)) * spread).astype(np.float32),
        "tokens": rng.integers(0, vocab, (batch, nodes)),
        "parents": np.broadcast_to(np.array(form), (batch, nodes)).copy(),
        "draft_probs": np.zeros((batch, nodes, 1), np.float32),
        "uniforms": rng.random((batch, nodes, 2)).astype(np.float32),
        "temperature": np.full(batch, fields.get("temperature", 1.0), np.float32),
        "top_k": np.full(batch, int(fields.get("top_k", 0))),
        "top_p": np.full(batch, fields.get("top_p", 1.0), np.float32),
    }
    case = in_dtype(case, dtype)
    lucky = rng.random(batch) < 0.5
    dists = warp(case["logits"], case["temperature"], case["top_k"], case["top_p"])
    tree = TokenTree(case["tokens"], case["parents"], np.full(batch, nodes), case["draft_probs"])
    for _ in range(nodes):  # one more node of each path gets the token that is drawn at its parent
        verdict = accept(tree, dists, case["uniforms"])
        for slot in np.flatnonzero(lucky):
            end = verdict.path[slot, verdict.num_accepted[slot]]
            children = [n for n in range(nodes) if form[n] == end]
            if children:
                tree.tokens[slot, children[0]] = verdict.next_token[slot]
    return case


def is_possible(case: Case, verdict: Sequence[np.ndarray]) -> bool:
    """Whether the target's distribution has every token of the verdict, at the node where it was kept or drawn."""
    dists = warp(case["logits"], case["temperature"], case["top_k"], case["top_p"])
    for slot, (path, num_accepted, next_token) in enumerate(zip(*verdict, strict=True)):
        nodes = path[: num_accepted + 1]
        tokens = [*case["tokens"][slot, nodes[1:]], next_token]
        if not (dists[slot, nodes, tokens] > 0).all():
            return False
    return True


def assert_same(run: Run, case: Case, **also: np.ndarray) -> bool:
    """The verdicts of `run` are the twin's; True when they differ at a boundary of a draw or of top_p."""
    got, expected = run(case), spec_verify(**case, **also)
    assert [(a.dtype, a.shape) for a in got] == [(a.dtype, a.shape) for a in expected]
    if same(got, expected):
        return False
    for name, one, other in zip(("path", "num_accepted", "next_token"), got, expected, strict=True):
        if not np.array_equal(one, other):
            index = tuple(int(i) for i in np.argwhere(one != other)[0])
            is_excused = is_at_boundary(case) and is_possible(case, got)
            assert is_excused, f"{name}{list(index)}: {one[index]}, expected {other[index]}"
    return True
