# SPDX-License-Identifier: Apache-2.0
"""Modes of a benchmark that share one loaded model, in a process of their own: JSON lines in, JSON lines out.

The first line says what to load; each further one is a mode and the index of a prompt. An error of ours is `{"error":
{...}}`, and ends the process. Modes share an engine, as where a process's weights lie in memory made two processes with
the same graph differ by up to 25 %.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.backends.machine import WaitClock
from speccompile.errors import SpecCompileError

if TYPE_CHECKING:
    from speccompile.runtime.spec_engine import SpecEngine

Decode = Callable[[str, list[int], int], dict[str, Any]]  # of mode, prompt and most new tokens

COUNTED = ("num_steps", "acceptance_histogram", "acceptance_by_position")


def _speccompile(job: dict[str, Any]) -> Decode:
    from speccompile.runtime.engine import load

    method = job["method"] if "speculative" in job["modes"] else "none"
    options: dict[str, Any] = {"threads": job["threads"], "method": method}
    return decode_with(load(job["bundle"], verify=False, allow_synthetic_acceptance=True, **options))


def decode_with(engine: SpecEngine) -> Decode:
    """Returns the modes `plain` and `speculative` of an engine."""
    from speccompile.core.sampling_params import SamplingParams
    from speccompile.runtime.draft_report import report_from_planner

    num_drafts = num_accepted = 0

    def sentence(stats: Mapping[str, Any]) -> str:
        nonlocal num_drafts, num_accepted
        num_drafts, num_accepted = num_drafts + stats["num_draft_tokens"], num_accepted + stats["num_accepted"]
        return report_from_planner(engine.controller, num_drafts, num_accepted).sentence

    def decode(mode: str, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        start = time.perf_counter()
        params = SamplingParams(max_new_tokens=max_new_tokens)
        [result] = engine.generate([prompt], params, speculative=mode == "speculative", batch_size=1)
        stats, total_s = result.stats, time.perf_counter() - start
        # All that was not a step, so a little too much; without a first token of the prompt's own, the first step too.
        first_s = total_s - stats["step_ms"] / 1e3
        if not stats["num_first_tokens"]:
            first_s += stats["step_ms"] / 1e3 / max(stats["num_steps"], 1)
        return {
            "tokens": result.tokens,
            "total_s": total_s,
            "prefill_s": stats["prefill_ms"] / 1e3,
            "first_token_s": first_s,
            "num_first_tokens": stats["num_first_tokens"],
            "num_steps": stats["num_steps"],
            "num_accepted": stats["num_accepted"],
            "stats": {name: stats[name] for name in COUNTED},
            "drafts": sentence(stats) if mode == "speculative" else None,
            "outside_s": stats["outside_engine_ms"] / 1e3,
        }

    return decode


class _Clock:
    """A streamer of transformers: the prompt comes first, then the tokens of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def _transformers(job: dict[str, Any]) -> Decode:
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging

    from speccompile.checkpoints.folders import resolve_checkpoint
    from speccompile.training.target import Target

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job["threads"])

    def read(model: str, lora: str | None) -> Any:
        found = Target(resolve_checkpoint(model), torch.float32, lora=lora).model
        found.generation_config = GenerationConfig()  # a penalty that a checkpoint stores is no part of greedy decoding
        return found

    target = read(job["target"], job["lora"])
    options: dict[str, Any] = {}
    if "transformers-assisted" in job["modes"]:
        options = {"prompt_lookup_num_tokens": job["assistant_tokens"]}
        if job["draft"] is not None:
            options = {"assistant_model": read(job["draft"], job["draft_lora"])}
            config = options["assistant_model"].generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = job["assistant_tokens"], "constant"

    def decode(mode: str, prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        del mode
        clock, start = _Clock(), time.perf_counter()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=job["eos_token_ids"] or None,
                pad_token_id=0,
                streamer=clock,
                **options,
            )
        tokens = out[0, len(prompt) :].tolist()
        steps = len(clock.times) - 1
        first_s = clock.times[1] - clock.times[0] if steps > 0 else 0.0
        later_s = clock.times[-1] - clock.times[1] if steps > 1 else 0.0
        # The first step holds the prompt; what it costs beyond the mean of the others is the prefill.
        prefill_s = max(first_s - later_s / max(steps - 1, 1), 0.0)
        num_accepted = len(tokens) - steps if options else 0
        return {
            "tokens": tokens,
            "total_s": time.perf_counter() - start,
            "prefill_s": prefill_s,
            "first_token_s": first_s,
            "num_steps": steps,
            "num_accepted": num_accepted,
            "outside_s": None,
        }

    return decode


def _peak_rss_bytes() -> int | None:
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    lines = [line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) * 1024 if lines else None


def _end_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Serve until standard input ends."""
    _end_with_parent()
    # Answers have a pipe of their own: what libraries print must not stand between them.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    try:
        _serve(job, lambda answer: print(json.dumps(answer), file=answers))
    except SpecCompileError as fault:
        parts = {name: getattr(fault, name) for name in ("where", "got", "expected", "todo")}
        print(json.dumps({"error": parts}), file=answers)


def _serve(job: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    decode = _transformers(job) if job["modes"][0].startswith("transformers") else _speccompile(job)
    for mode in job["modes"]:  # first steps allocate; they are not what is measured
        decode(mode, job["prompts"][0], min(job["max_new_tokens"], 16))
    answer({"ready": True})
    clock = WaitClock()
    for line in sys.stdin:
        mode, prompt = json.loads(line)
        result = decode(mode, job["prompts"][prompt], job["max_new_tokens"])
        answer({**result, "peak_rss_bytes": _peak_rss_bytes(), "wait_share": clock.share()})


if __name__ == "__main__":
    main()
