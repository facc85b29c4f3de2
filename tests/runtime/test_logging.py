# SPDX-License-Identifier: Apache-2.0
"""What is logged and printed: recoveries, steps, decisions to draft, and what `generate --explain` says of steps."""

import logging
import re

import pytest

from speccompile.bundle.stage_cache import StageCache
from speccompile.cli.output import show_logs
from speccompile.core.protocols import StepTimes
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.control import PLAIN, Controller, controller_of
from speccompile.runtime.draft_report import ExplainedPlanner, explain_step
from speccompile.runtime.requests import StepOutput, StepTrace
from tests.golden.method_fakes import make_engine
from tests.runtime.control_lab import sequences
from tests.runtime.scheduler_lab import Bench


def test_a_scheduler_that_resets_its_caches_says_so(caplog, monkeypatch):
    bench = Bench()
    bench.submit([1, 2, 3])
    bench.step()

    def failing(feeds, first_slot=0):
        raise RuntimeFault("engine target", "a fault", "none", "Try again.")

    monkeypatch.setattr(bench.target, "run", failing)
    bench.step()
    [record] = caplog.records
    assert (record.name, record.levelname) == ("speccompile.runtime.scheduler", "WARNING")
    assert "1 sequences end and the caches are reset" in record.message and "a fault" in record.message


def test_a_damaged_entry_of_the_cache_and_one_that_is_evicted_are_named(caplog, tmp_path):
    caplog.set_level(logging.INFO, "speccompile")
    cache = StageCache(tmp_path / "cache", limit_bytes=1000)

    def fetch(key, dest):
        return cache.fetch("stage", key, dest, lambda folder: (folder / "a").write_text("x" * 600))

    assert not fetch("k" * 64, tmp_path / "one") and not caplog.records
    (tmp_path / "cache/stage" / ("k" * 64) / "result/a").write_text("y")
    assert not fetch("k" * 64, tmp_path / "two")
    assert [(r.levelname, "done again" in r.message) for r in caplog.records] == [("WARNING", True)]
    assert not fetch("l" * 64, tmp_path / "three")
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"] and "1000 bytes" in caplog.text


def test_the_command_line_prints_warnings_once_and_the_library_nothing(capsys):
    logger = logging.getLogger("speccompile")
    before, level = list(logger.handlers), logger.level
    assert any(isinstance(handler, logging.NullHandler) for handler in before)
    try:
        show_logs()
        show_logs()
        logging.getLogger("speccompile.toy").warning("a %s", "thing")
        logging.getLogger("speccompile.toy").info("a detail")
        assert capsys.readouterr().err == "warning: a thing\n"
        show_logs("info")
        logging.getLogger("speccompile.toy").info("a detail")
        logging.getLogger("speccompile.toy").debug("a smaller one")
        assert capsys.readouterr().err == "info: toy: a detail\n"
    finally:
        logger.handlers[:] = before
        logger.setLevel(level)


@pytest.fixture
def debug(caplog):
    """Returns a function that gives the messages of a module so far."""
    caplog.set_level(logging.DEBUG, "speccompile")
    return lambda name: [record.message for record in caplog.records if record.name == f"speccompile.{name}"]


def test_each_step_and_each_decision_to_draft_is_logged(debug):
    engine = make_engine("eagle3")
    [generation] = engine.generate(["abc"], SamplingParams(max_new_tokens=16, ignore_eos=True))
    steps = debug("runtime.loop")
    assert len(steps) == generation.stats["num_steps"]
    drafts, accepted = (generation.stats[key] for key in ("num_draft_tokens", "num_accepted"))
    found = [tuple(map(int, re.findall(r"(\d+) (?:sequences|drafts|accepted)", line))) for line in steps]
    assert found[0][0] == 1 and sum(row[1] for row in found) == drafts > 0 and sum(row[2] for row in found) == accepted
    assert any(line.startswith("drafts on: ") and "of a step each" in line for line in debug("drafting.budget"))


def test_a_change_between_drafts_and_none_is_logged(debug):
    controller, active = Controller(), sequences(1)
    for _ in range(200):
        num = 0 if controller.plan(active) == PLAIN else 2
        step = StepOutput(0, "", [1] * (1 + num), num_draft_tokens=num, num_accepted=num)
        controller.observe(active, [step], StepTimes(0.0, 1e-3, 1e-3))
    assert debug("runtime.control") == ["drafts on at batch 1: gain 3.00"]


def explained(method, **sampling):
    """Returns (step, reason) of each step of a stream with a controller."""
    engine = make_engine(method)
    engine.controller = planner = ExplainedPlanner(controller_of(engine.proposer), engine.proposer)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, **sampling)
    return [(step, planner.reason(step)) for step in engine.stream("abc", params, wants_trace=True)]


def test_reasons_follow_the_controller_from_plain_steps_to_drafts():
    steps = explained("eagle3")[1:]  # the first token comes with the prompt
    is_drafted = [bool(step.num_draft_tokens) for step, _ in steps]
    first = is_drafted.index(True)
    assert first > 1 and {reason for _, reason in steps[:first]} == {"plain steps are measured before drafts"}
    assert steps[first][1] == "drafts on: not yet compared with plain decoding"
    assert all(reason.startswith(("drafts", "a plain", "plain steps", "a step")) for _, reason in steps)


def test_drawn_drafts_are_not_the_controllers():
    reasons = {reason for _, reason in explained("draft_model-auto", temperature=0.8)}
    assert reasons == {"drafts are drawn: recorded costs decide, not the clock"}


def test_an_explained_text_is_the_same():
    engine = make_engine("eagle3")
    [generation] = engine.generate(["abc"], SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert [token for step, _ in explained("eagle3") for token in step.tokens] == generation.tokens


TRACE = StepTrace([1, 2, 3, 4], [-1, 0, 0, 1], [0, 1], 9, ["a", " b", "c", "d"])


@pytest.mark.parametrize(
    ("number", "step", "text"),
    [
        (1, StepOutput(0, "x", [9], trace=TRACE), "step 1: ' x'; with the prompt"),
        (2, StepOutput(0, "x", [9], trace=TRACE), "step 2: ' x'; drafts off"),
        (
            3,
            StepOutput(0, "x", [2, 9], num_draft_tokens=3, num_accepted=1, trace=TRACE),
            "step 3: 3 draft tokens, 1 accepted; drafts off\n"
            "  'a'*\n  ├─ ' b'* > 'd'\n  └─ 'c'\n  then ' x' (recovered)",
        ),
    ],
)
def test_a_step_is_a_line_and_its_tree(number, step, text):
    assert explain_step(number, step, "drafts off", "' x'") == text
