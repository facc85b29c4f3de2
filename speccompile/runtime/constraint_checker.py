# SPDX-License-Identifier: Apache-2.0
"""Tries constraints in a process of its own, so that none ends this one, or holds it up: see `constraint_worker`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple

from speccompile.core.sampling_params import WHERE, StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Busy

_COMMAND = (sys.executable, "-m", "speccompile.runtime.constraint_worker")


_LEAST_BYTES = 1 << 16  # of a compiled grammar


@dataclass(frozen=True)
class Checked:
    """A constraint that texts can follow."""

    grammar: str
    num_bytes: int
    growth: int = 0  # tokens by which one token may lengthen a text's shortest ending
    ending: tuple[int, ...] | None = None  # a short text of it, as tokens; None: it holds no JSON, or none was found


class Compiled(NamedTuple):
    """A grammar."""

    matcher: Any  # `llguidance.LLMatcher` at the start of a text; it is shared: copy it
    checked: Checked

    @property
    def num_bytes(self) -> int:
        return self.checked.num_bytes + 2 * len(self.checked.grammar) + _LEAST_BYTES


class _Process:
    """The process, and what it is to read."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self.lines: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self.child = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches this process alone
        )

    def feed(self, make_source: Callable[[], Mapping[str, Any]]) -> None:
        """Writes lines until there is a None, or nobody who reads them."""
        assert self.child.stdin is not None
        with suppress(BrokenPipeError), self.child.stdin as stdin:
            line: Mapping[str, Any] | None = make_source()
            while line is not None:
                stdin.write(json.dumps(line).encode() + b"\n")
                stdin.flush()
                line = self.lines.get()


class ConstraintChecker:
    """Owns the process; it is started at the first constraint, and again when it has ended."""

    def __init__(self, make_source: Callable[[], Mapping[str, Any]]) -> None:
        self._make_source = make_source
        self._lock = threading.Lock()
        self._numbers = count()
        self._process: _Process | None = None
        self._open: dict[int, tuple[_Process, StructuredOutputs, Future[Checked]]] = {}

    def submit(self, wanted: StructuredOutputs) -> Future[Checked]:
        """Returns the future of a constraint, which raises RuntimeFault or `Busy`; cancelling it ends the trial."""
        future: Future[Checked] = Future()
        with self._lock:
            number, process = next(self._numbers), self._process or self._start()
            self._process, self._open[number] = process, (process, wanted, future)
        process.lines.put({"job": number, "constraint": {**asdict(wanted), "reasoning": None}})
        future.add_done_callback(lambda done: process.lines.put({"cancel": number}) if done.cancelled() else None)
        return future

    def close(self) -> None:
        """Ends the process; open futures get a `Busy`. A later `submit` starts another one."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.child.pid, signal.SIGKILL)  # with the jobs

    def _start(self) -> _Process:
        process = _Process()
        for work, arguments in ((process.feed, (self._make_source,)), (self._read, (process,))):
            threading.Thread(target=work, args=arguments, name="speccompile-constraints", daemon=True).start()
        return process

    def _read(self, process: _Process) -> None:
        """Reads answers until the process ends."""
        assert process.child.stdout is not None
        with process.child.stdout as stdout:
            for line in stdout:
                answer = json.loads(line)
                with self._lock:
                    _, wanted, future = self._open.pop(answer["job"])
                _resolve(future, wanted, answer)
        process.lines.put(None)
        code = process.child.wait()
        with self._lock:
            is_closed = self._process is not process
            self._process = None if self._process is process else self._process
            lost = [number for number, (owner, *_) in self._open.items() if owner is process]
            left = [self._open.pop(number) for number in lost]
        for _, wanted, future in left:
            _resolve(future, wanted, {"is_closed": True} if is_closed else {"died": f"its process ended with {code}"})


def _resolve(future: Future[Checked], wanted: StructuredOutputs, answer: Mapping[str, Any]) -> None:
    with suppress(InvalidStateError):  # cancelled meanwhile
        if "grammar" in answer:
            ending = answer["ending"]
            found = Checked(answer["grammar"], answer["num_bytes"], answer["growth"], ending and tuple(ending))
            future.set_result(found)
        elif "is_busy" in answer:
            todo = "Send the request again later."
            future.set_exception(Busy("queue", "too many constraints that wait to be compiled", "less of them", todo))
        elif "is_closed" in answer:
            future.set_exception(shutting_down())
        else:
            expected, todo = "one within the bounds of docs/reference/server.md", f"Simplify the {wanted.kind}."
            got = f"a {wanted.kind} that cannot be compiled: {answer.get('died')}"
            parts = {"where": f"{WHERE} ({wanted.kind})", "got": got, "expected": expected, "todo": todo, **answer}
            future.set_exception(RuntimeFault(parts["where"], parts["got"], parts["expected"], parts["todo"]))


def shutting_down() -> Busy:
    got, todo = "a constraint to a service that does not run", "Send the request to another one, or start it again."
    return Busy("service", got, "a running service", todo)
