# SPDX-License-Identifier: Apache-2.0
"""Which keys each attention layer sees: read from the masks that transformers builds for it.

Attention follows its mask, whether or not a layer passes a window. So the model runs once with mask and attention
functions that only record, and each mask is evaluated as a function of two positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from speccompile.errors import ExportError
from speccompile.export.adapted_models import set_attention

NOTING = "speccompile_masks"  # the name under which transformers finds `_note_mask` and `_note_attention`
_NUM_TOKENS = 3
_FAULTS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class _Notes:
    """Record of one forward pass: each mask with its function, the mask passed to each layer, and its own window."""

    masks: list[tuple[torch.Tensor, MaskFunction]] = field(default_factory=list)
    given: dict[int, torch.Tensor | None] = field(default_factory=dict)
    own_windows: dict[int, int] = field(default_factory=dict)


_NOTES: ContextVar[_Notes] = ContextVar("speccompile_masks")


def read_windows(model: Any, implementation: str, num_layers: int, max_seq_len: int, where: str) -> tuple[int, ...]:
    """Returns the sliding window of each layer; 0 where no row below `max_seq_len` is hidden by one.

    Raises:
        ExportError: a mask is not causal, with or without a window, was changed, or only its own attention runs.
    """
    _register()
    notes = _Notes()
    token = _NOTES.set(notes)
    tokens = torch.arange(_NUM_TOKENS)[None]
    set_attention(model, NOTING)
    try:
        with torch.no_grad(), refuse_faults(where):
            model(input_ids=tokens, use_cache=False)
    finally:
        set_attention(model, implementation)
        _NOTES.reset(token)
    return tuple(_window(notes, layer, max_seq_len, where) for layer in range(num_layers))


@contextmanager
def refuse_faults(where: str) -> Iterator[None]:
    """Turn what a model's code raises while it runs with another attention into a refusal."""
    try:
        yield
    except _FAULTS as fault:
        raise ExportError(
            where,
            f"{type(fault).__name__} ({(str(fault).strip().splitlines() or ['no message'])[0]}) in its forward pass",
            "a model that runs with another attention function than its own",
            "This architecture cannot be exported; use another target.",
        ) from fault


def _window(notes: _Notes, layer: int, max_seq_len: int, where: str) -> int:
    given, own = notes.given.get(layer), notes.own_windows.get(layer, 0)
    if own or given is None:  # its own attention sees no mask, or builds one: the comparison of logits decides
        return own if own < max_seq_len else 0
    for mask, function in notes.masks:
        if mask.data_ptr() == given.data_ptr():
            with refuse_faults(where):
                return window_of(function, max_seq_len, f"{where} (layer {layer})")
    raise ExportError(
        f"{where} (layer {layer})",
        "an attention mask that the model itself made or changed",
        "a causal mask or a sliding window, as transformers builds it",
        "This architecture cannot be exported; use another target.",
    )


def window_of(function: MaskFunction, max_seq_len: int, where: str) -> int:
    """Returns the window of a mask `function` of two positions; 0: the causal mask for all of `max_seq_len` rows."""
    last = torch.tensor([max_seq_len - 1])
    count = int(_visible(function, last, max_seq_len).sum())
    window = 0 if count == max_seq_len else count
    some = {0, 1, 2, window - 1, window, window + 1, max_seq_len // 2, max_seq_len - 2, max_seq_len - 1}
    queries = torch.tensor(sorted(q for q in some if 0 <= q < max_seq_len))
    distance = queries[:, None] - torch.arange(max_seq_len)
    expected = (distance >= 0) & (distance < (window or max_seq_len))
    if not torch.equal(_visible(function, queries, max_seq_len), expected):
        raise ExportError(
            where,
            "an attention mask that is no sliding window (chunked attention, a prefix or blocks)",
            "a causal mask or a sliding window",
            "This architecture cannot be exported; use another target.",
        )
    return window


def _visible(function: MaskFunction, queries: torch.Tensor, max_seq_len: int) -> torch.Tensor:
    zero = torch.tensor(0)
    seen = function(zero, zero, queries[:, None], torch.arange(max_seq_len)[None])
    return seen.expand(len(queries), max_seq_len).to(torch.bool)


def _note_mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **kwargs: Any
) -> torch.Tensor:
    mask = torch.zeros(batch_size, 1, int(q_length), int(kv_length))
    _NOTES.get().masks.append((mask, mask_function))
    return mask


def _note_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    own_window: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    layer = getattr(module, "layer_idx", None)
    if layer is not None:
        _NOTES.get().given[layer], _NOTES.get().own_windows[layer] = attention_mask, own_window
    return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NOTING, _note_attention)
    AttentionMaskInterface.register(NOTING, _note_mask)
