# SPDX-License-Identifier: Apache-2.0
"""Chains from all starts of a text at once compute what each chain computes alone, row after row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile.export.chains import IMPLEMENTATION, Chains, register, running
from speccompile.export.feature_source import dims_from_config
from speccompile.export.probes import chain_drafts
from speccompile.speculators.eagle3.model import make_body

CONFIG: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-5, "vocab_size": 20, "draft_vocab_size": 20,
}  # fmt: skip
ROOTS, NODES, NUM = torch.tensor([1, 4, 9]), 14, 4


@pytest.mark.parametrize("has_masks", [False, True])
def test_chains_at_once_are_chains_alone(has_masks):
    torch.manual_seed(0)
    register()
    dims = replace(dims_from_config(Path("config"), CONFIG, "eagle3", 1), layers=(0, 1, 2))
    body = make_body(CONFIG, dims, None, None, has_masks=False)
    for parameter in body.parameters():
        parameter.data = torch.randn_like(parameter) * 0.5
    body.config._attn_implementation = IMPLEMENTATION
    rotary = body.make_rotary()
    tokens, features = torch.randint(20, (1, NODES)), torch.randn(1, NODES, 16)
    mask = (7, torch.randn(16)) if has_masks else None
    seen: list[torch.Tensor] = []

    def advance(after: torch.Tensor, read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return body.advance(after, read, rotary(read, positions))

    def token_of(own: torch.Tensor) -> torch.Tensor:
        seen.append(own)
        return own.argmax(-1)

    drafts = chain_drafts(advance, token_of, tokens, features, ROOTS, NUM, mask)
    assert drafts.shape == (3, NUM) and torch.equal(drafts, torch.stack([own[0].argmax(-1) for own in seen], 1))
    for index, root in enumerate(ROOTS.tolist()):
        after, read = tokens[:, 1 : root + 1], features[:, :root]
        for step in range(NUM):
            with running(Chains()):  # all rows anew: no cache, and nothing of another chain
                own = advance(after, read, torch.arange(after.shape[1])[None])[:, -1:]
            torch.testing.assert_close(seen[step][:, index : index + 1], own)
            token = tokens[:, root + 1 + step : root + 2 + step] if mask is None else torch.tensor([[mask[0]]])
            after = torch.cat((after, token), 1)
            read = torch.cat((read, own if mask is None else mask[1][None, None]), 1)
