#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Load on a Triton server with a bundle: every greedy answer is compared with the offline engine's plain one.

    make triton-server
    python bench/triton_soak.py bundles/pycode [--seconds 180] [--clients 64] [--json out.json]

Two runs against one server: whole streams alone; then 20 % of them left by their client and 5 % malformed. Prints what
became of the requests, latencies, tokens/s, and the memory of server and model over the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.triton_server import TritonServer, serving  # noqa: E402

LIMIT_S = 120.0
MALFORMED = (
    b"{not json",
    b'{"text_input": "x", "max_tokens": -1}',
    b'{"text_input": "x", "no_such_field": 1}',
    b'{"text_input": "\xff", "max_tokens": 2}',
    b'{"max_tokens": 2}',
)


@dataclass
class Seen:
    """What a run has seen."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    server_mib: list[int] = field(default_factory=list)
    model_mib: list[int] = field(default_factory=list)


async def events_of(server: TritonServer, body: bytes) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Yields (HTTP status, document) of each event of a stream; to close the iterator closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http_port, limit=1 << 20)
    try:
        head = f"POST /v2/models/speccompile/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        headers = {}
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if "content-length" in headers:
            yield status, {"error": (await reader.readexactly(int(headers["content-length"]))).decode()}
            return
        text = b""
        while size := int(await reader.readline(), 16):
            text += await reader.readexactly(size)
            await reader.readline()
            *events, text = text.split(b"\n\n")
            for event in events:
                yield status, json.loads(event.partition(b"data:")[2].decode("utf-8"))
    finally:
        writer.close()


async def ask(server: TritonServer, seen: Seen, prompt: str, text: str, num_tokens: int, most: int) -> None:
    """Reads a whole stream, or leaves it after `most` events."""
    start, got, first = perf_counter(), "", None
    asked = {"text_input": prompt, "max_tokens": num_tokens, "stream": True}
    stream = events_of(server, json.dumps(asked).encode())
    try:
        async for _, event in stream:
            if "error" in event:
                seen.ends["error"] += 1
                seen.wrong.append(event["error"])
                return
            first = first or perf_counter()
            got += event["text_output"]
            most -= 1
            if most < 0:
                break
    finally:
        await stream.aclose()
    is_left = most < 0
    seen.ends["left" if is_left else "whole"] += 1
    if not (text.startswith(got) if is_left else got == text):
        seen.wrong.append(f"mixed or lost: {got!r} is not {text!r}")
    if not is_left and first is not None:
        seen.first_ms.append((first - start) * 1e3)
        seen.whole_ms.append((perf_counter() - start) * 1e3)


async def send_malformed(server: TritonServer, seen: Seen, rng: random.Random) -> None:
    """Sends a request that must be refused."""
    stream = events_of(server, rng.choice(MALFORMED))
    answers = [(status, event) async for status, event in stream]
    is_refused = len(answers) == 1 and "error" in answers[0][1]
    seen.ends["refused" if is_refused else "not refused"] += 1
    if not is_refused:
        seen.wrong.append(f"taken: {answers}")


async def run(server: TritonServer, args: argparse.Namespace, texts: list[tuple[str, str, int]], rough: bool) -> Seen:
    """Runs all clients for the given time; returns what they saw."""
    seen, end = Seen(), perf_counter() + args.seconds

    async def client(number: int) -> None:
        rng = random.Random(args.seed * 1000 + number)
        while perf_counter() < end:
            kind = rng.random()
            if rough and kind < 0.05:
                task = send_malformed(server, seen, rng)
            else:
                most = rng.randint(0, 5) if rough and kind < 0.25 else 10**9
                task = ask(server, seen, *rng.choice(texts), most)
            await asyncio.wait_for(task, LIMIT_S)

    async def watch() -> None:
        while True:
            seen.server_mib.append(memory_mib([server.process.pid]))
            seen.model_mib.append(memory_mib(server.model_pids()))
            await asyncio.sleep(max(args.seconds / 12, 1))

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(client(number) for number in range(args.clients)))
    watcher.cancel()
    return seen


def memory_mib(pids: list[int]) -> int:
    """Returns the resident memory that is not shared with files, of several processes together."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    return total >> 10


def report(seen: Seen, before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, Any]:
    """Returns what a run gave, JSON-ready."""

    def percentiles(values: list[float]) -> dict[str, float]:
        ordered = sorted(values) or [0.0]
        return {f"p{p}": round(ordered[min(len(ordered) - 1, p * len(ordered) // 100)], 1) for p in (50, 99)}

    tokens = after["speccompile_tokens_total"] - before["speccompile_tokens_total"]
    return {
        "seconds": round(seconds, 1),
        "ends": dict(seen.ends),
        "wrong": len(seen.wrong),
        "tokens_per_s": round(tokens / seconds, 1),
        "time_to_first_step_output_ms": percentiles(seen.first_ms),
        "latency_ms": percentiles(seen.whole_ms),
        "memory_mib": {"server": seen.server_mib, "model": seen.model_mib},
        "cancelled": after["speccompile_cancelled_total"] - before["speccompile_cancelled_total"],
        "acceptance_rate": round(after["speccompile_acceptance_rate"], 3),
        "left_over": {name: after[f"speccompile_{name}"] for name in ("active", "queued")},
    }


def offline_texts(bundle: Path, prompts: list[str], max_tokens: int) -> list[tuple[str, str, int]]:
    """Returns (prompt, the plain greedy text, tokens asked for)."""
    import speccompile
    from speccompile.core.sampling import SamplingParams

    engine = speccompile.load(bundle)
    rng, texts = random.Random(0), []
    for prompt in prompts:
        most = rng.randint(max_tokens // 4, max_tokens)
        [generation] = engine.generate(prompt, SamplingParams(max_new_tokens=most), speculative=False)
        texts.append((prompt, generation.text, most))
    return texts


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--launcher", type=Path, default=ROOT / ".venv-triton/bin/tritonserver")
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples/prompts.jsonl")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    texts = offline_texts(args.bundle, prompts, args.max_tokens)
    reports, faults = [], []
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "model_repository"
        program = [sys.executable, "-m", "speccompile", "triton", str(args.bundle), "-o", str(repository)]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        with serving(args.launcher, repository, Path(folder) / "log") as server:
            for rough in (False, True):
                before, start = server.metrics(), perf_counter()
                seen = asyncio.run(run(server, args, texts, rough))
                seconds = perf_counter() - start
                asyncio.run(asyncio.sleep(3))  # what was left is cancelled, the metrics are brought up to date
                reports.append({"rough": rough, **report(seen, before, server.metrics(), seconds)})
                faults += seen.wrong
                print(json.dumps(reports[-1]), flush=True)
        exit_status = server.process.returncode
    if args.json:
        args.json.write_text(json.dumps({"clients": args.clients, "runs": reports}, indent=1) + "\n")
    print("\n".join(faults[:5]))
    assert not faults, f"{len(faults)} answers are not what they should be"
    assert not any(value for run in reports for value in run["left_over"].values()), "something is left"
    assert exit_status == 0, exit_status


if __name__ == "__main__":
    main()
