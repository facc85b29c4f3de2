# SPDX-License-Identifier: Apache-2.0
"""Extreme calls of SpecVerify for the CPU kernels, beside the random ones of tests/ops/op_lab."""

import itertools

import numpy as np

from speccompile.core.sampling import warp
from speccompile.ops.spec_verify import spec_verify
from tests.ops.op_lab import Case, verify_case, zero_residual_case

KINDS = list(itertools.product(("greedy", "sampled", "mixed"), (True, False), (True, False)))
LAST_DRAW = np.float32(1 - 2**-24)


def one_warp_case(
    rng: np.random.Generator,
    vocab: int,
    batch: int,
    nodes: int,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Case:
    """Deterministic chains with random tokens; every slot is warped alike."""
    return {
        "logits": (rng.normal(size=(batch, nodes, vocab)) * 3).astype(np.float32),
        "tokens": rng.integers(0, vocab, (batch, nodes)),
        "parents": np.tile(np.arange(-1, nodes - 1), (batch, 1)),
        "draft_probs": np.zeros((batch, nodes, 1), np.float32),
        "uniforms": rng.random((batch, nodes, 2)).astype(np.float32),
        "temperature": np.full(batch, temperature, np.float32),
        "top_k": np.full(batch, top_k),
        "top_p": np.full(batch, top_p, np.float32),
    }


def distort(rng: np.random.Generator, logits: np.ndarray, kind: str) -> None:
    """Writes logits of a kind in place."""
    vocab = logits.shape[-1]
    if kind == "ties":
        logits[:] = np.round(logits / 3)
    elif kind == "equal":
        logits[:] = 0.7
    elif kind == "one token":
        logits[:] = -200
        np.put_along_axis(logits, rng.integers(0, vocab, (*logits.shape[:2], 1)), 200, axis=-1)
    elif kind == "masks":
        masked = rng.random(logits.shape) < 0.7
        masked[..., rng.integers(vocab)] = False
        logits[masked] = -np.inf


def _follow(case: Case) -> None:
    """Gives most nodes the token that is drawn at their parent, so that walks reach them."""
    for _ in range(case["tokens"].shape[1] - 1):
        path, num_accepted, drawn = spec_verify(**{**case, "draft_probs": case["draft_probs"][..., :1]})
        for slot, ends in enumerate(num_accepted):
            children = np.flatnonzero(case["parents"][slot] == path[slot, ends])
            if len(children) and slot % 4 != 3:
                case["tokens"][slot, children[-1]] = drawn[slot]


# Vocabulary, kind of logits, whether drafts have distributions; one token's is that of deterministic drafts.
WARP_CASES = [
    case
    for case in itertools.product((1, 7, 97, 1300), ("ties", "equal", "one token", "masks"), (False, True))
    if case[0] > 1 or not case[2]
]


def warp_case(vocab: int, kind: str, has_probs: bool) -> Case:
    """Returns a call whose slots have every temperature, top-k and top-p."""
    rng = np.random.default_rng(vocab)
    warps = list(itertools.product((0, 0.05, 1, 3), (0, 1, 2, vocab), (0.1, 1)))
    case = one_warp_case(rng, vocab, len(warps), 16 if vocab < 1000 else 5, temperature=1.0)
    case["temperature"], case["top_k"], case["top_p"] = (
        np.array(column, dtype)
        for column, dtype in zip(zip(*warps, strict=True), (np.float32, np.int64, np.float32), strict=True)
    )
    nodes = case["tokens"].shape[1]
    for slot in range(1, len(warps), 2):  # trees beside chains
        case["parents"][slot, 1:] = [rng.integers(max(0, node - 3), node) for node in range(1, nodes)]
    distort(rng, case["logits"], kind)
    ends = rng.choice([0, 1, 2], case["uniforms"].shape, p=[0.25, 0.25, 0.5])
    case["uniforms"][ends == 0], case["uniforms"][ends == 1] = 0, LAST_DRAW
    _follow(case)
    if has_probs:
        probs = warp(case["logits"], np.ones(len(warps)), np.zeros(len(warps), np.int64), np.ones(len(warps)))
        mixed = 0.5 * probs + 0.5 * rng.dirichlet(np.ones(vocab), probs.shape[:2])
        case["draft_probs"] = mixed.astype(np.float32)
    return case


def empty_residual_case() -> Case:
    """One-hot target and draft distributions, equal, with candidates outside both, and the greatest draws."""
    return {**zero_residual_case(has_probs=True), "uniforms": np.full((1, 3, 2), LAST_DRAW, np.float32)}


def grandchild_case(has_probs: bool) -> Case:
    """One greedy slot in which the token drawn at the root is that of a grandchild, and of no child."""
    case = verify_case(np.random.default_rng(0), 300, is_chain=True, has_probs=has_probs, heat="greedy")
    case = {n: a[:1, :1] if a.ndim > 1 else a[:1] for n, a in case.items()}
    case = {n: np.repeat(a, 3, axis=1) if a.ndim > 1 else a for n, a in case.items()}
    case["parents"], drawn = np.array([[-1, 0, 1]]), int(case["logits"][0, 0].argmax())
    case["tokens"] = np.array([[0, drawn + 1, drawn]])
    return case


def block_case(*parents: int) -> Case:
    """Drawn drafts about as likely as the target's own tokens: chains, or trees with the parents of 5 nodes."""
    rng = np.random.default_rng(8)
    case = one_warp_case(rng, 40, 96, 5, temperature=1.0)
    case["logits"] /= 2
    probs = warp(case["logits"], np.ones(96), np.zeros(96, np.int64), np.ones(96))
    case["parents"] = np.tile(parents, (96, 1)) if parents else case["parents"]
    above = case["parents"][0]
    dists = 0.5 * probs[:, above] + 0.5 * rng.dirichlet(np.ones(40), probs.shape[:2])[:, above]
    case["draft_probs"] = dists.astype(np.float32)
    case["tokens"] = (dists.cumsum(-1) > rng.random((96, 5, 1))).argmax(-1)
    return case


def late_draws_case(vocab: int = 256) -> Case:
    """The greatest draw from rows whose second half is masked; in some, float32 sums exceed the entries'."""
    case = one_warp_case(np.random.default_rng(5), vocab, 64, 2, temperature=1.0)
    case["logits"][..., vocab // 2 :], case["tokens"][:, 1] = -np.inf, vocab - 1  # the draft is refused
    case["uniforms"][:], case["draft_probs"] = LAST_DRAW, np.eye(vocab, dtype=np.float32)[np.full((64, 2), vocab - 1)]
    return case
