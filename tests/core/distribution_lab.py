# SPDX-License-Identifier: Apache-2.0
"""A tiny pair of language models whose joint distribution over several tokens is known exactly.

The next token depends on the last two, so a wrong row, a wrong residual or a reused draw shows up in the joint
distribution of the emitted tokens even where the first token alone would look right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.core.acceptance import accept
from speccompile.core.sampling import DRAFT_LANE, draw, tree_uniforms, uniforms, warp
from speccompile.core.tree import TokenTree, Verdict

if TYPE_CHECKING:
    import onnxruntime as ort

VOCAB = 5
NUM_TOKENS = 3
PROMPT = (0, 1)
CHAIN = (-1, 0, 1, 2)
TREE = (-1, 0, 0, 1, 1, 0, 2)  # the root has three children, the first of these two, the second one


@dataclass(frozen=True)
class Setting:
    temperature: float
    top_k: int
    top_p: float


SETTINGS = (
    Setting(1.0, 0, 1.0),
    Setting(0.5, 0, 1.0),
    Setting(1.5, 3, 1.0),
    Setting(0.8, 0, 0.8),
    Setting(1.3, 4, 0.9),
)


def spread(forms: Sequence[tuple[Any, ...]], settings: Sequence[Any], num: int) -> list[tuple[Any, ...]]:
    """Returns each form with `num` of the settings, and each setting with some form: not all pairs.

    For implementations whose outputs are compared with the twin's, which is tried in all pairs.
    """
    return [(*form, settings[(i * num + j) % len(settings)]) for i, form in enumerate(forms) for j in range(num)]


class FormTree(TokenTree):
    """Trees of one form in all slots: thousands of slots have the depths of the first one."""

    def depths(self) -> np.ndarray:
        """See `TokenTree.depths`."""
        first = TokenTree(self.tokens[:1], self.parents[:1], self.num_nodes[:1])
        return np.repeat(first.depths(), self.batch, axis=0)


Decide = Callable[[TokenTree, np.ndarray, np.ndarray, Setting], Verdict]


def tables(seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Returns (target logits, draft distribution), [VOCAB, VOCAB, VOCAB] each, by the last two tokens."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(VOCAB, VOCAB, VOCAB)).astype(np.float32) * np.float32(1.2)
    draft = 0.5 * target + 0.8 * rng.normal(size=target.shape)
    draft = np.exp(draft) / np.exp(draft).sum(axis=-1, keepdims=True)
    return target, draft.astype(np.float32)


def warped(logits: np.ndarray, setting: Setting) -> np.ndarray:
    batch = len(logits)
    return warp(
        logits,
        np.full(batch, setting.temperature, np.float32),
        np.full(batch, setting.top_k, np.int64),
        np.full(batch, setting.top_p, np.float32),
    )


def exact_joint(setting: Setting) -> np.ndarray:
    """Returns [VOCAB ** NUM_TOKENS] float64: the distribution of the tokens after PROMPT."""
    dists = warped(tables()[0], setting).astype(np.float64)
    dists /= dists.sum(axis=-1, keepdims=True)
    first = dists[PROMPT]
    second = dists[PROMPT[1]]  # [first, second]
    return (first[:, None, None] * second[:, :, None] * dists).reshape(-1)


def propose(
    form: tuple[int, ...],
    previous: np.ndarray,
    root: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
    sampled: bool,
) -> tuple[TokenTree, np.ndarray]:
    """Returns drafts for every slot, siblings as independent draws, and the context (two tokens) of each node."""
    batch, nodes = len(root), len(form)
    draft = tables()[1]
    contexts = np.zeros((batch, nodes, 2), np.int64)
    contexts[:, 0, 0], contexts[:, 0, 1] = previous, root
    dists = np.full((batch, nodes, VOCAB), 1 / VOCAB, np.float32)  # that of the root is not read
    depth = [0] * nodes
    for node in range(1, nodes):
        parent = form[node]
        depth[node] = depth[parent] + 1
        dist = dists[:, node] = draft[contexts[:, parent, 0], contexts[:, parent, 1]]
        drawn = uniforms(seeds, (positions + depth[node])[:, None], DRAFT_LANE + node)[:, 0]
        token = draw(dist, drawn) if sampled else dist.argmax(axis=-1)
        contexts[:, node, 0], contexts[:, node, 1] = contexts[:, parent, 1], token
    parents = np.broadcast_to(np.array(form), (batch, nodes)).copy()
    return FormTree.tree(contexts[:, :, 1].copy(), parents, draft_probs=dists if sampled else None), contexts


def decide_by_twin(tree: TokenTree, logits: np.ndarray, draws: np.ndarray, setting: Setting) -> Verdict:
    return accept(tree, warped(logits, setting), draws)


def decide_by_session(session: ort.InferenceSession) -> Decide:
    """Returns the decision of SpecVerify in a session, with the arguments of `decide_by_twin`."""

    def decide(tree: TokenTree, logits: np.ndarray, uniforms: np.ndarray, setting: Setting) -> Verdict:
        batch, nodes = tree.tokens.shape
        dists = np.zeros((batch, nodes, 1), np.float32) if tree.draft_probs is None else tree.draft_probs
        feeds = {
            "logits": logits,
            "tokens": tree.tokens,
            "parents": tree.parents,
            "draft_probs": dists,
            "uniforms": uniforms,
            "temperature": np.full(batch, setting.temperature, np.float32),
            "top_k": np.full(batch, setting.top_k, np.int64),
            "top_p": np.full(batch, setting.top_p, np.float32),
        }
        return Verdict(*session.run(None, feeds))

    return decide


def emit(
    form: tuple[int, ...], sampled: bool, setting: Setting, batch: int, decide: Decide, seed: int = 0
) -> np.ndarray:
    """Returns [batch, NUM_TOKENS] int64: what the draft-verify loop emits after PROMPT."""
    target = tables()[0]
    seeds = np.arange(batch, dtype=np.uint64)
    text = np.full((batch, NUM_TOKENS + len(form) + 2), -1, np.int64)
    text[:, :2] = PROMPT
    lengths = np.full(batch, 2)
    slots = np.arange(batch)
    while (todo := slots[lengths < 2 + NUM_TOKENS]).size:
        last = lengths[todo] - 1
        tree, contexts = propose(form, text[todo, last - 1], text[todo, last], seeds[todo], last, sampled)
        logits = target[contexts[..., 0], contexts[..., 1]]
        verdict = decide(tree, logits, tree_uniforms(seeds[todo], last, tree), setting)
        for i in range(1, tree.nodes):
            node = verdict.path[:, i]
            kept = node >= 0
            text[todo[kept], lengths[todo[kept]]] = tree.tokens[np.flatnonzero(kept), node[kept]]
            lengths[todo[kept]] += 1
        text[todo, lengths[todo]] = verdict.next_token
        lengths[todo] += 1
    return text[:, 2 : 2 + NUM_TOKENS]


def p_value(emitted: np.ndarray, joint: np.ndarray) -> float:
    """Returns chi-square's p of the emitted tokens under their joint distribution; 0 where one has no mass."""
    from scipy import stats

    cells = emitted @ VOCAB ** np.arange(NUM_TOKENS - 1, -1, -1)
    observed, expected = np.bincount(cells, minlength=len(joint)).astype(float), joint * len(emitted)
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue)
