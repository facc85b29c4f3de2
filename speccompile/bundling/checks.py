# SPDX-License-Identifier: Apache-2.0
"""Run the compiled graphs a little before they are trusted."""

from __future__ import annotations

from typing import Any

import numpy as np

from speccompile.core import specs
from speccompile.core.feature_specs import is_fusion, made_up_feeds, reads_features
from speccompile.core.jobs import PREFILL_CHUNK
from speccompile.core.protocols import Engine, Outputs
from speccompile.errors import BuildError

_NUM_PROMPT, _NUM_TOKENS = 5, 8
MIN_ROWS = _NUM_PROMPT + _NUM_TOKENS + 1
_TODO = "The compiled graph is wrong: report it with the model's config.json."


def check_graph(engine: Engine, max_nodes: int) -> dict[str, Any]:
    """The check that fits what the engine gives.

    Args:
        engine: of the graph.
        max_nodes: most nodes that a step may score, at least 2.

    Returns:
        What was seen, for the manifest; empty where its caches are too small to try anything.

    Raises:
        BuildError: see the checks.
    """
    spec = engine.spec
    if spec.caches and spec.max_rows < MIN_ROWS:
        return {}
    outputs = {t.name for t in spec.outputs}
    if is_fusion(spec):
        return check_fusion(engine)
    if specs.SAMPLED_TOKENS in outputs:
        return check_chain(engine) if spec.caches else check_heads(engine)
    if specs.GUESSES in outputs:
        return check_guesses(engine) if spec.caches else check_guessing_heads(engine)
    return check_target(engine, max_nodes) if specs.PATH in outputs else check_draft(engine)


def check_target(engine: Engine, max_nodes: int) -> dict[str, Any]:
    """Decode a few tokens greedily one by one, then let one step verify them as a chain of drafts.

    Args:
        engine: of the target.
        max_nodes: see `check_graph`.

    Returns:
        {"num_tokens", "num_equal"}: how many of the drafted tokens the chain accepted. They are equal where a
        step of many nodes gives each node the numbers of a single step (invariant 1 of the design).

    Raises:
        BuildError: a token outside the vocabulary, or not even the first draft accepted.
    """
    prompt, num_tokens = _prompt(engine), min(_NUM_TOKENS, max_nodes)
    step = engine.run({specs.TOKENS: prompt, specs.LENGTHS: _int(0), specs.SCORED_NODES: _int([_NUM_PROMPT - 1])})
    tokens = [_token(engine, step[specs.NEXT_TOKEN])]
    while len(tokens) < num_tokens:
        length = _NUM_PROMPT + len(tokens) - 1
        step = engine.run({specs.TOKENS: _int([tokens[-1]]), specs.LENGTHS: _int(length)})
        tokens.append(_token(engine, step[specs.NEXT_TOKEN]))
    chain = engine.run({specs.TOKENS: _int(tokens), specs.LENGTHS: _int(_NUM_PROMPT)})
    num_equal = int(chain[specs.NUM_ACCEPTED][0])
    if not 1 <= num_equal < num_tokens:
        got = f"{num_equal} of {num_tokens - 1} of the target's own tokens accepted"
        raise BuildError(f"check {engine.spec.name}", got, f"{num_tokens - 1}, at least 1", _TODO)
    return {"num_tokens": num_tokens - 1, "num_equal": num_equal}


def check_draft(engine: Engine) -> dict[str, Any]:
    """Run one prompt.

    Returns:
        {"num_tokens": 1}.

    Raises:
        BuildError: a token outside the vocabulary, or a confidence that is no probability.
    """
    feeds = {specs.TOKENS: _prompt(engine), specs.LENGTHS: _int(0), specs.SCORED_NODES: _int([_NUM_PROMPT - 1])}
    step = engine.run(feeds)
    _token(engine, step[specs.SAMPLED_TOKEN])
    confidence = float(step[specs.CONFIDENCE][0])
    if not 0.0 < confidence <= 1.0 + 1e-5:
        raise BuildError(f"check {engine.spec.name}", f"confidence {confidence}", "a probability", _TODO)
    return {"num_tokens": 1}


def check_guesses(engine: Engine) -> dict[str, Any]:
    """Guess behind the last two nodes of a prompt.

    Returns:
        {"num_tokens": guesses of a node}.

    Raises:
        BuildError: a token outside the vocabulary, one guessed twice, or numbers that are no probabilities.
    """
    scored = _int([_NUM_PROMPT - 2, _NUM_PROMPT - 1])
    feeds = {specs.TOKENS: _prompt(engine), specs.LENGTHS: _int(0), specs.SCORED_NODES: scored}
    if reads_features(engine.spec):
        feeds |= made_up_feeds(engine.spec, _NUM_PROMPT)
    if specs.gives_laws(engine.spec):
        feeds[specs.TEMPERATURE] = np.ones(1, np.float32)
    step = engine.run(feeds)
    num_guesses = _check_guess_rows(engine, step)
    if specs.gives_laws(engine.spec):
        for mass in np.asarray(step[specs.NODE_LAWS])[0].sum(axis=-1).tolist():
            _check_unit(engine, "the mass of a law", mass, 1.0 - 1e-2)
    return {"num_tokens": num_guesses}


def _check_guess_rows(engine: Engine, step: Outputs) -> int:
    """Check the guesses of the first slot; returns how many a row has."""
    guesses, probs = np.asarray(step[specs.GUESSES])[0], np.asarray(step[specs.GUESS_PROBS])[0]
    for row, sure in zip(guesses, probs.tolist(), strict=True):
        for guess in row:
            _token(engine, guess[None])
        if len(set(row.tolist())) < len(row):
            raise BuildError(f"check {engine.spec.name}", f"guesses {row.tolist()}", "each token once", _TODO)
        _check_unit(engine, "the mass of the guesses", sum(sure), 0.0)
    return int(guesses.shape[1])


