# SPDX-License-Identifier: Apache-2.0
"""CPU time of unmarked tests: those above REPORTED_S are listed after the run. No time makes a run fail."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

REPORTED_S = 0.5
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

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not (long := self.over(REPORTED_S)):
            return
        terminalreporter.section("unmarked tests that take long: a marker? (tests/README.md)")
        for seconds, name in long:
            terminalreporter.line(f"{seconds:6.2f} s CPU  {name}")


_START = pytest.StashKey[float]()
