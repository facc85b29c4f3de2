# SPDX-License-Identifier: Apache-2.0
"""What counts as transformers' greedy text, with a model whose logits are written down."""

from types import SimpleNamespace

import torch

from bench.greedy_equality import gaps_of, is_ended_well

NEXT = {1: 2, 2: 3, 3: 1}  # the token after a token


def model(ids):
    logits = torch.zeros(1, ids.shape[1], 5)
    for i, token in enumerate(ids[0].tolist()):
        logits[0, i, NEXT.get(token, 0)] = 1.0
        logits[0, i, 4] = 0.75
    return SimpleNamespace(logits=logits)


def test_a_token_is_compared_with_the_logits_before_it():
    assert gaps_of(model, [3, 1], [2, 3, 1, 2]) == {}
    assert gaps_of(model, [3, 1], [2, 4, 0, 3]) == {1: 0.25, 3: 1.0}
    assert gaps_of(model, [3], [2]) == {0: 1.0}


def test_a_text_ends_at_its_first_end_or_at_the_most_tokens():
    assert is_ended_well([5, 6, 7], {9}, 3)
    assert is_ended_well([5, 9], {9}, 3)
    assert not is_ended_well([5, 6], {9}, 3)
    assert not is_ended_well([5, 9, 6], {9}, 3)