def check_guessing_heads(engine: Engine) -> dict[str, Any]:
    """Guess from a made-up state.

    Returns:
        {"num_tokens": guesses of a head}.

    Raises:
        BuildError: see `check_guesses`.
    """
    return {"num_tokens": _check_guess_rows(engine, engine.run(_state_feeds(engine)))}


def check_fusion(engine: Engine) -> dict[str, Any]:
    """Make features of made-up states.

    Returns:
        {"num_states": positions}.

    Raises:
        BuildError: a feature is not finite.
    """
    features = np.asarray(engine.run(made_up_feeds(engine.spec, _NUM_PROMPT))[specs.FEATURES])
    if not np.isfinite(features).all():
        raise BuildError(f"check {engine.spec.name}", "features that are not finite", "numbers", _TODO)
    return {"num_states": features.shape[1]}


def check_chain(engine: Engine) -> dict[str, Any]:
    """Draft behind a prompt, greedily; then read prompt and chain as a new prompt but for the last token.

    Returns:
        {"num_tokens": drafts of one run, 0 where caches or prompts are too short; "num_equal": 1 where the last token
        behind prompt and chain is that of the chain: always, where a step of many nodes has a single step's numbers}.

    Raises:
        BuildError: a token outside the vocabulary, or a confidence that is no probability.
    """
    num_drafts = specs.chain_rows(engine.spec) + 1
    if engine.spec.max_rows < _NUM_PROMPT + 2 * num_drafts or _NUM_PROMPT + num_drafts > PREFILL_CHUNK:
        return {"num_tokens": 0, "num_equal": 0}
    prompt, chains = _prompt(engine), []
    for _ in range(2):
        last = _int([prompt.shape[1] - 1])
        step = engine.run({specs.TOKENS: prompt, specs.LENGTHS: _int(0), specs.SCORED_NODES: last})
        chains.append([_token(engine, step[specs.SAMPLED_TOKENS][:, i]) for i in range(num_drafts)])
        for confidence in step[specs.CONFIDENCES][0].tolist():
            _check_unit(engine, "confidence", confidence, 0.0)
        prompt = np.concatenate((_prompt(engine), _int(chains[0][:-1])), axis=1) if num_drafts > 1 else prompt
    return {"num_tokens": num_drafts, "num_equal": int(chains[1][0] == chains[0][-1])}


def check_heads(engine: Engine) -> dict[str, Any]:
    """Draft from a made-up state: greedily, then by draws, if it draws.

    Returns:
        {"num_tokens": drafts of one run}.

    Raises:
        BuildError: a token outside the vocabulary, a confidence that is no probability, a law whose sum is not 1, or
            a draft in front of its parent.
    """
    num_drafts = engine.spec.output(specs.SAMPLED_TOKENS).dims[1]
    assert isinstance(num_drafts, int)
    draws = any(t.name == specs.SAMPLED_LAWS for t in engine.spec.outputs)
    feeds = {**_state_feeds(engine), specs.TOKENS: _int([0])}
    warm = {specs.TEMPERATURE: np.ones(1, np.float32), specs.UNIFORMS: np.full((1, num_drafts), 0.5, np.float32)}
    for extra in ({}, warm) if draws else ({},):
        step = engine.run({**feeds, **extra})
        for column in range(num_drafts):
            _token(engine, step[specs.SAMPLED_TOKENS][:, column])
            _check_unit(engine, "confidence", float(step[specs.CONFIDENCES][0, column]), 0.0)
    laws = np.asarray(step[specs.SAMPLED_LAWS])[0, 1:] if draws else np.ones((0, 1))
    for mass in laws.sum(axis=-1).tolist():
        _check_unit(engine, "the mass of a law", mass, 1.0 - 1e-2)
    parents = np.asarray(step[specs.DRAFT_PARENTS])[0] if specs.DRAFT_PARENTS in step else np.zeros(0, np.int64)
    for draft, parent in enumerate(parents.tolist(), start=1):
        if not 0 <= parent < draft:
            got, expected = f"draft {draft} behind draft {parent}", f"a parent from 0 to {draft - 1}"
            raise BuildError(f"check {engine.spec.name}", got, expected, _TODO)
    return {"num_tokens": num_drafts}


def _state_feeds(engine: Engine) -> dict[str, np.ndarray[Any, Any]]:
    """Two made-up states, of which the second counts."""
    width = engine.spec.input(specs.HIDDEN).dims[2]
    assert isinstance(width, int)
    states = np.sin(np.arange(2 * width, dtype=np.float32)).reshape(1, 2, width)
    return {specs.HIDDEN: states, specs.START_NODES: _int(1)}


def _check_unit(engine: Engine, what: str, value: float, least: float) -> None:
    if not least < value <= 1.0 + 1e-2:
        raise BuildError(f"check {engine.spec.name}", f"{what} {value}", "a probability", _TODO)


def _prompt(engine: Engine) -> np.ndarray[Any, Any]:
    return _int(np.arange(_NUM_PROMPT) * 7 % engine.spec.vocab_size)


def _int(values: Any) -> np.ndarray[Any, Any]:
    """[1] from a number, [1, n] from n numbers, int64."""
    array = np.asarray(values, dtype=np.int64)
    return array.reshape(1) if array.ndim == 0 else array[None]


def _token(engine: Engine, values: np.ndarray[Any, Any]) -> int:
    token = int(values[0])
    if not 0 <= token < engine.spec.vocab_size:
        expected = f"a token id below {engine.spec.vocab_size}"
        raise BuildError(f"check {engine.spec.name}", f"token {token}", expected, _TODO)
    return token
