# SPDX-License-Identifier: Apache-2.0
"""Run the compiled graphs a little before they are trusted."""

from __future__ import annotations

from typing import Any

import numpy as np

from speccompile.core import specs
from speccompile.core.protocols import Engine
from speccompile.errors import BuildError

_NUM_PROMPT, _NUM_TOKENS = 5, 8
MIN_ROWS = _NUM_PROMPT + _NUM_TOKENS + 1
_TODO = "The compiled graph is wrong: report it with the model's config.json."


def check_target(engine: Engine) -> dict[str, Any]:
    """Decode a few tokens greedily one by one, then let one step verify them as a chain of drafts.

    Returns:
        {"num_tokens", "num_equal"}: how many of the drafted tokens the chain accepted. They are equal where a
        step of many nodes gives each node the numbers of a single step (invariant 1 of the design).

    Raises:
        BuildError: a token outside the vocabulary, or not even the first draft accepted.
    """
    prompt = _prompt(engine)
    step = engine.run({specs.TOKENS: prompt, specs.LENGTHS: _int(0), specs.SCORED_NODES: _int([_NUM_PROMPT - 1])})
    tokens = [_token(engine, step[specs.NEXT_TOKEN])]
    while len(tokens) < _NUM_TOKENS:
        length = _NUM_PROMPT + len(tokens) - 1
        step = engine.run({specs.TOKENS: _int([tokens[-1]]), specs.LENGTHS: _int(length)})
        tokens.append(_token(engine, step[specs.NEXT_TOKEN]))
    chain = engine.run({specs.TOKENS: _int(tokens), specs.LENGTHS: _int(_NUM_PROMPT)})
    num_equal = int(chain[specs.NUM_ACCEPTED][0])
    if not 1 <= num_equal < _NUM_TOKENS:
        got = f"{num_equal} of {_NUM_TOKENS - 1} of the target's own tokens accepted"
        raise BuildError(f"check {engine.spec.name}", got, f"{_NUM_TOKENS - 1}, at least 1", _TODO)
    return {"num_tokens": _NUM_TOKENS - 1, "num_equal": num_equal}


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
