# SPDX-License-Identifier: Apache-2.0
"""What backends and methods promise to the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from speccompile.core.specs import GraphSpec


class Engine(Protocol):
    """A loaded graph with its caches.

    An engine owns static caches [slots, kv_heads, max_seq, head_dim] and lends a prefix of the slots to
    each step. Lengths belong to the caller. Not thread-safe.
    """

    spec: GraphSpec
    max_slots: int
    max_rows: int

    def run(self, feeds: Mapping[str, np.ndarray], first_slot: int = 0) -> Mapping[str, np.ndarray]:
        """One step over the slots first_slot .. first_slot + batch - 1.

        Args:
            feeds: inputs by name (see `speccompile.core.specs`); `tokens` [batch, nodes] and `lengths`
                [batch] are always needed. An input left out has its neutral value: a chain as
                `tree_mask` and `parents`, every node in `scored_nodes`, deterministic drafts, greedy.
            first_slot: the slot of batch row 0.

        Returns:
            The outputs by name, without the caches. The arrays are valid until the next `run`.

        Raises:
            RuntimeFault: lengths + nodes exceed `max_rows`, or the slots exceed `max_slots`.
        """
        ...

    def move_slot(self, source: int, dest: int) -> None:
        """Copy the cache of slot `source` to slot `dest`."""
        ...

    def compact(self, lengths: np.ndarray, path: np.ndarray) -> None:
        """KVRollback, in place: row lengths[b] + i of slot b becomes row lengths[b] + path[b, i].

        Args:
            lengths: [batch] int64, cache entries before the step that wrote the tree.
            path: [batch, depth] int64, nodes to keep in order; -1 ends a path.
        """
        ...
