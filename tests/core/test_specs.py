# SPDX-License-Identifier: Apache-2.0
"""Specs of decoders whose layers keep different things, and caches whose rows change slots with their number."""

import json
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from speccompile.core.dims import LayerDims, ModelDims, RecurrentDims, dims_from_json, json_from_dims
from speccompile.core.proposer import CacheRows
from speccompile.core.specs import (
    LENGTHS,
    LOGITS,
    SURE_NODES,
    TOKENS,
    probe_inputs,
    spec_from_json,
    state_names,
    updated_cache_name,
)
from speccompile.graph_kinds.borrowed import shared_cache
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, rollback_spec, verified_spec

PLAIN = ModelDims("llama", 97, 64, 3, 4, 2, 16, 512)
RECURRENT = RecurrentDims(2, 4, 8, 16, 2 * 16 + 64, 4)
MIXED = replace(
    PLAIN, num_layers=4, layer_dims=(LayerDims(recurrent=RECURRENT), LayerDims(2, 16), LayerDims(), LayerDims(1, 32))
)


def test_layers_are_alike_where_nothing_else_is_said():
    assert PLAIN.per_layer == (LayerDims(2, 16),) * 3
    assert PLAIN.attention_layers == (0, 1, 2) and PLAIN.recurrent_layers == ()
    assert PLAIN.cache_row_bytes_in("float16") == 2 * 2 * 3 * 2 * 16
    assert PLAIN.cache_row_bytes_in("int8") == 2 * 3 * 2 * (16 + 4)
    assert replace(PLAIN, head_dim=80).cache_row_bytes_in("int8") == 2 * 3 * 2 * (80 + 12)
    assert PLAIN.state_bytes(5) == 0


def test_a_plain_decoder_has_neither_states_nor_their_inputs():
    spec = verified_spec(decoder_spec("target", PLAIN, max_pending=9))
    assert spec.states == () and (spec.max_pending, spec.conv_history) == (0, 0)
    assert not {"state_lengths", "sure_nodes"} & {t.name for t in spec.inputs}
    assert not {"states", "max_pending", "conv_history"} & set(spec.json_from_spec())
    assert "layer_dims" not in json_from_dims(PLAIN)


def test_each_layer_has_what_it_keeps():
    spec = decoder_spec("target", MIXED, max_pending=5)
    assert spec.caches == ("k_cache.1", "v_cache.1", "k_cache.3", "v_cache.3")
    assert [spec.input(name).dims for name in spec.caches[1:3]] == [
        ("batch", 2, "max_seq", 16),
        ("batch", 1, "max_seq", 32),
    ]
    assert spec.states == state_names(0)
    assert [t.name for t in spec.inputs] == [
        *(TOKENS, LENGTHS, "tree_mask", "scored_nodes", "state_lengths", "sure_nodes"),
        *spec.states,
        *spec.caches,
    ]
    assert [t.name for t in spec.outputs] == [LOGITS, *map(updated_cache_name, (*spec.states, *spec.caches))]
    assert spec.state_shapes(3) == {
        "state.0": (3, 4, 8, 16),
        "pending.0": (3, 5, 2 * 8 + 4 * 16 + 2 * 4),
        "conv_rows.0": (3, 3 + 5, 96),
    }
    assert rollback_spec(MIXED).caches == spec.caches


@pytest.mark.parametrize("tail", ["verify", "candidates"])
def test_a_tail_stands_before_states_and_caches(tail):
    plain = decoder_spec("target", MIXED, max_pending=5)
    spec = verified_spec(plain) if tail == "verify" else candidate_spec(plain, 3, True)
    kept = [*spec.states, *spec.caches]
    assert [t.name for t in spec.inputs][-len(kept) :] == kept
    assert [t.name for t in spec.outputs][-len(kept) :] == [updated_cache_name(name) for name in kept]
    assert [t.name for t in (*spec.plain_inputs, *spec.inputs[-len(kept) :])] == [t.name for t in spec.inputs]
    assert [t.name for t in (*spec.plain_outputs, *spec.outputs[-len(kept) :])] == [t.name for t in spec.outputs]


def test_bytes_of_a_slot_are_those_of_its_tensors():
    spec, rows = decoder_spec("target", MIXED, max_pending=7), 11
    states = sum(4 * prod(shape) for shape in spec.state_shapes(1).values())
    assert MIXED.state_bytes(7) == states
    sizes = {"batch": 1, "max_seq": rows}
    caches = sum(4 * prod(sizes[d] if isinstance(d, str) else d for d in spec.input(n).dims) for n in spec.caches)
    assert rows * MIXED.cache_row_bytes == caches


def test_sizes_and_spec_come_back_from_json():
    assert dims_from_json(ModelDims, json.loads(json.dumps(json_from_dims(MIXED)))) == MIXED
    assert dims_from_json(ModelDims, json.loads(json.dumps(json_from_dims(PLAIN)))) == PLAIN
    for dims in (PLAIN, MIXED):
        spec = verified_spec(decoder_spec("target", dims, max_pending=5))
        assert spec_from_json(json.loads(json.dumps(spec.json_from_spec()))) == spec


def test_fewer_layers_keep_the_first_ones():
    cut = replace(MIXED, num_layers=2)
    assert cut.per_layer == MIXED.layer_dims[:2] and cut.attention_layers == (1,)


def test_a_borrowed_cache_has_the_sizes_of_its_own_layer():
    assert shared_cache(MIXED, "v_cache.3").dims == ("batch", 1, "shared_rows", 32)


def test_a_probe_keeps_all_nodes_of_steps_that_cannot_wait():
    spec = decoder_spec("target", MIXED, max_pending=4)
    few, many = (probe_inputs(spec, num_nodes=n, length=6) for n in (4, 5))
    assert few[SURE_NODES].tolist() == [0] and many[SURE_NODES].tolist() == [5]
    assert few["state_lengths"].tolist() == [6]


class Engine:
    def __init__(self):
        self.calls = []

    def move_slot(self, source, dest, rows=None):
        self.calls.append(("move", source, dest, rows))

    def swap_slots(self, first, second, rows):
        self.calls.append(("swap", first, second, rows))


@pytest.mark.parametrize("make", [list, lambda lengths: np.array(lengths, dtype=np.int64)])
def test_lengths_go_with_rows(make):
    engine, lengths = Engine(), make([5, 2, 9])
    cache = CacheRows(engine, lengths)
    cache.move(2, 1)
    assert list(lengths) == [5, 9, 9]
    cache.swap(0, 2)
    assert list(lengths) == [9, 9, 5]
    cache.copy(2, 0, 3)
    cache.copy(2, 1, 7)  # more than there are
    assert list(lengths) == [3, 5, 5]
    assert engine.calls == [("move", 2, 1, 9), ("swap", 0, 2, 9), ("move", 2, 0, 3), ("move", 2, 1, 5)]
    assert all(type(rows) is int for *_, rows in engine.calls)
