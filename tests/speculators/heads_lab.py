# SPDX-License-Identifier: Apache-2.0
"""Graphs of heads on every backend that runs here, and trees drafted step by step to compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from speccompile.core import registry, specs
from speccompile.core.heads_specs import DraftForm
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.specs import ModelDims

BACKENDS = ("onnxruntime", "reference")
Logits = Callable[[np.ndarray, list[int]], np.ndarray]  # of a state and the tokens from the root on


def target_dims(hidden: int, vocab: int) -> ModelDims:
    return ModelDims("llama", vocab, hidden, 2, 4, 2, 8, 64)


def context(hidden: int, vocab: int, weights: str = "checkpoint", target: str = "") -> SourceContext:
    job = GraphJob("target", target) if target else None
    return SourceContext(weights, 64, 16, target_dims(hidden, vocab), job)


def engines(source: Any, folder: Any) -> Iterator[Any]:
    """The graph of a source on each backend."""
    model, _ = source.export(lambda stage: None)
    for name in BACKENDS:
        maker = registry.backend(name)
        maker.compile(model, source.spec(), folder / name)
        yield maker.load(folder / name / "graph.onnx", source.spec(), max_slots=4, max_rows=0, tuning={"threads": 1})


def feeds(hidden: int, vocab: int, batch: int = 3, nodes: int = 4, seed: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        specs.HIDDEN: rng.normal(size=(batch, nodes, hidden)).astype(np.float32),
        specs.START_NODES: rng.integers(0, nodes, batch),
        specs.TOKENS: rng.integers(0, vocab, (batch, 1)),
    }


def starts(given: dict[str, np.ndarray]) -> np.ndarray:
    """[batch, hidden] float64: the states that are drafted from."""
    rows = given[specs.HIDDEN][np.arange(len(given[specs.START_NODES])), given[specs.START_NODES]]
    return rows.astype(np.float64)


def likeliest(logits: np.ndarray, num: int) -> tuple[list[int], list[float]]:
    plain = np.exp(logits - logits.max())
    best = np.argsort(-plain, kind="stable")[:num]
    return best.tolist(), (plain[best] / plain.sum()).tolist()


def tree_by_steps(form: DraftForm, logits: Logits, state: np.ndarray, root: int) -> tuple[list, list, list]:
    """(tokens, probabilities, parents) of a form's drafts: every path goes through `logits` as a whole."""
    if form.choices:
        made = {(): ([root], 1.0)}
        for path in form.choices:
            above = made[path[:-1]][0]
            best, probs = likeliest(logits(state, above), path[-1] + 1)
            made[path] = ([*above, best[-1]], probs[-1])
        rows = [made[path] for path in form.choices]
        number = {path: i for i, path in enumerate(((), *form.choices))}
        return [r[0][-1] for r in rows], [r[1] for r in rows], [number[path[:-1]] for path in form.choices]
    level, drafts = [([root], 1.0, 0)], []
    for _ in range(form.depth):
        fresh = []
        for above, path, parent in level:
            for token, prob in zip(*likeliest(logits(state, above), form.num_guesses), strict=True):
                drafts.append((token, prob, parent))
                fresh.append(([*above, token], path * prob, len(drafts)))
        level = sorted(fresh, key=lambda row: -row[1])[: form.width]
    return tuple(list(column) for column in zip(*drafts, strict=True))


def check_tree(engine: Any, form: DraftForm, logits: Logits, given: dict[str, np.ndarray]) -> None:
    """The engine drafts the same tree as steps of `logits` do."""
    outputs, states = engine.run(given), starts(given)
    for slot, root in enumerate(given[specs.TOKENS][:, 0].tolist()):
        tokens, probs, parents = tree_by_steps(form, logits, states[slot], root)
        np.testing.assert_array_equal(outputs[specs.SAMPLED_TOKENS][slot], tokens)
        np.testing.assert_allclose(outputs[specs.CONFIDENCES][slot], probs, rtol=2e-4)
        if form.width:
            np.testing.assert_array_equal(outputs[specs.DRAFT_PARENTS][slot], parents)
