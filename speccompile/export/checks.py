# SPDX-License-Identifier: Apache-2.0
"""Short runs of a compiled graph before it is trusted: the parts of `GraphSource.check_compiled`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.core import specs
from speccompile.core.specs import all_sure, probe_inputs
from speccompile.errors import BuildError

if TYPE_CHECKING:
    from speccompile.core.protocols import Engine, Outputs

_NUM_PROMPT, _NUM_TOKENS = 5, 8
MIN_ROWS = _NUM_PROMPT + _NUM_TOKENS + 1
_TODO = "The compiled graph is wrong: report it with the model's config.json."


def check_decoder(engine: Engine, max_nodes: int) -> dict[str, Any]:
    """The check of a decoder with one of our tails, of `max_nodes` (2 or more) scored nodes at most."""
    return check_target(engine, max_nodes) if engine.spec.tail == "verify" else check_candidates(engine)


def check_target(engine: Engine, max_nodes: int) -> dict[str, Any]:
    """Decodes a few tokens greedily one by one, by the first adapter if any, then verifies them as a chain of drafts.

    Returns {"num_tokens", "num_equal"}: how many drafted tokens the chain accepted, all where nodes of a step have the
    numbers of single steps (invariant 1); empty where the caches are too small.

    Raises:
        BuildError: a token outside the vocabulary, or not even the first draft accepted.
    """
    if not _has_room(engine):
        return {}
    prompt, num_tokens = _prompt(engine), min(_NUM_TOKENS, max_nodes)
    first = {specs.TOKENS: prompt, specs.LENGTHS: _int(0), specs.SCORED_NODES: _int([_NUM_PROMPT - 1])}
    chosen = {tensor.name: _int(1) for tensor in engine.spec.inputs if tensor.name == specs.ADAPTER}
    first |= all_sure(engine.spec, 1, _NUM_PROMPT) | chosen
    tokens = [_token(engine, engine.run(first)[specs.NEXT_TOKEN])]
    while len(tokens) < num_tokens:
        length = _NUM_PROMPT + len(tokens) - 1
        sure = all_sure(engine.spec, 1, 1) | chosen
        step = engine.run({specs.TOKENS: _int([tokens[-1]]), specs.LENGTHS: _int(length), **sure})
        tokens.append(_token(engine, step[specs.NEXT_TOKEN]))
    if engine.spec.states:  # they cannot be cut to the prompt
        engine.run(first)
    chain = engine.run({specs.TOKENS: _int(tokens), specs.LENGTHS: _int(_NUM_PROMPT)} | chosen)
    num_equal = int(chain[specs.NUM_ACCEPTED][0])
    if not 1 <= num_equal < num_tokens:
        got = f"{num_equal} of {num_tokens - 1} of the target's own tokens accepted"
        raise BuildError(f"check {engine.spec.name}", got, f"{num_tokens - 1}, at least 1", _TODO)
    return {"num_tokens": num_tokens - 1, "num_equal": num_equal}


def check_candidates(engine: Engine) -> dict[str, Any]:
    """Takes the candidates after two nodes of a prompt. Returns {"num_tokens": of a node}; empty: too small caches.

    Raises:
        BuildError: a token outside the vocabulary, a candidate given twice, or numbers that are no probabilities.
    """
    if not _has_room(engine):
        return {}
    feeds = probe_inputs(engine.spec, num_nodes=_NUM_PROMPT)
    feeds[specs.SCORED_NODES] = _int([_NUM_PROMPT - 2, _NUM_PROMPT - 1])
    if engine.spec.gives_probs:
        feeds[specs.TEMPERATURE] = np.ones(1, np.float32)
    step = engine.run(feeds)
    num = _check_candidate_rows(engine, step)
    if engine.spec.gives_probs:
        for mass in np.asarray(step[specs.NODE_PROBS])[0].sum(axis=-1).tolist():
            _check_unit(engine, "the mass of a distribution", mass, 1.0 - 1e-2)
    return {"num_tokens": num}


def _check_candidate_rows(engine: Engine, step: Outputs) -> int:
    rows, probs = np.asarray(step[specs.CANDIDATES])[0], np.asarray(step[specs.CANDIDATE_PROBS])[0]
    for row, sure in zip(rows, probs.tolist(), strict=True):
        for token in row:
            _token(engine, token[None])
        if len(set(row.tolist())) < len(row):
            raise BuildError(f"check {engine.spec.name}", f"candidates {row.tolist()}", "each token once", _TODO)
        _check_unit(engine, "the mass of the candidates", sum(sure), 0.0)
    return int(rows.shape[1])


def check_head_candidates(engine: Engine) -> dict[str, Any]:
    """Take the candidates of heads after an arbitrary state. Returns {"num_tokens": candidates of a head}."""
    return {"num_tokens": _check_candidate_rows(engine, engine.run(probe_inputs(engine.spec, num_nodes=2)))}


def check_features(engine: Engine) -> dict[str, Any]:
    """Compute features of arbitrary states. Returns {"num_states": positions}."""
    features = np.asarray(engine.run(probe_inputs(engine.spec, num_nodes=_NUM_PROMPT))[specs.FEATURES])
    if not np.isfinite(features).all():
        raise BuildError(f"check {engine.spec.name}", "features that are not finite", "numbers", _TODO)
    return {"num_states": features.shape[1]}


def check_heads(engine: Engine) -> dict[str, Any]:
    """Drafts from an arbitrary state: greedily, then sampled, if it samples. Returns {"num_tokens": drafts of one run}.

    Raises:
        BuildError: a token outside the vocabulary, a confidence that is no probability, a distribution whose sum is not
            1, or a draft before its parent.
    """
    num_drafts, draws = engine.spec.num_drafts, engine.spec.gives_probs
    feeds = probe_inputs(engine.spec, num_nodes=2)
    warm = {specs.TEMPERATURE: np.ones(1, np.float32), specs.UNIFORMS: np.full((1, num_drafts), 0.5, np.float32)}
    for extra in ({}, warm) if draws else ({},):
        step = engine.run({**feeds, **extra})
        for column in range(num_drafts):
            _token(engine, step[specs.SAMPLED_TOKENS][:, column])
            _check_unit(engine, "confidence", float(step[specs.CONFIDENCES][0, column]), 0.0)
    dists = np.asarray(step[specs.CHAIN_PROBS])[0, 1:] if draws else np.ones((0, 1))
    for mass in dists.sum(axis=-1).tolist():
        _check_unit(engine, "the mass of a distribution", mass, 1.0 - 1e-2)
    parents = np.asarray(step[specs.DRAFT_PARENTS])[0] if specs.DRAFT_PARENTS in step else np.zeros(0, np.int64)
    for draft, parent in enumerate(parents.tolist(), start=1):
        if not 0 <= parent < draft:
            got, expected = f"draft {draft} as a child of draft {parent}", f"a parent from 0 to {draft - 1}"
            raise BuildError(f"check {engine.spec.name}", got, expected, _TODO)
    return {"num_tokens": num_drafts}


def _has_room(engine: Engine) -> bool:
    return (engine.spec.max_rows or engine.max_rows) >= MIN_ROWS


def _check_unit(engine: Engine, what: str, value: float, least: float) -> None:
    if not least < value <= 1.0 + 1e-2:
        raise BuildError(f"check {engine.spec.name}", f"{what} {value}", "a probability", _TODO)


def _prompt(engine: Engine) -> np.ndarray[Any, Any]:
    return _int(np.arange(_NUM_PROMPT) * 7 % engine.spec.vocab_size)


def _int(values: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(values, dtype=np.int64)
    return array.reshape(1) if array.ndim == 0 else array[None]


def _token(engine: Engine, values: np.ndarray[Any, Any]) -> int:
    token = int(values[0])
    if not 0 <= token < engine.spec.vocab_size:
        expected = f"a token id below {engine.spec.vocab_size}"
        raise BuildError(f"check {engine.spec.name}", f"token {token}", expected, _TODO)
    return token
