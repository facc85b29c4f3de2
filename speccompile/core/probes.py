# SPDX-License-Identifier: Apache-2.0
"""Inputs for a probe run, which only tries or times a graph, as its spec declares them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.specs import SURE_NODES, GraphSpec


def probe_inputs(
    spec: GraphSpec, *, num_slots: int = 1, num_nodes: int = 1, length: int = 0
) -> dict[str, NDArray[Any]]:
    """Returns the feeds of one run; inputs whose `probe` is `neutral` are left out.

    `tokens` are drawn from the vocabulary, `lengths` the rows in use, `states` arbitrary numbers, `nodes` the index of
    each node and `last_node` that of the last one of each slot. `sure` is 0 as in a step with drafts, or all nodes
    where a step has more than may wait for a verdict.

    Args:
        num_nodes: nodes of each slot; every dynamic dim but the batch has this size, except `scored` where the graph
            scores one node.

    Returns:
        By name: int64, or float32 for states.
    """
    sizes = {"batch": num_slots, "scored": 1 if spec.scores == "one" else num_nodes}
    feeds: dict[str, NDArray[Any]] = {}
    for tensor in spec.plain_inputs:
        shape = [sizes.get(d, num_nodes) if isinstance(d, str) else d for d in tensor.dims]
        if tensor.probe == "tokens":
            feeds[tensor.name] = np.random.default_rng(num_nodes).integers(0, spec.vocab_size, shape)
        elif tensor.probe == "states":
            feeds[tensor.name] = np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)
        elif tensor.probe == "nodes":
            feeds[tensor.name] = np.broadcast_to(np.arange(shape[1]), shape).copy()
        elif tensor.probe != "neutral":
            sure = num_nodes if num_nodes > spec.max_pending else 0
            values = {"lengths": length, "last_node": num_nodes - 1, "sure": sure}
            feeds[tensor.name] = np.full(shape, values[tensor.probe])
    return feeds


def all_sure(spec: GraphSpec, num_slots: int, num_nodes: int) -> dict[str, NDArray[Any]]:
    """Returns the feeds by which all nodes of a step stay in recurrent states; none for a graph without states."""
    return {SURE_NODES: np.full(num_slots, num_nodes, dtype=np.int64)} if spec.states else {}
