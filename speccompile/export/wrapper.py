# SPDX-License-Identifier: Apache-2.0
"""A causal language model with the inputs and outputs of `decoder_spec`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn

from speccompile.core.dims import ModelDims
from speccompile.errors import ExportError
from speccompile.export.attention import (
    Frame,
    cache_pairs,
    current_frame,
    find_frame,
    forward_pass,
    gather_nodes,
    state_groups,
)
from speccompile.export.draft_vocab import spread, spread_index


class ScoredHead(nn.Module):
    """The LM head at the scored nodes only; records its input as the frame's hidden state."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @property
    def weight(self) -> Any:
        """The head's own weight, whose dtype some models read."""
        return self.head.weight

    def forward(self, hidden: torch.Tensor) -> Any:
        """Hidden [batch, nodes, hidden] -> logits [batch, scored, vocab]."""
        frame = current_frame()
        frame.hidden = hidden
        return self.head(gather_nodes(hidden, frame.scored_nodes))


class DecoderGraph(nn.Module):
    """The module that is traced. Wraps the LM head of a transformers model with our attention in place.

    Args:
        hidden: whether the LM head's input is an output.
        hidden_layers: decoder layers whose output is also an output.
        windows: the sliding window of each layer, as `masks.read_windows` finds it.
        reads_images: rows of images take the place of embeddings, and `tree_mask` may show a node later ones.
    """

    def __init__(
        self,
        model: Any,
        dims: ModelDims,
        hidden: bool,
        hidden_layers: Sequence[int],
        windows: Sequence[int],
        reads_images: bool = False,
    ) -> None:
        super().__init__()
        self.reads_images = reads_images
        self.windows = tuple(windows)
        self.vocab_index: torch.Tensor | None = None
        self.model, self.dims = model, dims
        self.wants_hidden, self.hidden_layers = hidden, tuple(hidden_layers)
        _wrap_head(model)
        if reads_images:
            model.get_input_embeddings().register_forward_hook(_place_images)
        layers = find_layers(model, dims.num_layers)
        for index in self.hidden_layers:
            layers[index].register_forward_hook(_note_output(index))

    def spread_from(self, tokens: Sequence[int]) -> None:
        """Give the logits all columns again, where the head has those of `tokens` alone."""
        self.vocab_index = spread_index(torch.tensor(tokens), self.dims.vocab_size)

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        tree_mask: torch.Tensor,
        scored_nodes: torch.Tensor,
        held: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """One step; inputs and outputs as in `decoder_spec`, those after `scored_nodes` as one list.

        The number of nodes in a node's row of `tree_mask`, itself included, is its depth + 1; later ones do not count.
        """
        seen = tree_mask.to(torch.int64)
        depth = (seen.tril() if self.reads_images else seen).sum(-1) - 1
        positions = lengths.unsqueeze(1) + depth
        recurrent = {i: kept.num_states for i, d in enumerate(self.dims.per_layer) if (kept := d.recurrent) is not None}
        images, held = (held[:2], held[2:]) if self.reads_images else ([None, None], held)
        num_applied = 2 if recurrent else 0  # state_lengths and sure_nodes
        applied, states = held[:num_applied], held[num_applied : num_applied + sum(recurrent.values())]
        caches = held[num_applied + len(states) :]
        frame = Frame(
            lengths,
            tree_mask,
            scored_nodes,
            cache_pairs(self.dims.attention_layers, caches, self.dims.latent_layers),
            self.windows,
            positions,
            state_groups(recurrent, states),
            state_lengths=applied[0] if applied else None,
            sure_nodes=applied[1] if applied else None,
            sources=self.dims.sources,
        )
        frame.image_nodes, frame.image_rows = images
        with forward_pass(frame):
            logits = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        if self.vocab_index is not None:
            logits = spread(logits, self.vocab_index)
        outputs = [logits, *([frame.hidden] if self.wants_hidden else [])]
        outputs += [frame.layer_outputs[i] for i in self.hidden_layers]
        self._check_layers("cached attentions", self.dims.attention_layers, frame.updated)
        self._check_layers("attentions to another layer's caches", tuple(self.dims.sources), frame.readers)
        self._check_layers("recurrent steps", tuple(recurrent), frame.updated_states)
        outputs += [state for i in recurrent for state in frame.updated_states[i]]
        updated = [frame.updated[i][: self.dims.per_layer[i].num_caches] for i in self.dims.attention_layers]
        return (*outputs, *(cache for caches in updated for cache in caches))

    def _check_layers(self, what: str, layers: Sequence[int], updated: Container[int]) -> None:
        missing = [i for i in layers if i not in updated]
        if missing:
            raise ExportError(
                type(self.model).__name__,
                f"{len(layers) - len(missing)} {what} (none in layers {missing})",
                f"one in each of {len(layers)} layers",
                "Its layers cannot be replaced; this architecture cannot be exported.",
            )


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
    """Returns the list of decoder layers: the outermost ModuleList of that length."""
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not found:
        raise ExportError(
            type(model).__name__,
            "no list of decoder layers",
            f"a ModuleList of {num_layers} layers",
            "This architecture cannot be exported.",
        )
    return found[0]


def _place_images(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    frame = find_frame()
    if frame is None or frame.image_nodes is None or frame.image_rows is None:
        return output
    return torch.where(frame.image_nodes[..., None], frame.image_rows, output)


def _note_output(index: int) -> Any:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        current_frame().layer_outputs[index] = output[0] if isinstance(output, tuple) else output

    return note
