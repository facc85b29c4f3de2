# SPDX-License-Identifier: Apache-2.0
"""While drafts are off, lookups are counted on the text; they come back where they would be faster, and lose little."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speccompile.core.protocols import StepTimes
from speccompile.drafting.lookup import Lookup
from speccompile.runtime import lookup_watch
from speccompile.runtime.comparison import MAX_LOSS, PLAIN
from speccompile.runtime.control import Controller
from speccompile.runtime.lookup_watch import FIRST_STEPS, LEAST_STEPS, RUN, SHARE, LookupWatch
from speccompile.runtime.requests import StepOutput
from tests.runtime.control_lab import sequences, tell

COST = 1.5


def watched(tokens: list[int]) -> Any:
    return SimpleNamespace(tokens=tokens)


def give(watch: LookupWatch, text: list[int], at_once: int = 1) -> None:
    """Decodes a text plainly after a prompt of one token; so many steps of 1 s are told together."""
    sequence = watched([0])
    for start in range(0, len(text), at_once):
        new = text[start : start + at_once]
        sequence.tokens += new
        watch.observe(sequence, float(len(new)), len(new))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each lookup takes `seconds`."""
    made = SimpleNamespace(seconds=0.0, now=0.0)

    def read() -> float:
        made.now += made.seconds
        return made.now

    monkeypatch.setattr(lookup_watch, "perf_counter", read)
    return made


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("at_once", [1, 5, 16])
def test_steps_are_counted_as_they_would_have_been_made(at_once: int) -> None:
    """Chains of three that are right for two tokens: three tokens a step, which ends with the first other token."""
    starts: list[int] = []

    def look_up(sequence: Any, length: int, num_slots: int) -> Lookup:
        assert num_slots == 2
        starts.append(length)
        last = sequence.tokens[length - 1]
        return Lookup([last + 1, last + 2, 99], COST)

    watch = LookupWatch(look_up, 2)
    give(watch, list(range(1, 1 + 3 * int(LEAST_STEPS))), at_once)
    assert watch.gain == 0  # one step less than is needed
    give(watch, list(range(1, 200)), at_once)
    assert watch.gain == pytest.approx(3 / COST)
    assert starts[:3] == [2, 5, 8]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("drafts", "tokens"), [(0, 1), (1, 2), (4, 5)])
def test_a_whole_chain_brings_one_more(drafts: int, tokens: int) -> None:
    watch = LookupWatch(
        lambda s, at_length, _: Lookup([s.tokens[at_length - 1] + at for at in range(1, 1 + drafts)], COST), 1
    )
    give(watch, list(range(1, 400)))
    assert watch.gain == pytest.approx(tokens / COST)


@pytest.mark.usefixtures("clock")
def test_a_step_ends_with_its_sequence_and_with_steps_that_were_not_plain() -> None:
    watch = LookupWatch(lambda s, end, _: Lookup([s.tokens[end - 1] + at for at in range(1, 12)], 1.0), 1)
    for _ in range(20):
        give(watch, list(range(1, 10)))  # each text is shorter than a step
    assert watch.gain == 0 and watch._num == 0
    sequence = watched([0])
    for at in range(1, 400, 2):
        sequence.tokens += [at, at + 1]  # one of the two came with a draft
        watch.observe(sequence, 1.0, 1)
    assert watch._num == 0


def test_a_step_that_gave_no_token_makes_no_lookup_look_back() -> None:
    lengths: list[int] = []

    def look_up(sequence: Any, length: int, num_slots: int) -> Lookup:
        lengths.append(length)
        return Lookup([], 1.0)

    watch, sequence = LookupWatch(look_up, 1), watched([0])
    for num_tokens in (3, 3, 2, 0):
        sequence.tokens += [1] * num_tokens
        watch.observe(sequence, 3.0, 3)
    assert lengths == sorted(set(lengths)) and lengths[-1] == len(sequence.tokens)


