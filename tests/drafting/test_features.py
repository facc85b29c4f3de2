# SPDX-License-Identifier: Apache-2.0
"""Features that a draft has not read yet: kept on the device, copied to the host before they would be lost."""

from functools import partial
from types import SimpleNamespace

import numpy as np

from speccompile.core.tree import Verdict
from speccompile.drafting.acceptance import DraftState
from speccompile.drafting.feature_drafts import MAX_STATES, PendingFeatures
from tests.speculators.hidden_lm import OnDevice

WIDTH = 2


class Target:
    """A target whose outputs are all different numbers, on a device; features are twice these."""

    def __init__(self):
        self.num_made = 0

    def step(self, batch, nodes):
        size = batch * nodes * WIDTH
        self.num_made += size
        return {"hidden": np.arange(self.num_made, self.num_made + size, dtype=np.float32).reshape(batch, nodes, WIDTH)}


def make(outputs):
    return OnDevice(outputs["hidden"] * 2)


def make_sequences(num):
    return [SimpleNamespace(draft_state=DraftState(None), has_draft=True) for _ in range(num)]


def keep(pending, sequences, outputs, paths):
    nodes = outputs["hidden"].shape[1]
    path = np.array([row + [-1] * (nodes - len(row)) for row in paths])
    num = np.array([len(row) - 1 for row in paths])
    pending.keep(sequences, Verdict(path, num, num), outputs)


def rows_of(taken, slot, num):
    features, rows = taken
    held = features.array if isinstance(features, OnDevice) else features
    return held[slot, rows[slot, :num]]


def test_features_read_in_the_next_step_stay_on_the_device():
    target, pending, sequences = Target(), PendingFeatures(WIDTH, make, ["hidden"]), make_sequences(3)
    OnDevice.num_copies = 0
    for paths in ([[0, 2], [0]], [[0], [0, 1, 2]]):
        outputs = target.step(2, 3)
        keep(pending, sequences[:2], outputs, paths)
        assert [pending.count(sequence) for sequence in sequences] == [*map(len, paths), 0]
        taken = pending.take(sequences[:2], max(map(len, paths)))
        for slot, path in enumerate(paths):
            assert np.array_equal(rows_of(taken, slot, len(path)), 2 * outputs["hidden"][slot, path])
        pending.flush()
        assert [pending.count(sequence) for sequence in sequences] == [0, 0, 0]
    assert OnDevice.num_copies == 0


def test_features_that_would_be_lost_are_copied_to_the_host_in_order():
    target, pending, sequences = Target(), PendingFeatures(WIDTH, make, ["hidden"]), make_sequences(2)
    pending.add(sequences[0], {"hidden": np.array([[[3.5, 4.0]]])}, 0, np.array([0]))
    first, second = target.step(2, 3), target.step(2, 3)
    keep(pending, sequences, first, [[0, 1], [0]])
    pending.flush()  # nothing was drafted
    keep(pending, sequences, second, [[0], [0, 2]])
    assert [pending.count(sequence) for sequence in sequences] == [4, 3]
    wanted = np.concatenate(([[7, 8]], 2 * first["hidden"][0, :2], 2 * second["hidden"][0, :1]))
    assert np.array_equal(pending.take_rows(sequences[0], 1), wanted[:1])
    taken = pending.take(sequences, 3)
    assert np.array_equal(rows_of(taken, 0, 3), wanted[1:])
    assert np.array_equal(rows_of(taken, 1, 3)[:1], 2 * first["hidden"][1, :1])
    assert np.array_equal(rows_of(taken, 1, 3)[1:], 2 * second["hidden"][1, [0, 2]])


def test_rows_move_with_their_sequence():
    target, pending, (ended, other, last, new) = Target(), PendingFeatures(WIDTH, make, ["hidden"]), make_sequences(4)
    outputs = target.step(3, 2)
    keep(pending, [ended, other, last], outputs, [[0], [0, 1], [0, 1]])
    taken = pending.take([last, other], 2)  # the first has ended, the last one is in its slot now
    assert np.array_equal(rows_of(taken, 0, 2), 2 * outputs["hidden"][2])
    assert np.array_equal(rows_of(taken, 1, 2), 2 * outputs["hidden"][1])
    outputs = target.step(2, 2)
    keep(pending, [last, other], outputs, [[0], [0, 1]])
    assert [pending.count(sequence) for sequence in (last, other, new)] == [1, 2, 0]
    features, _ = pending.take([last, new], 1)
    assert np.array_equal(features[:, 0], [2 * outputs["hidden"][0, 0], np.zeros(WIDTH)])
    assert pending.count(other) == 2


def test_nothing_is_kept_for_a_sequence_without_a_draft():
    target, pending, (drafting, plain) = Target(), PendingFeatures(WIDTH, make, ["hidden"]), make_sequences(2)
    plain.has_draft = False
    outputs = target.step(2, 2)
    keep(pending, [drafting, plain], outputs, [[0, 1], [0]])
    assert [pending.count(sequence) for sequence in (drafting, plain)] == [2, 0]
    pending.flush()
    assert not plain.draft_state.states and not plain.draft_state.features
    keep(pending, [plain, drafting], target.step(2, 1), [[0], [0]])
    pending.flush()
    assert [pending.count(sequence) for sequence in (drafting, plain)] == [3, 0]
    assert np.array_equal(pending.take_rows(drafting, 2), 2 * outputs["hidden"][0])


def count_and_make(sizes, outputs):
    sizes.append(outputs["hidden"].shape[1])
    return make(outputs)


def test_features_of_a_long_plain_decoding_are_made_many_at_once():
    target, (sequence,), sizes = Target(), make_sequences(1), []

    pending, wanted = PendingFeatures(WIDTH, partial(count_and_make, sizes), ["hidden"]), []
    for _ in range(2 * MAX_STATES + 5):
        outputs = target.step(1, 1)
        keep(pending, [sequence], outputs, [[0]])
        pending.flush()
        wanted.append(2 * outputs["hidden"][0, 0])
        assert len(sequence.draft_state.states) < MAX_STATES
    assert sizes == [MAX_STATES, MAX_STATES]
    assert pending.count(sequence) == len(wanted)
    assert np.array_equal(rows_of(pending.take([sequence], len(wanted)), 0, len(wanted)), wanted)


def test_no_more_features_are_made_at_once_than_a_prompt_has_in_a_chunk():
    """Steps whose drafts a grammar forces leave several states each, and TensorRT's graph has a largest size."""
    target, (sequence,), sizes = Target(), make_sequences(1), []

    pending, wanted = PendingFeatures(WIDTH, partial(count_and_make, sizes), ["hidden"]), []
    for _ in range(MAX_STATES):
        outputs = target.step(1, 4)
        keep(pending, [sequence], outputs, [[0, 1, 2]])
        pending.flush()
        wanted.append(2 * outputs["hidden"][0, :3])
    assert np.array_equal(pending.take_rows(sequence, 3 * MAX_STATES), np.concatenate(wanted))
    assert max(sizes) <= MAX_STATES
