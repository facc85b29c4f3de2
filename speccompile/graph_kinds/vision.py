# SPDX-License-Identifier: Apache-2.0
"""The spec of a vision tower: one image in, its rows in the target's embedding out."""

from __future__ import annotations

from speccompile.core.specs import GraphSpec, TensorSpec

NUM_CHANNELS = 3
PIXELS = "pixels"  # [1, channels, height, width] float32: an image, resized and normalised
IMAGE_EMBEDDING = "image_embedding"  # [1, image_tokens, hidden] float32: its rows


def vision_spec(name: str, image_size: int, image_tokens: int, hidden_size: int) -> GraphSpec:
    """Returns the spec of a vision tower with its projection."""
    pixels = TensorSpec(PIXELS, (1, NUM_CHANNELS, image_size, image_size), "float32")
    rows = TensorSpec(IMAGE_EMBEDDING, (1, image_tokens, hidden_size), "float32")
    return GraphSpec(name, (pixels,), (rows,))
