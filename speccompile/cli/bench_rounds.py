# SPDX-License-Identifier: Apache-2.0
"""Interleaved measurement: processes with one or more modes each, one running at a time, and the summary."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from speccompile.errors import RuntimeFault

REFERENCES = ("transformers", "transformers fp32 plain", "plain")  # whose texts are right, the first that was run
Runs = dict[str, list[list[dict[str, Any]]]]  # by mode: rounds of one result a prompt


class Worker:
    """A process of modes. Between its turns it is stopped, so that threads which spin cost the others nothing.

    Args:
        job: see `bench_worker`. Three keys are read here: `prefix` stands before the names of its modes in results;
            `command` runs another program that talks as `bench_worker` does; `environment` is that program's.

    Raises:
        RuntimeFault: the process cannot load its model.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._prefix: str = job.get("prefix", "")
        self.modes: list[str] = [self._prefix + mode for mode in job["modes"]]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            job.get("command", [sys.executable, "-m", "speccompile.cli.bench_worker"]),
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
        """Decode one prompt in one of its modes.

        Raises:
            RuntimeFault: the process has died; the end of what it printed is in the message.
        """
        self._pause(False)
        self._send(json.dumps([mode.removeprefix(self._prefix), prompt]))
        result = self._receive()
        self._pause(True)
        return result

    def close(self) -> None:
        """End the process."""
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
            tail = self._log.read().strip()[-600:]
            got = f"exit code {self._process.returncode}: {tail}"
            raise RuntimeFault(
                f"bench mode {', '.join(self.modes)}", got, "a result", "See the message, or leave the mode out."
            )
        result: dict[str, Any] = json.loads(line)
        return result

    def _pause(self, is_paused: bool) -> None:
        if hasattr(signal, "SIGSTOP"):
            os.kill(self._process.pid, signal.SIGSTOP if is_paused else signal.SIGCONT)


@contextlib.contextmanager
def open_workers(
    jobs: Sequence[Mapping[str, Any]], leave_out: Callable[[Mapping[str, Any], RuntimeFault], None] | None = None
) -> Iterator[list[Worker]]:
    """Start the processes one after another; all are ended in the end.

    Args:
        jobs: one a process; see `Worker`.
        leave_out: told of a job with `optional: true` that cannot load, which is then left out.

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


def summary_from_runs(runs: Runs, eos_token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Returns the modes' figures and their ratios.

    `tokens_per_s` is decoding alone, the prompt's own time and the tokens that came with it (`num_first_tokens`) taken
    out, as medians over rounds; the figure with both is `tokens_per_s_with_prefill`. `first_token_ms`: from the call to
    the first new token, the median over all texts. `exact`: all tokens equal those of transformers' greedy decoding, or
    of plain decoding where transformers was not run. An end token of `eos_token_ids` does not count: some engines leave
    it out.
    """
    oracle = next((mode for mode in REFERENCES if mode in runs), None)
    truth = None if oracle is None else [_text(result, eos_token_ids) for result in runs[oracle][0]]
    modes = {mode: _mode(rounds, truth, oracle, eos_token_ids) for mode, rounds in runs.items()}
    ratios = {}
    order = [m for m in ("speculative", "plain", "transformers-assisted", "transformers") if m in modes]
    for at, mode in enumerate(order):
        for other in order[at + 1 :]:
            pairs = zip(modes[mode]["tokens_per_s_all"], modes[other]["tokens_per_s_all"], strict=True)
            ratios[f"{mode}/{other}"] = median(a / b for a, b in pairs if b > 0)
    return {"modes": modes, "ratios": ratios}


def _text(result: Mapping[str, Any], eos_token_ids: Sequence[int]) -> list[int]:
    tokens: list[int] = result["tokens"]
    return tokens[:-1] if tokens and tokens[-1] in eos_token_ids else tokens


def _mode(
    rounds: list[list[dict[str, Any]]], truth: list[list[int]] | None, oracle: str | None, eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    results = [result for results in rounds for result in results]
    speeds, speeds_with_prefill = [], []
    for one in rounds:
        num = sum(len(result["tokens"]) for result in one)
        total_s = sum(result["total_s"] for result in one)
        prefill_s = sum(result["prefill_s"] for result in one)
        num_first = sum(result.get("num_first_tokens", 0) for result in one)
        speeds.append((num - num_first) / max(total_s - prefill_s, 1e-9))
        speeds_with_prefill.append(num / max(total_s, 1e-9))
    steps = sum(result["num_steps"] for result in results)
    same = []
    if truth is not None:
        same = [_text(a, eos_token_ids) == b for one in rounds for a, b in zip(one, truth, strict=True)]
    outside = [result["outside_s"] for result in results]
    decode_s = sum(result["total_s"] - result["prefill_s"] for result in results)
    return {
        "tokens_per_s": median(speeds),
        "tokens_per_s_all": speeds,
        "tokens_per_s_with_prefill": median(speeds_with_prefill),
        "first_token_ms": median(result["first_token_s"] for result in results) * 1e3,
        "mean_acceptance_length": 1 + sum(result["num_accepted"] for result in results) / max(steps, 1),
        "exact": all(same) if same else None,
        "exact_share": sum(same) / len(same) if same else None,
        "exact_against": oracle,
        "outside_engine_share": None if None in outside else sum(outside) / max(decode_s, 1e-9),
        "num_tokens": sum(len(result["tokens"]) for result in rounds[0]),
        "peak_rss_bytes": results[-1]["peak_rss_bytes"],
    }
