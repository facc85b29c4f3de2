# SPDX-License-Identifier: Apache-2.0
"""Random calls of the QkvAttention ops, and their definition row by row in float64."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from speccompile.ops.op import Op
from speccompile.ops.qkv_attention import QKV_ATTENTION


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call."""

    batch: int = 2
    nodes: int = 3
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 8
    max_seq: int = 20
    rotary_dim: int = 0  # 0: the whole head

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group


@dataclass
class Call:
    """Inputs by name in order, and all attributes."""

    op: Op
    inputs: dict[str, np.ndarray]
    attributes: dict[str, Any] = field(default_factory=dict)

    def twin(self) -> tuple[np.ndarray, ...]:
        return self.op.twin(*self.inputs.values(), **self.attributes)


def tree_mask(rng: np.random.Generator, batch: int, nodes: int, *, is_chain: bool = False) -> np.ndarray:
    """Node and ancestors of random trees, [batch, nodes, nodes] bool; parents come before their children."""
    mask = np.zeros((batch, nodes, nodes), bool)
    for slot, node in np.ndindex(batch, nodes):
        if node:
            mask[slot, node] = mask[slot, node - 1 if is_chain else rng.integers(0, node)]
        mask[slot, node, node] = True
    return mask


def random_call(
    rng: np.random.Generator,
    sizes: Sizes,
    *,
    norm: bool = False,
    rotary: bool = False,
    lengths: np.ndarray | None = None,
    is_chain: bool = False,
    has_image: bool = False,
    **attributes: Any,
) -> Call:
    """A call of one of the four ops with scores of order 1; `attributes` replace the defaults.

    With `has_image` the nodes are a chain, of which all but the first and the last see each other both ways.
    """
    op = QKV_ATTENTION[norm, rotary]

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    cache = (sizes.batch, sizes.kv_heads, sizes.max_seq, sizes.head_dim)
    inputs = {"qkv": normal(sizes.batch, sizes.nodes, (sizes.num_heads + 2 * sizes.kv_heads) * sizes.head_dim)}
    if norm:
        inputs |= {name: 1 + normal(sizes.head_dim) / 4 for name in ("q_gamma", "k_gamma")}
    if rotary:
        angles = normal(sizes.max_seq, (sizes.rotary_dim or sizes.head_dim) // 2)
        inputs |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    inputs |= {"k_cache": normal(*cache), "v_cache": normal(*cache)}
    if lengths is None:
        lengths = rng.integers(0, sizes.max_seq - sizes.nodes + 1, sizes.batch)
    inputs |= {
        "lengths": lengths,
        "tree_mask": tree_mask(rng, sizes.batch, sizes.nodes, is_chain=is_chain or has_image),
    }
    if has_image:
        inputs["tree_mask"][:, 1:-1, 1:-1] = True
    inputs["num_rows"] = np.array([sizes.max_seq])
    given = {
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "scale": sizes.head_dim**-0.5,
        **({"rotary_dim": sizes.rotary_dim} if rotary else {}),
        **attributes,
    }
    return Call(op, inputs, {**op.attributes, **given})


def naive(call: Call, dtype: type[np.floating[Any]] = np.float64) -> np.ndarray:
    """The output [batch, nodes, num_heads * head_dim] in one dtype, key by key from the definition."""
    given = {name: np.asarray(value, dtype) for name, value in call.inputs.items()}
    kinds, dim = call.attributes, call.attributes["head_dim"]
    num_heads, kv_heads, window = kinds["num_heads"], kinds["num_kv_heads"], kinds["window"]
    lengths, mask = call.inputs["lengths"], call.inputs["tree_mask"]
    positions = lengths[:, None] + np.tril(mask).sum(-1) - 1
    batch, nodes, _ = mask.shape
    heads = given["qkv"].reshape(batch, nodes, -1, dim)

    def prepared(row: np.ndarray, kind: str, position: int) -> np.ndarray:
        if f"{kind}_gamma" in given:
            row = row / np.sqrt((row**2).mean() + dtype(kinds["epsilon"])) * given[f"{kind}_gamma"]
        if "cos" not in given:
            return row
        half = given["cos"].shape[1]
        turned = row.copy()
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if kinds["interleaved"] else (i, i + half)
            c, s = given["cos"][position, i], given["sin"][position, i]
            turned[a], turned[b] = row[a] * c - row[b] * s, row[b] * c + row[a] * s
        return turned

    out = np.zeros((batch, nodes, num_heads, dim), dtype)
    for b, n, h in np.ndindex(batch, nodes, num_heads):
        kv = h * kv_heads // num_heads
        keys = [(given["k_cache"][b, kv, r], given["v_cache"][b, kv, r], r) for r in range(lengths[b])]
        for i in np.flatnonzero(mask[b, n]):
            k, v = heads[b, i, num_heads + kv], heads[b, i, num_heads + kv_heads + kv]
            keys.append((prepared(k, "k", positions[b, i]), v, positions[b, i]))
        keys = [key for key in keys if window == 0 or positions[b, n] - key[2] < window]
        query = prepared(heads[b, n, h], "q", positions[b, n])
        scores = np.array([query @ key[0] for key in keys]) * dtype(kinds["scale"])
        softcap = dtype(kinds["softcap"])
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores - scores.max())
        out[b, n, h] = weights @ np.array([key[1] for key in keys]) / weights.sum()
    return out.reshape(batch, nodes, -1)


def naive_cross(
    inputs: Mapping[str, np.ndarray], attributes: Mapping[str, Any], dtype: type[np.floating[Any]] = np.float64
) -> np.ndarray:
    """The output of RotaryCrossAttention in one dtype, query by query from the definition."""
    given = {name: np.asarray(value, dtype) for name, value in inputs.items() if value.dtype == np.float32}
    heads, dim, scale = attributes["num_heads"], attributes["head_dim"], dtype(attributes["scale"])
    half, batch, nodes = given["cos"].shape[1], *given["q"].shape[:2]
    q, out = given["q"].reshape(batch, nodes, heads, dim), np.zeros((batch, nodes, heads, dim), dtype)
    for b, n, h in np.ndindex(batch, nodes, heads):
        position, limit = inputs["positions"][b, n], inputs["limits"][b, n]
        query = q[b, n, h].copy()
        for i in range(half):
            x, y = (2 * i, 2 * i + 1) if attributes["interleaved"] else (i, i + half)
            c, s = given["cos"][position, i], given["sin"][position, i]
            query[x], query[y] = q[b, n, h, x] * c - q[b, n, h, y] * s, q[b, n, h, y] * c + q[b, n, h, x] * s
        kv = h * given["k_cache"].shape[1] // heads
        scores = given["k_cache"][b, kv, :limit] @ query * scale
        weights = np.exp(scores - scores.max())
        out[b, n, h] = weights @ given["v_cache"][b, kv, :limit] / weights.sum()
    return out.reshape(batch, nodes, -1)
