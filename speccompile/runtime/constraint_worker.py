# SPDX-License-Identifier: Apache-2.0
"""The process that tries constraints, `python -m speccompile.runtime.constraint_worker`.

Lines of JSON come in: the vocabulary, then `{"job", "constraint"}` and `{"cancel"}`. One line goes out for each job:
`{"job", "grammar", ..}`, `{"job", "where", "got", "expected", "todo"}`, `{"job", "died"}` or `{"job", "is_busy"}`. Each
job runs in a fork with bounds of time, memory and stack; this process has one thread, so that it may fork.
"""

from __future__ import annotations

import json
import math
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from speccompile.core.sampling_params import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime.constraint_forms import grammar_from_constraint, refuse
from speccompile.runtime.constraint_limits import (
    EMPTY,
    MAX_BYTES,
    MAX_CPU_S,
    MAX_JOBS,
    MAX_QUEUE_S,
    MAX_STACK_BYTES,
    MAX_TURN_S,
    MAX_WALL_S,
    fault_of_matcher,
    make_matcher,
    make_vocabulary,
    try_matcher,
)
from speccompile.runtime.grammar_endings import MAX_ENDING, MAX_TEXTS, TokenKinds, find_ending
from speccompile.runtime.schema_sizes import growth_of_grammar

_SIZE = 1 << 20
_ENDS: dict[int, str] = {
    signal.SIGSEGV: "it is nested too deeply",
    signal.SIGBUS: "it is nested too deeply",
    signal.SIGXCPU: f"it takes more than {MAX_CPU_S} s to compile",
    signal.SIGALRM: f"it takes more than {MAX_WALL_S} s to compile",
    signal.SIGABRT: f"it takes more than {MAX_BYTES >> 20} MiB to compile",
}


@dataclass
class _Job:
    number: int
    constraint: dict[str, Any]
    asked_s: float = field(default_factory=time.monotonic)
    started_s: float = 0.0
    is_late: bool = False
    pid: int = 0
    pipe: int = -1
    parts: list[bytes] = field(default_factory=list)


def _bytes() -> tuple[int, int]:
    virtual, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
    return virtual * resource.getpagesize(), (resident - shared) * resource.getpagesize()