@pytest.mark.parametrize("look_s", [0.01, 0.3, 5.0])
def test_lookups_take_half_a_percent_of_the_time(clock: Any, look_s: float) -> None:
    clock.seconds, calls = look_s, count()
    watch = LookupWatch(lambda *_: Lookup([], float(next(calls) >= 0)), 1)
    num_steps = 20_000
    sequence = watched([0])
    for _ in range(num_steps):
        sequence.tokens.append(1)
        watch.observe(sequence, 1.0, 1)
    num = next(calls)
    assert num * look_s <= FIRST_STEPS + SHARE * num_steps + (RUN + 1) * look_s
    assert num >= min(0.7 * SHARE * num_steps / look_s, 0.9 * num_steps)


class Text:
    """Decoding of a text in which a lookup is right by turns; a plain step takes 1 s, one with drafts `COST`.

    Args:
        kept: by step number, how many drafts of the next step would be right.
        found: the same, as the lookup is seen to be.
        has_watch: lookups are counted.
    """

    def __init__(self, kept: Callable[[int], int], found: Callable[[int], int], has_watch: bool = True) -> None:
        self.kept, self.found, self.num_steps = kept, found, 0
        self.controller = Controller(self.look_up if has_watch else None)
        self.sequence = sequences(1)[0]
        self.total_s = self.num_tokens = 0.0
        self.drafted: list[bool] = []
        self.coming: list[int] = []  # tokens of the text after the last one

    def look_up(self, sequence: Any, length: int, num_slots: int) -> Lookup:
        assert length == len(sequence.tokens)
        while len(self.coming) < 9:
            self.coming.append(len(sequence.tokens) + len(self.coming))
        return Lookup([*self.coming[: self.found(self.num_steps)], -1], COST)

    def step(self) -> None:
        is_plain = self.controller.plan([self.sequence]) == PLAIN
        kept = 0 if is_plain else self.kept(self.num_steps)
        step_s = 1.0 if is_plain else COST
        while len(self.coming) <= kept:
            self.coming.append(len(self.sequence.tokens) + len(self.coming))
        new, self.coming = self.coming[: kept + 1], self.coming[kept + 1 :]
        self.sequence.tokens += new
        step = StepOutput(0, "", new, 0 if is_plain else 5, kept)
        tell(self.controller, [self.sequence], [step], StepTimes(0.0, step_s, step_s))
        self.num_steps, self.total_s = self.num_steps + 1, self.total_s + step_s
        self.num_tokens += len(new)
        self.drafted.append(not is_plain)


def late(at: int) -> int:
    """Nothing is right in the first 1000 steps, then two drafts of each step."""
    return 2 if at >= 1000 else 0


@pytest.mark.usefixtures("clock")
def test_drafts_come_back_soon_after_a_text_begins_to_repeat_itself() -> None:
    back = {}
    for has_watch in (True, False):
        text = Text(late, late, has_watch)
        for _ in range(6000):
            text.step()
        assert np.mean(text.drafted[400:1000]) < 0.1
        back[has_watch] = next(at for at in range(1000, 6000) if all(text.drafted[at : at + 60])) - 1000
    assert back[True] < 120 < back[False]


@pytest.mark.usefixtures("clock")
def test_drafts_that_only_seem_to_pay_lose_little() -> None:
    """Every count says that two drafts would be right; none is."""
    losses = {}
    for has_watch in (True, False):
        text = Text(lambda _: 0, lambda _: 2, has_watch)
        for _ in range(40_000):
            text.step()
        losses[has_watch] = text.total_s / text.num_tokens - 1
        assert text.controller.decisions()["1"]["drafts"] is False
    assert losses[True] - losses[False] < MAX_LOSS
    assert losses[False] < MAX_LOSS


@pytest.mark.usefixtures("clock")
def test_a_trial_that_was_right_is_no_reason_to_wait() -> None:
    """What can be looked up ends at step 3000 and comes again at 4500."""

    def kept(at: int) -> int:
        return 2 if 1000 <= at < 3000 or at >= 4500 else 0

    text = Text(kept, kept)
    for _ in range(6000):
        text.step()
    assert np.mean(text.drafted[1150:3000]) > 0.9
    assert np.mean(text.drafted[3600:4500]) < 0.15
    assert np.mean(text.drafted[4650:6000]) > 0.9
