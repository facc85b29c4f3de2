# SPDX-License-Identifier: Apache-2.0
"""Interleaved measurement: processes with one or more modes each, one running at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from speccompile.errors import RuntimeFault

Runs = dict[str, list[list[dict[str, Any]]]]  # by mode: rounds of one result a prompt


class Worker:
    """A process of modes. Between its turns it is stopped, so that threads which spin cost the others nothing.

    Args:
        job: see `benchmark.worker`. Three keys are read here: `prefix` of its modes in results; `command` runs another
            program that talks as that does; `environment` is that program's.

    Raises:
        RuntimeFault: the process cannot load its model: the error that it met, or the end of what it printed.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._prefix: str = job.get("prefix", "")
        self.modes: list[str] = [self._prefix + mode for mode in job["modes"]]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            job.get("command", [sys.executable, "-m", "speccompile.benchmark.worker"]),
            env=job.get("environment"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        self._send(json.dumps({key: value for key, value in job.items() if key not in ("command", "environment")}))
        try:
            self._receive()
        except RuntimeFault:
            self.close()
            raise
        self._pause(True)

    def run(self, mode: str, prompt: int) -> dict[str, Any]:
        """Decodes one prompt in one of its modes. Raises RuntimeFault: the process has died, with what it printed."""
        self._pause(False)
        self._send(json.dumps([mode.removeprefix(self._prefix), prompt]))
        result = self._receive()
        self._pause(True)
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the reason is in the log, which `_receive` shows
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            got = f"exit code {self._process.returncode}: {_reason_from_log(self._log.read())}"
            raise RuntimeFault(
                f"bench mode {', '.join(self.modes)}", got, "a result", "See the message, or leave the mode out."
            )
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise RuntimeFault(**result["error"])
        return result

    def _pause(self, is_paused: bool) -> None:
        if hasattr(signal, "SIGSTOP"):
            os.kill(self._process.pid, signal.SIGSTOP if is_paused else signal.SIGCONT)


def _reason_from_log(log: str) -> str:
    tail = log.strip()
    _, mark, last = tail.rpartition("Traceback (most recent call last):")
    if mark:
        tail = "\n".join(line for line in last.splitlines() if line.strip() and not line.startswith(" "))
    return tail[-600:]


@contextlib.contextmanager
def open_workers(
    jobs: Sequence[Mapping[str, Any]], leave_out: Callable[[Mapping[str, Any], RuntimeFault], None] | None = None
) -> Iterator[list[Worker]]:
    """Starts the processes one after another; all are ended in the end.

    Args:
        leave_out: called with a job with `optional: true` that cannot load, which is then left out.

    Raises:
        RuntimeFault: another of them cannot load its model.
    """
    workers: list[Worker] = []
    try:
        for job in jobs:
            try:
                workers.append(Worker(job))
            except RuntimeFault as error:
                if leave_out is None or not job.get("optional", False):
                    raise
                leave_out(job, error)
        yield workers
    finally:
        for worker in workers:
            worker.close()


def run_rounds(
    workers: Sequence[Worker], num_prompts: int, repeats: int, progress: Callable[[str], None] = lambda mode: None
) -> Runs:
    """Decodes every prompt with every mode, in turn, `repeats` times; the order of the modes rotates."""
    modes = [(mode, worker) for worker in workers for mode in worker.modes]
    runs: Runs = {mode: [] for mode, _ in modes}
    for turn in range(repeats):
        for rounds in runs.values():
            rounds.append([])
        for prompt in range(num_prompts):
            first = (turn + prompt) % len(modes)
            for mode, worker in (*modes[first:], *modes[:first]):
                runs[mode][-1].append(worker.run(mode, prompt))
                progress(mode)
    return runs