def _bound() -> None:
    for kind, bound in (
        (resource.RLIMIT_CPU, MAX_CPU_S),
        (resource.RLIMIT_AS, _bytes()[0] + MAX_BYTES),
        (resource.RLIMIT_STACK, MAX_STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        soft = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (soft, hard))
    signal.alarm(MAX_WALL_S)
    os.nice(5)  # those who decode come first


def run_job(job: _Job, vocabulary: Any, kinds: TokenKinds) -> dict[str, Any]:
    """Returns the answer to a job, in its own process."""
    wanted = StructuredOutputs(**job.constraint)
    before = _bytes()[1]
    try:
        grammar = grammar_from_constraint(wanted, vocabulary)
        matcher = make_matcher(vocabulary, grammar)
        if reason := fault_of_matcher(matcher) or try_matcher(matcher, frozenset(vocabulary.eos_tokens)):
            refuse(wanted, reason)
        growth = growth_of_grammar(grammar, lambda text: len(vocabulary.tokenize_str(text)))
        if growth == math.inf:
            refuse(wanted, EMPTY)
        ending = None if growth is None else find_ending(matcher, kinds, MAX_ENDING, 2 * MAX_TEXTS)
    except RuntimeFault as fault:
        return {"where": fault.where, "got": fault.got, "expected": fault.expected, "todo": fault.todo}
    num_bytes = max(_bytes()[1] - before, 0)
    return {"grammar": grammar, "num_bytes": num_bytes, "growth": growth or 0, "ending": ending}


class Worker:
    """Runs jobs, some at a time, in the order in which they came."""

    def __init__(self, vocabulary: Any, read: bytes) -> None:
        self._vocabulary, self._kinds = vocabulary, TokenKinds(vocabulary, vocabulary.vocab_size)
        self._waiting: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}  # by number
        self._selector = selectors.DefaultSelector()
        self._read = b""
        self._feed(read)

    def serve(self) -> None:
        """Runs until its input ends; the jobs end with it."""
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            while self._waiting and len(self._running) < MAX_JOBS:
                self._start(self._waiting.popleft())
            for key, _ in self._selector.select(self._make_room()):
                if key.fd == 0 and not self._take():
                    return
                if key.data is not None:
                    self._follow(key.data)

    def _make_room(self) -> float | None:
        if not self._waiting:
            return None
        oldest = min(self._running.values(), key=lambda job: job.started_s)
        left_s = oldest.started_s + MAX_TURN_S - time.monotonic()
        if left_s <= 0 and not oldest.is_late:
            oldest.is_late = True
            os.kill(oldest.pid, signal.SIGKILL)
        return max(left_s, 0.05)

    def _take(self) -> bool:
        data = os.read(0, _SIZE)
        self._feed(data)
        if not data:
            for job in self._running.values():
                os.kill(job.pid, signal.SIGKILL)
        return bool(data)

    def _feed(self, data: bytes) -> None:
        *lines, self._read = (self._read + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if (number := command.get("cancel")) is None:
                self._waiting.append(_Job(command["job"], command["constraint"]))
            elif number in self._running:
                os.kill(self._running[number].pid, signal.SIGKILL)
            else:
                for job in [job for job in self._waiting if job.number == number]:
                    self._waiting.remove(job)
                    self._answer(job, {"is_busy": True})  # or the parent would keep its constraint

    def _start(self, job: _Job) -> None:
        if time.monotonic() - job.asked_s > MAX_QUEUE_S:
            self._answer(job, {"is_busy": True})
            return
        job.pipe, writer = os.pipe()
        job.started_s = time.monotonic()
        job.pid = os.fork()
        if job.pid == 0:
            os.dup2(writer, 2)  # a panic says why
            os.dup2(writer, 1)  # or the reader of this process would wait for the fork too
            _run_in_fork(job, self._vocabulary, self._kinds, writer)
        os.close(writer)
        self._running[job.number] = job
        self._selector.register(job.pipe, selectors.EVENT_READ, job)

    def _follow(self, job: _Job) -> None:
        if part := os.read(job.pipe, _SIZE):
            job.parts.append(part)
            return
        self._selector.unregister(job.pipe)
        os.close(job.pipe)
        del self._running[job.number]
        _, status = os.waitpid(job.pid, 0)
        if job.is_late:
            self._answer(job, {"is_busy": True})
            return
        text = b"".join(job.parts).decode(errors="replace").strip()
        if status == 0:
            self._answer(job, json.loads(text.rpartition("\n")[2]))
            return
        by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        is_memory = "memory allocation" in text or "MemoryError" in text
        got = _ENDS[signal.SIGABRT] if is_memory else _ENDS.get(by) or text.rpartition("\n")[2] or f"signal {by}"
        self._answer(job, {"died": got})

    def _answer(self, job: _Job, answer: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps({"job": job.number, **answer}) + "\n")
        sys.stdout.flush()


def _run_in_fork(job: _Job, vocabulary: Any, kinds: TokenKinds, writer: int) -> NoReturn:
    code = 1
    try:
        _bound()
        answer = json.dumps(run_job(job, vocabulary, kinds)).encode()
        with os.fdopen(writer, "wb") as file:
            file.write(b"\n" + answer)
        code = 0
    finally:
        if fault := sys.exc_info()[1]:  # a panic of llguidance too
            os.write(writer, f"\n{type(fault).__name__}: {fault}".encode()[:2000])
        os._exit(code)


def main() -> None:
    """Reads the vocabulary, and runs jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    read = b""
    while b"\n" not in read:
        if not (part := os.read(0, _SIZE)):
            return
        read += part
    source, _, rest = read.partition(b"\n")
    Worker(make_vocabulary(json.loads(source)), rest).serve()


if __name__ == "__main__":
    main()
