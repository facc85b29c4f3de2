# SPDX-License-Identifier: Apache-2.0
"""Whether a text is transformers' greedy one, by one forward over it: generating it takes one for every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def differing(model: Any, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[int]:
    """Returns which texts have a token that is not the likeliest one after the tokens before it."""
    import torch

    found = []
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
        if logits[len(prompt) - 1 : -1].argmax(-1).tolist() != list(text):
            found.append(number)
    return found
