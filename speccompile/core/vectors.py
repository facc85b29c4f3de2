# SPDX-License-Identifier: Apache-2.0
"""Test vectors of the acceptance rules: what any engine that verifies drafts must decide, as JSON.

Vectors near a boundary are left out: noise of `NOISE` on probabilities and draws changes no verdict, so that float32
arithmetic of any order decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from speccompile.core.acceptance import accept_slot, decide
from speccompile.core.sampling import race
from speccompile.core.tree import Floats

FORMAT, NUM_VECTORS, VOCAB, NOISE = 2, 12, 7, 1e-4
CHAIN, TREE = (-1, 0, 1, 2), (-1, 0, 0, 1, 1, 2, 4)
FORMS = {"greedy": TREE, "race": TREE, "chain": CHAIN, "tree": TREE}
Vector = dict[str, Any]


def make_vectors(rules: Sequence[str] = tuple(FORMS)) -> dict[str, Any]:
    """Returns a JSON-ready document: `NUM_VECTORS` vectors of each rule, always the same ones."""
    vectors = list[Vector]()
    for rule in rules:
        seeds = (np.random.default_rng([list(FORMS).index(rule), number]) for number in range(1000))
        clear = (made for rng in seeds if (made := _make_vector(rule, rng)) is not None)
        vectors += [made for made, _ in zip(clear, range(NUM_VECTORS), strict=False)]
    return {"format": FORMAT, "vectors": vectors}


def _make_vector(rule: str, rng: np.random.Generator) -> Vector | None:
    parents = np.array(FORMS[rule])
    target, draft = rng.dirichlet(np.full(VOCAB, 0.5), size=(2, len(parents))).astype(np.float32)
    target = (0.5 * target + 0.5 * draft).astype(np.float32)
    tokens = np.zeros(len(parents), dtype=np.int64)
    draws = rng.integers(0, 2**24, (len(parents), 2)).astype(np.float32) * np.float32(2**-24)
    if rule == "greedy":
        target = np.eye(VOCAB, dtype=np.float32)[target.argmax(axis=-1)]
    for node in range(1, len(parents)):  # the distribution of a node's children is that of the first of them
        draft[node] = draft[np.flatnonzero(parents == parents[node])[0]]
        tokens[node] = int(rng.choice(VOCAB, p=draft[node].astype(np.float64) / draft[node].sum(dtype=np.float64)))
        if rule in ("greedy", "race") and rng.random() < 0.35:
            tokens[node] = int(race(target[parents[node]], draws[parents[node]]))
    draft[0] = 0
    given = None if rule in ("greedy", "race") else draft
    path, token = accept_slot(tokens, parents, target, draws, given)
    for _ in range(20):
        noisy = (target * (1 + NOISE * rng.standard_normal(target.shape))).astype(np.float32)
        moved = draws if given is None else np.clip(draws + NOISE * rng.standard_normal(draws.shape), 0, 1 - 2**-24)
        if accept_slot(tokens, parents, noisy, moved.astype(np.float32), given) != (path, token):
            return None
    own = None if given is None else draft[None]
    rest = decide(tokens[None], parents[None], lambda _, nodes: target[nodes], draws[None], own)[3]
    rest = target[path[-1:]] if rest is None else rest
    return {
        "rule": rule,
        "target_probs": _listed(target),
        "draft_probs": None if given is None else _listed(draft),
        "tokens": tokens.tolist(),
        "parents": parents.tolist(),
        "uniforms": _listed(draws),
        "path": path,
        "num_accepted": len(path) - 1,
        "next_token": token,
        "next_probs": _listed(rest / rest.sum())[0],
    }


def _listed(rows: Floats) -> list[list[float]]:
    return [[float(str(value)) for value in row] for row in rows]  # shortest decimals that give the float32 back
