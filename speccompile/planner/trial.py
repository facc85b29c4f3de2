# SPDX-License-Identifier: Apache-2.0
"""Builds each candidate, decodes the same prompts with all of them in turn, and names the one to use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from speccompile.backends.machine import available_memory
from speccompile.benchmark.measure import Settings, job_of_bundle
from speccompile.benchmark.rounds import Runs, open_workers, run_rounds
from speccompile.benchmark.samples import Sample, groups_from_samples
from speccompile.benchmark.summary import Ratio, summary_from_runs
from speccompile.bundle.bundle import Bundle, read_bundle
from speccompile.errors import RuntimeFault, SpecCompileError
from speccompile.planner.candidates import PLAIN, Candidate

_PROCESS_SHARE = 1.5  # memory of a process, in sizes of its bundle: weights are read and packed anew
Build = Callable[[Candidate], Path]


@dataclass(frozen=True)
class Built:
    """A candidate and the bundle in which it decodes."""

    candidate: Candidate
    bundle: Bundle
    section: Mapping[str, Any] | None  # with which the bundle is loaded; None: its own

    @property
    def bundle_bytes(self) -> int:
        return sum(file["size_bytes"] for file in self.bundle.manifest["files"].values())


def build_candidates(
    candidates: Sequence[Candidate], build: Build, leave_out: Callable[[str, SpecCompileError], None]
) -> list[Built]:
    """Returns the candidates with their bundles; those without a graph share the one of plain decoding.

    Args:
        build: returns the folder of a candidate's bundle.
        leave_out: is called for a method that cannot be built for this target.

    Raises:
        SpecCompileError: plain decoding itself cannot be built.
    """
    plain = next(one for one in candidates if one.name == PLAIN)
    base = read_bundle(build(plain), verify=False)
    found = []
    for one in candidates:
        if not one.needs_graphs:
            found.append(Built(one, base, one.section))
            continue
        try:
            found.append(Built(one, read_bundle(build(one), verify=False), None))
        except SpecCompileError as fault:
            leave_out(one.name, fault)
    return found


def try_candidates(
    built: Sequence[Built],
    samples: Sequence[Sample],
    settings: Settings,
    leave_out: Callable[[str, SpecCompileError], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Returns the rows of all candidates, the fastest first, and why that one is.

    Each one has a process of its own that decodes every prompt with and without drafts, so that a row's `of_plain` is
    free of what tells two processes apart. `tokens_per_s` is that quotient times the plain speed of all processes, the
    median. They take turns prompt by prompt where the memory holds all of them, and run one after another elsewhere.

    Args:
        leave_out: is called with the name of a candidate that cannot be loaded, and why.
        progress: is called after every text with the number of those that are done, and of all.

    Returns:
        {"rows": [{"name", "tokens_per_step", "step_ms", "tokens_per_s", "tokens_per_s_spread", "of_plain",
        "of_plain_spread", "num_parts", "num_different", "memory_bytes", "bundle_bytes", "by_category": {kind: ratio}}],
        "choice", "reason", "plain_tokens_per_s", "wait_share", "took_turns"}; `num_different`: texts unlike plain's.

    Raises:
        RuntimeFault: the process of plain decoding cannot be loaded, one of them ends early, or all texts do.
    """
    jobs = [_job(one, samples, settings) for one in built]
    takes_turns = sum(one.bundle_bytes for one in built) * _PROCESS_SHARE < available_memory()
    runs: Runs = {}
    num_done, total = 0, sum(len(job["modes"]) for job in jobs) * len(samples) * settings.repeats

    def step(mode: str) -> None:
        nonlocal num_done
        num_done += 1
        progress(num_done, total)

    for batch in [jobs] if takes_turns else [[job] for job in jobs]:
        with open_workers(batch, lambda job, fault: leave_out(job["prefix"].strip(), fault)) as workers:
            runs |= run_rounds(workers, len(samples), settings.repeats, step)
    rows = _rows(built, runs, samples)
    waits = [result.get("wait_share") or 0.0 for rounds in runs.values() for one in rounds for result in one]
    return {
        "rows": rows,
        "choice": choose_row(rows)["name"],
        "reason": reason_from_rows(rows),
        "plain_tokens_per_s": next(row["tokens_per_s"] for row in rows if row["name"] == PLAIN),
        "wait_share": max(waits, default=0.0),
        "took_turns": takes_turns,
    }


