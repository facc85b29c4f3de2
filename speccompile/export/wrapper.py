# SPDX-License-Identifier: Apache-2.0
"""A causal language model with the inputs and outputs of `decoder_spec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from speccompile.errors import ExportError
from speccompile.export.attention import Frame, current_frame, forward_pass, gather_nodes


class ScoredHead(nn.Module):
    """The LM head at the scored nodes only; records its input as the frame's hidden state."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> Any:
        """Hidden [batch, nodes, hidden] -> logits [batch, scored, vocab]."""
        frame = current_frame()
        frame.hidden = hidden
        return self.head(gather_nodes(hidden, frame.scored_nodes))


class DecoderGraph(nn.Module):
    """The module that is traced. Wraps the model's LM head in place.

    Args:
        model: a transformers causal LM whose attention implementation is ours.
        num_layers: its decoder layers.
        hidden: whether the LM head's input is an output.
        hidden_layers: decoder layers whose output is also an output.
        windows: the sliding window of each layer, as `masks.read_windows` finds it.
    """

    def __init__(
        self, model: Any, num_layers: int, hidden: bool, hidden_layers: Sequence[int], windows: Sequence[int]
    ) -> None:
        super().__init__()
        self.windows = tuple(windows)
        self.model, self.num_layers = model, num_layers
        self.wants_hidden, self.hidden_layers = hidden, tuple(hidden_layers)
        _wrap_head(model)
        layers = find_layers(model, num_layers)
        for index in self.hidden_layers:
            layers[index].register_forward_hook(_note_output(index))

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tree_mask: torch.Tensor,
        scored_nodes: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """One step; inputs and outputs as in `decoder_spec`, the caches as one list.

        A node sees itself, padding included: the number of nodes in its row of `tree_mask` is its depth + 1.
        """
        depth = tree_mask.to(torch.int64).sum(-1) - 1
        with forward_pass(Frame(lengths, tree_mask, scored_nodes, caches, self.windows)) as frame:
            positions = lengths.unsqueeze(1) + depth
            logits = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        outputs = [logits, *([frame.hidden] if self.wants_hidden else [])]
        outputs += [frame.layer_outputs[i] for i in self.hidden_layers]
        missing = [i for i in range(self.num_layers) if i not in frame.updated]
        if missing:
            raise ExportError(
                type(self.model).__name__,
                f"{self.num_layers - len(missing)} cached attentions (none in layers {missing})",
                f"one in each of {self.num_layers} layers",
                "Its attention cannot be replaced; this architecture cannot be exported.",
            )
        return (*outputs, *(cache for i in range(self.num_layers) for cache in frame.updated[i]))


def _wrap_head(model: Any) -> None:
    head = model.get_output_embeddings()
    if head is not None and not isinstance(head, ScoredHead):
        model.set_output_embeddings(ScoredHead(head))
    if not isinstance(model.get_output_embeddings(), ScoredHead):
        raise ExportError(
            type(model).__name__,
            "no LM head that can be replaced",
            "a causal language model with output embeddings",
            "This architecture cannot be exported.",
        )


def find_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """Returns the list of decoder layers: the outermost ModuleList of that length.

    Raises:
        ExportError: there is none.
    """
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not found:
        raise ExportError(
            type(model).__name__,
            "no list of decoder layers",
            f"a ModuleList of {num_layers} layers",
            "This architecture cannot be exported.",
        )
    return found[0]


def _note_output(index: int) -> Any:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        current_frame().layer_outputs[index] = output[0] if isinstance(output, tuple) else output

    return note
