# SPDX-License-Identifier: Apache-2.0
"""CPU time of unmarked tests: above REPORTED_S a test is listed, above REFUSED_S the run fails.

CPU seconds, not wall seconds, and a wide margin between the two bounds: a busy machine makes no test fail.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

REPORTED_S, REFUSED_S = 0.5, 3.0
_KEY = "cpu_s"


def cpu_s() -> float:
    """Returns the CPU seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


class CpuTimes:
    """A pytest plugin; it works under pytest-xdist, whose workers send the figures with their reports."""

    def __init__(self) -> None:
        self.by_test: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        item.stash[_START] = cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        report.user_properties.append((_KEY, cpu_s() - item.stash[_START]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = [value for name, value in report.user_properties if name == _KEY]
        if report.when == "teardown" and seconds:
            self.by_test[report.nodeid] = max(seconds)

    def over(self, bound_s: float) -> list[tuple[float, str]]:
        """Returns (CPU seconds, test) of the tests above the bound, the longest first."""
        return sorted(((s, name) for name, s in self.by_test.items() if s > bound_s), reverse=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self.over(REFUSED_S) and not hasattr(session.config, "workerinput"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not (long := self.over(REPORTED_S)):
            return
        terminalreporter.section("unmarked tests that take long")
        for seconds, name in long:
            verdict = "TOO LONG, give it a marker (tests/README.md)" if seconds > REFUSED_S else "long"
            terminalreporter.line(f"{seconds:6.2f} s CPU  {name}  ({verdict})")


_START = pytest.StashKey[float]()
