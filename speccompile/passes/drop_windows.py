# SPDX-License-Identifier: Apache-2.0
"""Remove sliding windows at least as long as the cache, which hide nothing: without them all layers share one mask."""

from __future__ import annotations

import onnx_ir as ir

from speccompile.passes.edit import attentions_of, shared_attentions_of
from speccompile.passes.match import int_attribute


def drop_windows(model: ir.Model, max_seq_len: int) -> int:
    """Set `window` to 0 where it is at least `max_seq_len`; returns how many nodes changed."""
    found = [
        n for n in [*attentions_of(model), *shared_attentions_of(model)] if int_attribute(n, "window", 0) >= max_seq_len
    ]
    for node in found:
        node.attributes["window"] = ir.AttrInt64("window", 0)
    return len(found)
