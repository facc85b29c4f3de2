# SPDX-License-Identifier: Apache-2.0
"""Calls of the kernels of verification and of drafts' tails for the self-test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.ops.candidates import NODE_PROBS_OP, TOP_TOKENS
from speccompile.ops.finite_token import FINITE_TOKEN
from speccompile.ops.kv_rollback import KV_ROLLBACK
from speccompile.ops.op import Op
from speccompile.ops.sample_token import SAMPLE_TOKEN
from speccompile.ops.spec_verify import SPEC_VERIFY

Arrays = dict[str, NDArray[Any]]
_PARENTS = (-1, 0, 0, 1, 2, 4)
_VOCAB = 1300  # several chunks of 256, and a part of one


def _values(rng: np.random.Generator) -> Arrays:
    """Returns all inputs but `draft_probs`, for slots that are greedy, sampled, and cut by top-k and top-p."""
    batch, nodes = 5, len(_PARENTS)
    logits = (rng.standard_normal((batch, nodes, _VOCAB)) * 2).astype(np.float32)
    return {
        "logits": logits,
        "tokens": np.tile(logits.argmax(axis=-1)[:, :1], (1, nodes)),
        "parents": np.tile(_PARENTS, (batch, 1)),
        "uniforms": rng.random((batch, nodes, 2)).astype(np.float32),
        "temperature": np.array([0, 1, 0.7, 1.3, 0.9], np.float32),
        "top_k": np.array([0, 0, 30, 0, 400]),
        "top_p": np.array([1, 1, 1, 0.8, 0.5], np.float32),
        "next_token": np.arange(batch),
        "cache": rng.standard_normal((batch, 2, 20, 6)).astype(np.float32),
        "lengths": np.array([0, 3, 5, 9, 14]),
        "path": np.tile([0, 2, 4, 5, -1, -1], (batch, 1)),
    }


def tail_cases() -> Iterator[tuple[Op, Arrays, dict[str, int | float]]]:
    """Yields calls of every kernel: the op, its inputs by name, its attributes.

    Draws and top-p are so far from the next token that rounding does not change an integer.
    """
    rng = np.random.default_rng(3)
    given = _values(rng)
    logits, num_tokens = given["logits"], given["logits"].shape[-1]
    spoilt = logits.copy()
    spoilt[1, 2, 7], spoilt[2, 0, -1], spoilt[3, 1, 5] = np.nan, np.inf, -np.inf
    drafts = rng.dirichlet(np.ones(num_tokens), logits.shape[:2]).astype(np.float32)
    one = {"logits": logits[:, :1], "uniforms": given["uniforms"][:, 0, 0]}
    greedy = {"temperature": np.zeros_like(given["temperature"])}
    changes: list[tuple[Op, Arrays]] = [
        (SPEC_VERIFY, {"draft_probs": np.zeros((*logits.shape[:2], 1), np.float32)}),
        (SPEC_VERIFY, {"draft_probs": drafts}),
        (FINITE_TOKEN, {"logits": spoilt}),
        (SAMPLE_TOKEN, one),
        (SAMPLE_TOKEN, one | greedy),
        (TOP_TOKENS, {"logits": np.round(logits)}),  # ties
        (NODE_PROBS_OP, {}),
        (NODE_PROBS_OP, greedy),
        (KV_ROLLBACK, {}),
    ]
    for op, changed in changes:
        values = given | changed
        yield op, {t.name: np.ascontiguousarray(values[t.name]) for t in op.inputs}, dict(op.attributes)


def integers_differ(mine: NDArray[Any], theirs: NDArray[Any]) -> bool:
    return mine.dtype == np.int64 and not np.array_equal(mine, theirs)
