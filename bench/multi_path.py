#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens a step of exact rules on drawn trees: expectations over all draws of a rule, for trees that a bundle drafts.

    python bench/multi_path.py BUNDLE --prompts PROMPTS.jsonl [--limit 16] [--tokens 48] [--temperature 1]

BUNDLE has a drafter with its own model and tree shapes (`draft_model`, `eagle3`), `engine.logits: true`, room for the
nodes. Every step drafts; steps go on by the engine's own rule. For each shape trees are drafted with siblings without
replacement, for `by node` (today's rule) and `by block` (blocks over the same siblings), and with independent siblings,
for `multi-path`. The error is the standard error over steps.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import speccompile
from speccompile.certificate.decoding import make_sequences
from speccompile.core import registry
from speccompile.core.acceptance import Verdict
from speccompile.core.multi_path import choose_path
from speccompile.core.sampling import draw
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.specs import LOGITS
from speccompile.core.tree import TokenTree
from speccompile.drafting import static_tree
from speccompile.runtime.scheduler import decode
from speccompile.runtime.sequences import SequenceBatch
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.runtime.verifier import Verifier

SHAPES = ([1, 1, 1, 1], [3, 1, 1, 1], [2, 2, 2])
Row = NDArray[np.float64]
Children = dict[int, list[int]]


def by_node(node: int, tokens: list[int], children: Children, target: Row, draft: Row) -> float:
    """Returns how many drafts are kept after a node where siblings are tried one by one."""
    left, alive, kept = target[node], 1.0, 0.0
    for child in children[node]:
        taken = min(1.0, left[tokens[child]] / draft[child, tokens[child]])
        kept += alive * taken * (1 + by_node(child, tokens, children, target, draft))
        alive *= 1 - taken
        rest = np.maximum(left - draft[child], 0)
        left = rest / rest.sum() if rest.sum() > 0 else left
    return kept


def by_block(
    node: int, tokens: list[int], children: Children, target: Row, draft: Row, weight: float = 1
) -> tuple[float, float]:
    """Returns the probability that a node of this weight is kept, and the drafts kept after it.

    A node is decided after all its children, as a block's prefixes are from its end on; on a chain this is the block.
    """
    left, alive, kept = target[node], 1.0, 0.0
    for child in children[node]:
        own = min(1.0, weight * left[tokens[child]] / max(draft[child, tokens[child]], 1e-300))
        taken, after = by_block(child, tokens, children, target, draft, own)
        kept, alive = kept + alive * (taken + after), alive * (1 - taken)
        rest = np.maximum(weight * left - draft[child], 0)
        mass = rest.sum()
        weight, left = (1.0 if weight >= 1 else mass / (mass + 1 - weight)), rest / mass if mass > 0 else left
    return 1 - alive * (1 - weight), kept


def lengths(tree: TokenTree, logits: Row, temperature: float, is_independent: bool) -> dict[str, float]:
    """Returns the nodes that are scored, and the tokens a step by rule."""
    assert tree.draft_probs is not None
    scaled = logits.astype(np.float64) / temperature
    target = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    target /= target.sum(axis=-1, keepdims=True)
    draft, tokens, parents = tree.draft_probs[0].astype(np.float64), tree.tokens[0].tolist(), tree.parents[0].tolist()
    children = {node: tree.children(0, node) for node in range(len(tokens))}
    if not is_independent:
        arguments = (tokens, children, target, draft)
        scored = sum(parent >= 0 for parent in parents[1:])
        return {"nodes": scored, "by node": 1 + by_node(0, *arguments), "by block": 1 + by_block(0, *arguments)[1]}
    path, probs = choose_path(tree.tokens[0], tree.parents[0], target, draft)
    chain = {at: [at + 1] if at + 1 < len(path) else [] for at in range(len(path))}
    kept = by_block(0, [tokens[node] for node in path], chain, target[path], probs)[1]
    texts = {0: ()}
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            texts[node] = (*texts[parents[node]], tokens[node])
    return {"nodes": len(set(texts.values())) - 1, "multi-path": 1 + kept}


@contextmanager
def independent_siblings() -> Iterator[None]:
    """Draws siblings with replacement, with numbers of their own for every node."""
    rng = np.random.default_rng(0)

    def draw_siblings(probs: Any, draws: list[float], rows: Any) -> list[int]:
        rows[...] = probs
        return [int(draw(probs, rng.random())) for _ in draws]

    with patch.object(static_tree, "draw_siblings", draw_siblings):
        yield


def run(engine: SpecEngine, prompt: str, params: SamplingParams, widths: list[int], is_independent: bool) -> list[Any]:
    """Decodes a prompt; returns `lengths` of every step."""
    section = dict(engine.bundle.recipe.speculator)  # type: ignore[union-attr]
    method = registry.method(section.pop("method"))
    config = method.Config(**section | {"drafts": "sampled", "tree": {"widths": widths}})
    drafts = {job.name: made for job, made in zip(method.graph_jobs(config), engine.engines[1:], strict=True)}
    proposer, score, found = method.make_proposer(config, drafts, engine.context), Verifier.score_finite, []

    def spy(verifier: Verifier, tree: TokenTree, batch: SequenceBatch) -> tuple[TokenTree, Verdict]:
        made = score(verifier, tree, batch)
        if made[0].nodes > 1:
            logits = np.asarray(verifier.outputs[LOGITS])[0]
            found.append(lengths(made[0], logits, params.temperature, is_independent))
        return made

    waiting = make_sequences(engine, [engine.encode(prompt, 0, "prompt")], [params], "on")
    engine.reset(engine.context.max_seq_len)
    with patch.object(Verifier, "score_finite", spy):
        for _ in decode(engine.verifier, proposer, SequenceBatch(list(waiting), 1, False, len(widths)), engine.engines):
            pass
    return found


def main() -> None:
    """Parses the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    engine = speccompile.load(options.bundle)
    prompts = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()[: options.limit]]
    for widths in SHAPES:
        for is_independent in (False, True) if max(widths) > 1 else (False,):
            sums = defaultdict(list)
            for seed, prompt in enumerate(prompts):
                params = SamplingParams(
                    max_new_tokens=options.tokens, temperature=options.temperature, seed=seed, ignore_eos=True
                )
                with independent_siblings() if is_independent else nullcontext():
                    for step in run(engine, prompt, params, widths, is_independent):
                        for name, value in step.items():
                            sums[name].append(value)
            cells = (f"{name} {np.mean(of):.3f} +-{np.std(of) / len(of) ** 0.5:.3f}" for name, of in sums.items())
            print(f"widths {widths}, {len(sums['nodes'])} steps: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
