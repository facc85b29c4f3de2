# SPDX-License-Identifier: Apache-2.0
"""`speccompile serve` under load."""

from __future__ import annotations

import ctypes
import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx

from bench.server_soak.load import Outcome, Task

PATH = "/v1/completions"
OVERSIZED = b'{"prompt": "' + b"x" * (2 << 20) + b'"}'
# (path, body, content type, status that has to come).
WRONG: tuple[tuple[str, bytes, str, int], ...] = (
    (PATH, b"{", "application/json", 400),
    (PATH, b"[]", "application/json", 400),
    (PATH, b'{"prompt": 5}', "application/json", 400),
    (PATH, b'{"prompt": "x", "temperature": -1}', "application/json", 400),
    (PATH, b'{"prompt": "x", "logprobs": 50}', "application/json", 400),
    (PATH, b'{"prompt": "x", "nonsense": 1}', "application/json", 400),
    (PATH, b'{"prompt": [99999999]}', "application/json", 400),
    (PATH, b'{"prompt": "x", "stream": true, "n": 0}', "application/json", 400),
    (PATH, b'{"prompt": "x", "model": "other"}', "application/json", 404),
    (PATH, b"prompt=x", "application/x-www-form-urlencoded", 415),
    ("/v1/nothing", b"{}", "application/json", 404),
    (PATH, OVERSIZED, "application/json", 413),
)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, however that ends: it would keep its memory of a GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class ServeProcess:
    """A server process of its own.

    Args:
        bundle: what to serve.
        log: file for what it prints.
        options: of `speccompile serve`.
    """

    name = "serve"

    def __init__(self, bundle: Path, log: Path, options: tuple[str, ...] = ()) -> None:
        program = str(Path(sys.executable).with_name("speccompile"))
        command = [program, "serve", str(bundle), "--port", "0", "--log-level", "warning", *options]
        self._log = log.open("w")
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        assert self.process.stdout is not None
        found = re.match(r"serving at (\S+)", self.process.stdout.readline())
        if found is None:
            raise RuntimeError(f"the server did not start: see {log}")
        self.url = found[1]

    def pids(self) -> list[int]:
        """Returns its process."""
        return [self.process.pid]

    async def ask(self, client: httpx.AsyncClient, task: Task, streams: bool, most_step_outputs: int | None) -> Outcome:
        """Send a task."""
        body = {"prompt": task.prompt, "max_tokens": task.max_tokens, "temperature": 0, "stream": streams}
        if not streams:
            return await self._ask_whole(client, body)
        body["stream_options"] = {"include_usage": True}
        start_s, first_s, text, num_step_outputs = perf_counter(), None, "", 0
        async with client.stream("POST", self.url + PATH, json=body) as reply:
            if reply.status_code != 200:
                return Outcome(error=f"{reply.status_code}: {(await reply.aread()).decode()}")
            if most_step_outputs == 0:
                return Outcome()
            usage: dict[str, Any] = {}
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    return Outcome(text, first_s, usage.get("completion_tokens", 0))
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Outcome(text, error=str(event))
                usage = event.get("usage") or usage
                text += "".join(choice["text"] for choice in event["choices"])
                first_s = perf_counter() - start_s if first_s is None else first_s
                num_step_outputs += 1
                if num_step_outputs == most_step_outputs:
                    return Outcome(text)
        return Outcome(text, error="the stream ended without [DONE]")

    async def _ask_whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Outcome:
        reply = await client.post(self.url + PATH, json=body)
        if reply.status_code != 200:
            return Outcome(error=f"{reply.status_code}: {reply.text}")
        answer = reply.json()
        text, num = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
        return Outcome(text, num_tokens=num)

    async def ask_wrongly(self, client: httpx.AsyncClient, rng: random.Random) -> str | None:
        """Send a malformed request."""
        path, body, kind, status = rng.choice(WRONG)
        try:
            reply = await client.post(self.url + path, content=body, headers={"Content-Type": kind})
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError) as fault:
            # A server may hang up on a body that is too large before all of it was sent.
            return None if status == 413 else f"{path} {body[:60]!r}: {fault!r}"
        is_right = reply.status_code == status and "error" in reply.json()
        return None if is_right else f"{path} {body[:60]!r}: {reply.status_code} {reply.text[:200]}"

    def counts(self) -> dict[str, float]:
        """Returns counts from its metrics."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=60).text.splitlines()
        rows = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        names = {"active": "active_outputs", "queued": "queued_outputs", "prefilling": "prefilling_outputs"}
        found = {short: float(rows[f"speccompile_{name}"]) for short, name in names.items()}
        finished = {key: float(value) for key, value in rows.items() if key.startswith("speccompile_finished")}
        taken = float(rows["speccompile_requests_total"])
        accepted = float(rows["speccompile_mean_acceptance_length"])
        return {**found, "taken": taken, "finished": sum(finished.values()), "mean_acceptance_length": accepted}

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(90)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self._log.close()
