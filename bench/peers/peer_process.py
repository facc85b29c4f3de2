# SPDX-License-Identifier: Apache-2.0
"""What the workers of all peers share: run as a process of JSON lines, describe itself, convert a checkpoint.

A worker runs in the peer's own environment, so this imports the standard library alone. A worker is called as

    python WORKER describe               prints {"forms": {precision: {"name": own name, "modes": [...]}}, ...}
    python WORKER convert FROM TO FORM   writes a checkpoint in the peer's format into the new folder TO
    python WORKER logits                 JSON in: target, form, threads, texts, starts, out; writes the npz file `out`
    python WORKER                        JSON lines in, JSON lines out, as speccompile.benchmark.worker

with `plain`, `draft_model` and `ngram` (prompt lookup) as modes: what speculation methods are called in recipes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

Job = Mapping[str, Any]


@dataclass
class Steps:
    """Token ids of one text and when each step gave its tokens.

    Args:
        tokens: new token ids.
        times: seconds of `time.perf_counter`, one a step, the first after the prompt's own.
        prompt_end: when the prompt had been computed, where the peer says so.
        engine_s: seconds of the whole text inside the engine itself, without what calls it, where the peer says so.
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    prompt_end: float | None = None
    engine_s: float | None = None

    def add(self, tokens: Sequence[int]) -> None:
        """Append the tokens of a step that has just ended."""
        self.times.append(time.perf_counter())
        self.tokens.extend(int(token) for token in tokens)


Decode = Callable[[Sequence[int], int], Steps]  # of token ids and most new tokens


@dataclass(frozen=True)
class Peer:
    """A peer as its worker declares it.

    Args:
        packages: names on PyPI whose versions are reported.
        forms: the peer's own names by precision (fp32, 16bit, int8, int4).
        modes: what it decodes with.
        convert: writes a checkpoint's folder as a new folder, in one of the precisions.
        load: returns the decoders of a job's modes.
        logits: yields the logits [tokens, vocab] of each text of a job, which is read at once; None: it cannot.
    """

    packages: tuple[str, ...]
    forms: Mapping[str, str]
    modes: tuple[str, ...]
    convert: Callable[[Path, Path, str], None]
    load: Callable[[Job], Mapping[str, Decode]]
    logits: Callable[[Job], Iterator[Any]] | None = None


def _result(steps: Steps, start: float, end: float, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    tokens = steps.tokens
    ends = [at for at, token in enumerate(tokens) if token in eos_token_ids]
    tokens = tokens[: ends[0] + 1] if ends else tokens
    first_s = steps.times[0] - start
    later_s = steps.times[-1] - steps.times[0]
    # The first step holds the prompt; what it costs beyond the mean of the others is the prefill.
    num_later = max(len(steps.times) - 1, 1)
    prefill_s = first_s - later_s / num_later if steps.prompt_end is None else steps.prompt_end - start
    return {
        "tokens": tokens,
        "total_s": end - start,
        "prefill_s": max(prefill_s, 0.0),
        "first_token_s": first_s,
        "num_steps": len(steps.times),
        "num_accepted": max(len(tokens) - len(steps.times), 0),
        "outside_s": None if steps.engine_s is None else max(end - start - steps.engine_s, 0.0),
    }


def _peak_rss_bytes() -> int | None:
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _serve(peer: Peer) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent: a stopped process would not notice
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    job = json.loads(sys.stdin.readline())
    decoders = peer.load(job)

    def run(mode: str, prompt: int, max_new_tokens: int) -> dict[str, Any]:
        start = time.perf_counter()
        steps = decoders[mode](job["prompts"][prompt], max_new_tokens)
        return _result(steps, start, time.perf_counter(), job["eos_token_ids"])

    for mode in job["modes"]:  # first steps allocate; they are not what is measured
        run(mode, 0, min(job["max_new_tokens"], 16))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        mode, prompt = json.loads(line)
        result = run(mode, prompt, job["max_new_tokens"])
        print(json.dumps({**result, "peak_rss_bytes": _peak_rss_bytes()}), file=answers)


def _write_logits(peer: Peer, job: Job) -> None:
    """Writes the rows that predict each text's tokens from its start on, float32."""
    import numpy as np

    if peer.logits is None:
        raise SystemExit("this peer does not show its logits")
    rows = {}
    for index, (logits, text, start) in enumerate(zip(peer.logits(job), job["texts"], job["starts"], strict=True)):
        rows[f"{index:04}"] = np.array(logits[start - 1 : len(text) - 1], dtype=np.float32)
    np.savez(job["out"], **rows)


def main(peer: Peer) -> None:
    """Do what the command line says; see the module."""
    if sys.argv[1:] == ["describe"]:
        forms = {precision: {"name": name, "modes": list(peer.modes)} for precision, name in peer.forms.items()}
        versions = {name: metadata.version(name) for name in peer.packages}
        needs_draft = [mode for mode in peer.modes if mode == "draft_model"]
        print(json.dumps({"forms": forms, "needs_draft": needs_draft, "versions": versions}))
    elif sys.argv[1:2] == ["convert"]:
        source, dest, form = sys.argv[2:]
        peer.convert(Path(source), Path(dest), form)
    elif sys.argv[1:] == ["logits"]:
        _write_logits(peer, json.load(sys.stdin))
    else:
        _serve(peer)
