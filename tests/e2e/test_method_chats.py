# SPDX-License-Identifier: Apache-2.0
"""Every method in chats whose turns share their cache: the text, and the drafts, are those of a prompt read anew."""

import itertools

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.requests import Request
from speccompile.runtime.sequences import RequestHandle
from speccompile.runtime.service import make_scheduler, open_outputs
from tests.method_rows import forms


def talk(engine, keeps, at_once):
    """Two more turns of three chats: all tokens, and the stats of every answer.

    Args:
        engine: of a method.
        keeps: caches for the next turns.
        at_once: the chats go on side by side; otherwise one after the other.
    """
    scheduler, stats, numbers = make_scheduler(engine, keep_prefixes=keeps, prefill_chunk=5), [], itertools.count()
    chats = [[(7 * i + k * k) % 24 for k in range(17 + i)] for i in range(3)]
    for turn in range(3):
        sequences = []
        for i, said in enumerate(chats):
            asked = SamplingParams(max_new_tokens=5 + i, ignore_eos=True)
            handle = RequestHandle(next(numbers), 0.0)
            open_outputs(handle, [Request(said, asked)], engine, "auto")
            sequences.append(handle.open[0])
            scheduler.add(handle)
            last = i == len(chats) - 1
            while scheduler.has_work and (last or not at_once):
                stats += [step_output.stats for _, step_output in scheduler.step() if step_output.stats]
        chats = [[*sequence.tokens, turn, 3 + turn] for sequence in sequences]
    return chats, stats


@pytest.mark.parametrize(("method", "form"), forms())
def test_a_chat_that_goes_on_in_its_own_cache_says_the_same(lab, method, form):
    engine = lab(method, form, "onnxruntime")
    (anew, stats), (kept, later), (beside, last) = (
        talk(engine, False, False),
        talk(engine, True, False),
        talk(engine, True, True),
    )
    assert anew == kept == beside
    assert [s["num_reused_tokens"] for s in stats] == [0] * 9
    # Drafts are as good as after a prompt that was read as a whole: rows and features of the draft are the same.
    assert [s["num_accepted"] for s in later] == [s["num_accepted"] for s in stats]
    for answers in (later, last):
        assert [s["num_reused_tokens"] > 10 for s in answers] == [False] * 3 + [True] * 6
    for said, slot in zip(anew, range(3), strict=True):
        length = len(said) - 2 - (5 + slot)
        [plain] = engine.generate(
            [said[:length]], SamplingParams(max_new_tokens=5 + slot, ignore_eos=True), speculative=False
        )
        assert plain.tokens == said[length:-2]


def turn_back(engine, keeps):
    """Returns the answers of a chat that goes back to before its last turn again and again, and their stats."""
    scheduler, stats, answers, numbers = (
        make_scheduler(engine, keep_prefixes=keeps, prefill_chunk=5),
        [],
        [],
        itertools.count(),
    )
    said = [(7 + k * k) % 24 for k in range(20)]
    for back in (4, 9, 2, 13, 5):
        handle = RequestHandle(next(numbers), 0.0)
        open_outputs(handle, [Request(said, SamplingParams(max_new_tokens=12, ignore_eos=True))], engine, "on")
        sequence = handle.open[0]
        scheduler.add(handle)
        while scheduler.has_work:
            stats += [step_output.stats for _, step_output in scheduler.step() if step_output.stats]
        answers.append((said, sequence.tokens[len(said) :]))
        said = [*sequence.tokens[:-back], back, 3]
    return answers, stats


@pytest.mark.parametrize(("method", "form"), dict(forms()).items())  # the last form of each: trees, where it has some
def test_a_chat_that_goes_back_drafts_as_after_a_prompt_that_was_read_anew(lab, method, form):
    """Nothing that a draft keeps of the tokens that were taken back has a part in its next drafts."""
    engine = lab(method, form, "onnxruntime")
    (anew, stats), (kept, later) = turn_back(engine, False), turn_back(engine, True)
    assert kept == anew
    counts = [[(s["num_draft_tokens"], s["num_accepted"]) for s in rows] for rows in (stats, later)]
    if method not in ("hybrid", "suffix"):  # which learn from other requests what is drafted
        assert counts[0] == counts[1]
    assert all(num for rows in counts for num, _ in rows)
    reused = [s["num_reused_tokens"] for s in later]
    assert reused[0] == 0 and all(num > 5 for num in reused[1:]), reused
    for said, answer in anew:
        [plain] = engine.generate([said], SamplingParams(max_new_tokens=12, ignore_eos=True), speculative=False)
        assert plain.tokens == answer
