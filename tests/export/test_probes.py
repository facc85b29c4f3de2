# SPDX-License-Identifier: Apache-2.0
"""Weights under another convention, and the values that a list of layers could have meant."""

from pathlib import Path

import pytest
import torch

from speccompile.errors import CheckpointError
from speccompile.export.probes import (
    check_windows,
    halved_heads,
    ids_as_offsets,
    other_layers,
    rope_base,
    swapped_inputs,
    with_base,
)

HEADS, DIM, WIDTH = 3, 8, 5


def rotated(x: torch.Tensor, *, pairs: bool) -> torch.Tensor:
    """Turns every head [heads, dim] at position 1: dims 2i and 2i + 1 together, or i and i + dim / 2."""
    angles = 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    view = x.view(HEADS, DIM // 2, 2) if pairs else x.view(HEADS, 2, DIM // 2).transpose(1, 2)
    a, b = view.unbind(-1)
    turned = torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
    return turned.flatten(1) if pairs else turned.transpose(1, 2).flatten(1)


def test_interleaved_heads_score_alike_once_they_are_reordered():
    torch.manual_seed(0)
    names = ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")
    held = {name: torch.randn(HEADS * DIM, WIDTH) for name in names}
    other = {"layers.0.self_attn.v_proj.weight": torch.randn(HEADS * DIM, WIDTH)}
    q, k = torch.randn(WIDTH), torch.randn(WIDTH)
    changed = halved_heads({**held, **other}, DIM)

    def scores(weights: dict[str, torch.Tensor], *, pairs: bool) -> torch.Tensor:
        left, right = ((weights[n] @ x).view(HEADS, DIM) for n, x in zip(names, (q, k), strict=True))
        return (rotated(left, pairs=pairs) * right).sum(-1)

    torch.testing.assert_close(scores(changed, pairs=False), scores(held, pairs=True))
    assert not torch.allclose(scores(held, pairs=False), scores(held, pairs=True))
    assert torch.equal(changed["layers.0.self_attn.v_proj.weight"], other["layers.0.self_attn.v_proj.weight"])


def test_norms_and_biases_of_heads_are_reordered_too():
    held = {"q_norm.weight": torch.arange(DIM), "self_attn.k_proj.bias": torch.arange(2 * DIM)}
    changed = halved_heads(held, DIM)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    assert changed["q_norm.weight"].tolist() == order
    assert changed["self_attn.k_proj.bias"].tolist() == [*order, *(DIM + i for i in order)]


def test_the_halves_of_an_input_are_swapped():
    held = {"a": torch.tensor([[1, 2, 3, 4]]), "b": torch.tensor([[5, 6]])}
    assert {n: t.tolist() for n, t in swapped_inputs(held, ["a"]).items()} == {"a": [[3, 4, 1, 2]], "b": [[5, 6]]}


def test_ids_become_offsets():
    assert ids_as_offsets({"d2t": torch.tensor([3, 5, 9])})["d2t"].tolist() == [3, 4, 7]


@pytest.mark.parametrize(
    ("stated", "published", "others"),
    [
        ((1, 3, 6), (1, 3, 4), ([0, 2, 5], [2, 4, 7], [6, 3, 1], [1, 3, 4])),
        ((2, 4, 7), (1, 3, 6), ([1, 3, 6], [7, 4, 2])),
        ((0, 3, 4), None, ([1, 4, 5], [4, 3, 0])),
        ((7,), None, ([6],)),
    ],
)
def test_layers_that_a_list_could_have_meant(stated, published, others):
    assert other_layers(stated, 8, published) == others


def test_the_base_of_positions_is_read_and_written_where_a_config_has_it():
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert [rope_base(c) for c in ({}, {"rope_theta": 1e6}, nested)] == [10000.0, 1e6, 5e5]
    assert rope_base({**nested, "rope_theta": 1e6}) == 5e5  # as the layers take it
    assert rope_base(with_base(nested, 2e4)) == 2e4
    assert with_base(nested, 2e4)["rope_parameters"] == {"rope_type": "default", "rope_theta": 2e4}


def test_a_window_that_hides_a_text_is_refused():
    check_windows(Path("folder"), (0, 64), 64)
    check_windows(Path("folder"), None, 64)
    with pytest.raises(CheckpointError, match=r"windows of \[0, 63\] tokens"):
        check_windows(Path("folder"), (0, 63), 64)
