# SPDX-License-Identifier: Apache-2.0
"""Drafts that read masks, in their published layouts."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints.lab_files import HIDDEN, LAYERS, LLAMA, VOCAB, draw, layer_shapes, save

MASK = 37


def pard(folder: Path) -> Path:
    """An ordinary language model whose config names a mask token."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= layer_shapes(f"model.layers.{i}", HIDDEN, HIDDEN)
    return save(folder, {**LLAMA, "tie_word_embeddings": True, "pard_token": MASK}, draw(shapes))
