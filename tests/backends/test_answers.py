# SPDX-License-Identifier: Apache-2.0
"""Texts on which forms are compared: halves of what is given, or answers that end where the target ends them."""

import numpy as np

from speccompile.backends.onnxruntime.answers import NUM_NEW, PIECE, ROUNDS, texts_of
from speccompile.checkpoints.texts import TextSample
from speccompile.core.specs import LENGTHS, NEXT_TOKEN, TEMPERATURE, TOKENS, UNIFORMS


def test_a_given_text_is_halved_in_pieces(compiled):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    length = min(PIECE, spec.max_rows or PIECE)
    sample = TextSample((tuple(np.arange(4 * length) % 97), (5, 6, 7), (8,)))
    halves = [texts_of(path, spec, sample, 10**6, measures=measures) for measures in (True, False)]
    assert [[len(text.tokens) for text in half] for half in halves] == [[length, length, 3], [length, length]]
    pieces = sorted(text.tokens[0] for half in halves for text in half)
    assert pieces == sorted([5, *[i * length % 97 for i in range(4)]])
    assert [len(half) for half in (texts_of(path, spec, sample, 10, measures=True),)] == [1]


def test_prompts_are_answered_until_the_target_ends_or_there_is_enough(compiled):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    prompts = tuple((i, i + 1, i + 2) for i in range(6))
    found = texts_of(path, spec, TextSample(prompts=prompts), 200, measures=True)
    assert sum(len(text.tokens) - text.start for text in found) >= 200
    assert {text.tokens[:3] for text in found} <= set(prompts[::2]) and {text.start for text in found} == {3}
    other = texts_of(path, spec, TextSample(prompts=prompts), 200, measures=False)
    assert {text.tokens[:3] for text in other} <= set(prompts[1::2])
    # Every token ends an answer: each has one token, and all are asked a few times.
    ended = texts_of(path, spec, TextSample(prompts=prompts, stop_ids=tuple(range(97))), 200, measures=True)
    assert [len(text.tokens) for text in ended] == [4] * 3 * ROUNDS
    assert all(len(text.tokens) - text.start <= NUM_NEW for text in found)


def test_texts_side_by_side_are_those_of_one_alone(compiled, open_engine):
    """Greedy in the limit: the first answer's tokens follow from its own prompt and draws."""
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    prompts = ((1, 2, 3, 4, 5), (7, 8), (9,), (11, 12))
    text = texts_of(path, spec, TextSample(prompts=prompts), 1, measures=True)[0]
    engine = open_engine()
    engine.run({TOKENS: np.array([text.tokens[:4]]), LENGTHS: np.array([0])})
    rng = np.random.default_rng(1)
    for at in range(4, 12):
        uniforms = rng.random((2, 1, 2), dtype=np.float32)[:1]
        feeds = {TOKENS: np.array([[text.tokens[at]]]), LENGTHS: np.array([at]), UNIFORMS: uniforms}
        step = engine.run({**feeds, TEMPERATURE: np.full(1, 0.8, np.float32)})
        assert step[NEXT_TOKEN][0] == text.tokens[at + 1]
