# SPDX-License-Identifier: Apache-2.0
"""A Triton server of the environment that `make triton-server` makes: started, awaited with a limit, always ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_S = 180.0
STOP_S = 180.0


def free_ports(num: int) -> list[int]:
    """Returns ports of 127.0.0.1 that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class TritonServer:
    """A running server.

    Args:
        launcher: the program.
        repository: its model repository.
        log: file for what it prints.
        arguments: further ones.
    """

    def __init__(self, launcher: Path, repository: Path, log: Path, arguments: Sequence[str] = ()) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.log = log
        # Names of its own for shared memory, so that what a killed server leaves there disturbs no other.
        prefix = f"speccompile_{self.http_port}_{os.getpid()}_"
        command = [
            str(launcher.absolute()),
            f"--model-repository={repository.absolute()}",
            *("--http-address=127.0.0.1", f"--http-port={self.http_port}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={self.grpc_port}"),
            *("--metrics-address=127.0.0.1", f"--metrics-port={self.metrics_port}"),
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            *("--exit-on-error=true", "--exit-timeout-secs=30"),
            *arguments,
        ]
        self._handle = log.open("ab")
        # A session of its own: the stubs, which are its children, can be ended with it.
        self.process = subprocess.Popen(
            command,
            stdout=self._handle,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=log.absolute().parent,  # Python looks for modules there, and must find none
        )

    @property
    def url(self) -> str:
        """Returns the URL of the HTTP service."""
        return f"http://127.0.0.1:{self.http_port}"

    def wait_ready(self, limit_s: float = READY_S) -> float:
        """Wait until the server and all its models are ready; returns the seconds it took.

        Raises:
            RuntimeError: it ended, or took too long; the message has the end of its log.
        """
        start = time.monotonic()
        while time.monotonic() - start < limit_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log_end()}")
            if self._is_ready():
                return time.monotonic() - start
            time.sleep(0.1)
        raise RuntimeError(f"the server is not ready after {limit_s} s:\n{self.log_end()}")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=2):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def log_end(self, size: int = 4000) -> str:
        """Returns the last characters of its log."""
        return self.log.read_text(errors="replace")[-size:]

    def metrics(self) -> dict[str, float]:
        """Returns the values of the families `speccompile_*`, labels left out."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        rows = [line.rpartition(" ") for line in lines if line.startswith("speccompile_")]
        return {name.partition("{")[0]: float(value) for name, _, value in rows}

    def model_pids(self) -> list[int]:
        """Returns the processes that run models."""
        group, found = self.process.pid, []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != group:
                with contextlib.suppress(OSError):
                    if os.getpgid(int(folder.name)) == group:
                        found.append(int(folder.name))
        return found

    def stop(self, limit_s: float = STOP_S) -> int:
        """End it as an operator does; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(limit_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it and its models at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._handle.close()


@contextlib.contextmanager
def serving(launcher: Path, repository: Path, log: Path, arguments: Sequence[str] = ()) -> Iterator[TritonServer]:
    """Yields a server that is ready, and ends it with the block.

    Raises:
        RuntimeError: it did not start, or did not end with 0.
    """
    server = TritonServer(launcher, repository, log, arguments)
    try:
        server.wait_ready()
        yield server
        if (status := server.stop()) != 0:
            raise RuntimeError(f"the server ended with {status}:\n{server.log_end()}")
    finally:
        server.kill()


def post(url: str, body: dict[str, object], timeout_s: float = 120.0) -> tuple[int, dict[str, object]]:
    """Returns (status, JSON document) of a POST."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as fault:
        return fault.code, json.loads(fault.read() or b"{}")