def _job(one: Built, samples: Sequence[Sample], settings: Settings) -> dict[str, Any]:
    is_plain = one.candidate.name == PLAIN
    return {
        **job_of_bundle(one.bundle, None, samples, settings),
        "modes": ["plain"] if is_plain else ["plain", "speculative"],
        "method": one.section,
        "prefix": f"{one.candidate.name} ",
        "optional": not is_plain,
    }


def _rows(built: Sequence[Built], runs: Runs, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    figures = _ratios(runs)
    categories = groups_from_samples(samples, ())["by_category"]
    kinds = {kind: _ratios(_part(runs, indices)) for kind, indices in categories.items()}
    plain = [row for mode, row in figures.items() if mode.endswith(" plain")]
    plain_speed = median(row["tokens_per_s"] for row in plain)
    if not plain_speed:
        got, todo = "texts that end with their first token", "Give other prompts: --prompts FILE."
        raise RuntimeFault("plan --try", got, "texts of at least 2 tokens", todo)
    rows = []
    for one in built:
        name = one.candidate.name
        mode = f"{name} {'plain' if name == PLAIN else 'speculative'}"
        if mode not in figures:
            continue  # it could not be loaded
        row = figures[mode]
        ratio, spread = (1.0, None) if name == PLAIN else (row["of_plain"], row["of_plain_spread"])
        length = row["mean_acceptance_length"]
        rows.append(
            {
                "name": name,
                "tokens_per_step": length,
                "step_ms": 1e3 * length / (ratio * plain_speed),
                "tokens_per_s": ratio * plain_speed,
                "tokens_per_s_spread": row["tokens_per_s_spread"] if spread is None else spread * plain_speed,
                "of_plain": ratio,
                "of_plain_spread": spread,
                "num_parts": _num_parts(one.candidate),
                "num_different": 0 if name == PLAIN else row["num_texts"] - row["num_equal_to_plain"],
                "memory_bytes": row["peak_rss_bytes"],
                "bundle_bytes": one.bundle_bytes,
                "by_category": {k: 1.0 if name == PLAIN else found[mode]["of_plain"] for k, found in kinds.items()},
            }
        )
    return sorted(rows, key=lambda row: -row["tokens_per_s"])


def _num_parts(one: Candidate) -> int:
    # Returns 0 for plain decoding, 1 for lookups, 2 for a drafter with graphs, 3 for several drafters.
    return 0 if one.name == PLAIN else 1 + one.needs_graphs + one.is_several


def choose_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    # Returns the row with the fewest parts of those that are as fast as the first one within the noise.
    return min((row for row in rows if _is_close(rows[0], row)), key=lambda row: int(row["num_parts"]))


def _is_close(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    noise = sum(row["of_plain_spread"] or 0.0 for row in (one, other))
    return bool(abs(one["of_plain"] - other["of_plain"]) <= noise)


def _part(runs: Runs, indices: Iterable[int]) -> Runs:
    chosen = list(indices)
    return {mode: [[one[i] for i in chosen] for one in rounds] for mode, rounds in runs.items()}


def _ratios(runs: Runs) -> dict[str, dict[str, Any]]:
    return dict(summary_from_runs(runs)["modes"])


def reason_from_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns in a few sentences why a row is the choice.

    Raises:
        RuntimeFault: nothing beside plain decoding was measured.
    """
    drafted = [row for row in rows if row["name"] != PLAIN]
    if not drafted:
        todo = "See what was left out, and why; --speculator adds a drafter."
        raise RuntimeFault("plan", "no candidate that could be loaded", "one beside plain decoding", todo)
    [plain] = [row for row in rows if row["name"] == PLAIN]
    best = drafted[0]
    cost = best["step_ms"] / plain["step_ms"]
    what = f"{best['name']} brings {best['tokens_per_step']:.2f} tokens a step in the time of {cost:.2f} plain steps"
    speed = f"x{best['of_plain']:.2f} of plain decoding"
    if best["of_plain"] <= 1.0:
        return f"Plain decoding: no drafter is faster here. The best, {what}: {speed}."
    if Ratio(best["of_plain"], best["of_plain_spread"]).is_noise:
        speed += ", which is within the noise (more --repeats or prompts would tell)"
    chosen = choose_row(rows)
    end = (
        "" if chosen is rows[0] else f" {chosen['name']} has fewer parts and is no slower within the noise: the choice."
    )
    if len(drafted) < 2:
        return f"{what}: {speed}.{end}"
    near = drafted[1]
    close = ", no difference within the noise" if _is_close(best, near) else ""
    return f"{what}: {speed}. The next, {near['name']}, has x{near['of_plain']:.2f}{close}.{end}"
