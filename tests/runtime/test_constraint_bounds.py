# SPDX-License-Identifier: Apache-2.0
"""Constraints are tried in a process of their own: what ends it is a refusal, and others go on."""

import asyncio
import gc
import os
import re
import signal
import time

import pytest

from speccompile.core.sampling_params import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime import constraint_limits
from speccompile.runtime import grammars as module
from speccompile.runtime.requests import Busy
from tests.runtime.constraint_bombs import BOMBS
from tests.runtime.grammar_lab import make_grammars

pytest.importorskip("llguidance")
pytestmark = pytest.mark.live
PATTERNS = StructuredOutputs(**BOMBS["patterns of properties"][0])


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_with_its_reason(grammars, name):
    given, message = BOMBS[name]
    with pytest.raises(RuntimeFault) as fault:
        grammars.compile(StructuredOutputs(**given))
    assert re.search(message, fault.value.got) and fault.value.expected and fault.value.todo
    assert len(str(fault.value)) < 500 and "<non" not in fault.value.got
    assert grammars.compile(StructuredOutputs(regex=f"a[{name[:1]}]")) is not None


@pytest.mark.parametrize(
    "given",
    [
        {"choice": [f"choice number {at}" for at in range(2500)]},
        {"choice": ["a", "ab", "abc"]},
        {"grammar": 'start: "a" start | "b"'},
        {"grammar": 'start: start "a" | "b"'},
        {"grammar": 'start: e\ne: e "+" t | t\nt: /[0-9]/ | "(" e ")"'},
        {"json": {"type": "array", "items": {"$ref": "#"}}},
        {"json": {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(300)}}},
    ],
)
def test_large_and_recursive_constraints_within_the_bounds_work(grammars, given):
    wanted = StructuredOutputs(**given)
    matcher = grammars.matcher(wanted, [])
    text = []
    for _ in range(40):
        text.append(int(matcher.allowed([]).nonzero()[0][-1]))
        matcher.read(text)
        if not matcher.allowed([])[1:].any():
            break


def test_others_pass_those_that_take_long(grammars):
    grammars.compile(StructuredOutputs(regex="b"))  # the process is there
    slow = [grammars._checker.submit(PATTERNS) for _ in range(constraint_limits.MAX_JOBS - 1)]
    for at in range(3):
        grammars.compile(StructuredOutputs(regex=f"b{at}"))
        assert not any(future.done() for future in slow)
    for future in slow:
        future.cancel()


def test_cancelling_and_closing_end_the_work_at_once(grammars):
    async def cancelled():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await grammars.prepare(PATTERNS)

    async def closed():
        waiting = asyncio.ensure_future(grammars.prepare(PATTERNS))
        await asyncio.sleep(0.3)
        grammars.close()
        with pytest.raises(Busy):
            await waiting

    grammars.compile(StructuredOutputs(regex="c0"))  # the process is there
    for work in (cancelled, closed):
        started_s = time.monotonic()
        asyncio.run(work())
        assert time.monotonic() - started_s < 2
    assert grammars.compile(StructuredOutputs(regex="c1")) is not None  # by another process


def test_nothing_is_kept_of_a_constraint_that_is_cancelled_while_it_waits(grammars):
    grammars.compile(StructuredOutputs(regex="g0"))  # the process is there
    checker = grammars._checker
    for future in [checker.submit(PATTERNS) for _ in range(3 * constraint_limits.MAX_JOBS)]:
        future.cancel()
    assert checker.submit(StructuredOutputs(regex="g1")).result(20)
    end_s = time.monotonic() + 10
    while checker._open and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not checker._open


def test_a_process_that_was_killed_is_replaced(grammars):
    grammars.compile(StructuredOutputs(regex="d0"))
    waiting = grammars._checker.submit(PATTERNS)
    os.kill(grammars._checker._process.child.pid, signal.SIGKILL)
    with pytest.raises(RuntimeFault, match="its process ended with -9"):
        waiting.result(10)
    assert grammars.compile(StructuredOutputs(regex="d1")) is not None


def test_compiled_grammars_are_kept_by_their_bytes(grammars, monkeypatch):
    sizes = []
    for at in range(3):
        grammars.compile(StructuredOutputs(choice=[f"{at} {number}" for number in range(1000)]))
        sizes.append(grammars.num_kept_bytes)
    assert sizes[2] - sizes[1] > 1 << 17
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", sizes[2] - sizes[0])
    first = StructuredOutputs(regex="e")
    found = grammars.compile(first)
    assert grammars.compile(first) is found and grammars.num_kept_bytes <= module.MAX_KEPT_BYTES
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 1)
    assert grammars.compile(StructuredOutputs(regex="f")) is not None
    assert grammars.compile(first) is not found


def test_a_grammar_is_kept_from_its_preparation_to_its_request(grammars, monkeypatch):
    wanted = [StructuredOutputs(choice=[f"{at} {number}" for number in range(1000)]) for at in range(4)]

    async def prepare_all():
        await asyncio.gather(*(grammars.prepare(one) for one in wanted))

    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 1)
    asyncio.run(prepare_all())
    sizes = [grammars.num_kept_bytes]
    with monkeypatch.context() as patched:
        patched.setattr(grammars._checker, "submit", None)  # nothing is compiled again
        for one in wanted[:2]:
            grammars.matcher(one, [])
    del wanted[2], one  # a request that never came
    for at in range(2):
        grammars.compile(StructuredOutputs(regex=f"h{at}"))
        sizes.append(grammars.num_kept_bytes)
    assert sizes[0] > 2 * sizes[1] > 0 and len(grammars._kept) == 2
    grammars.matcher(wanted[2], [])
    grammars.compile(StructuredOutputs(regex="h2"))
    assert len(grammars._kept) == 1


def test_a_grammar_that_becomes_slow_ends_its_text(grammars, monkeypatch):
    matcher = grammars.matcher(StructuredOutputs(regex="a+"), [])
    assert matcher.allowed([]).any()
    monkeypatch.setattr(module, "_MAX_MASK_S", -1.0)
    matcher = grammars.matcher(StructuredOutputs(regex="a+"), [])
    with pytest.raises(module.GrammarFault, match=r"a token that takes 0\.0 s to choose"):
        matcher.allowed([])


def test_a_walk_that_becomes_slow_is_told_from_one_that_is_slow():
    steady, growing = [0.001] * 300, [0.00001 * at for at in range(300)]
    assert not constraint_limits._grows(steady) and constraint_limits._grows(growing)
    assert not constraint_limits._grows(growing[:40])


def test_the_process_ends_with_grammars_that_nobody_closes():
    grammars = make_grammars()
    assert grammars.compile(StructuredOutputs(regex="a")) is not None
    child = grammars._checker._process.child
    assert child.poll() is None
    del grammars
    gc.collect()
    assert child.wait(10) == -signal.SIGKILL
