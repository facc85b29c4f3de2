# SPDX-License-Identifier: Apache-2.0
"""Tests against a real Triton. They belong to `make test-triton`, which makes the server and names it in the
environment; elsewhere they are not collected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.triton_server import TritonServer, serving

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[4]
LAUNCHER = os.environ.get("SPECCOMPILE_TRITON", "")
# The engine that answers offline is in the usual environment: another process, another numpy.
OFFLINE = Path(os.environ.get("SPECCOMPILE_OFFLINE", ROOT / ".venv/bin/speccompile"))
BUNDLE = ROOT / "bundles/pycode"

collect_ignore_glob = [] if LAUNCHER else ["test_*.py"]


@pytest.fixture(scope="session")
def launcher() -> Path:
    return Path(LAUNCHER).absolute()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Returns the first sixteen of the example prompts."""
    lines = (ROOT / "examples/prompts.jsonl").read_text().splitlines()[:16]
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Returns (prompts, max_new_tokens, extra arguments) -> what `speccompile generate` gives for them."""

    def generate(prompts: Sequence[str], max_new_tokens: int, *arguments: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("offline")
        (folder / "in.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
        command = [str(OFFLINE), "generate", str(BUNDLE), "--prompts", str(folder / "in.jsonl")]
        command += ["--max-new-tokens", str(max_new_tokens), "--json", str(folder / "out.json"), *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        return json.loads((folder / "out.json").read_text())

    return generate


@pytest.fixture(scope="session")
def write_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns (arguments of `speccompile triton`) -> the repository that it wrote."""

    def write(*arguments: str) -> Path:
        repository = tmp_path_factory.mktemp("triton") / "model_repository"
        command = [sys.executable, "-m", "speccompile", "triton", str(BUNDLE), "-o", str(repository), *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return repository

    return write


@pytest.fixture(scope="session")
def repository(write_models: Callable[..., Path]) -> Path:
    return write_models()


# The servers of the default layout: one, and one more after each crash of Triton itself.
SERVERS: list[TritonServer] = []


@pytest.fixture(scope="session")
def start_server(
    launcher: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], TritonServer]]:
    """Returns () -> the running server of the default layout."""

    def start() -> TritonServer:
        if not SERVERS or crashed_on_cancellation(SERVERS[-1]):
            SERVERS.append(TritonServer(launcher, repository, tmp_path_factory.mktemp("log") / "server.log"))
            SERVERS[-1].wait_ready()
        return SERVERS[-1]

    yield start
    for server in SERVERS:
        assert server.stop() == 0 or crashed_on_cancellation(server), server.log_end()


@pytest.fixture
def server(start_server: Callable[[], TritonServer]) -> TritonServer:
    """Returns the default layout, for all tests that do not end it."""
    return start_server()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.failed and SERVERS and crashed_on_cancellation(SERVERS[-1]):
        reason = "not run: Triton's own gRPC service crashed (issue 8034 of its server)"
        report.outcome, report.longrepr = "skipped", (*item.location[:2], reason)
    return report


def crashed_on_cancellation(server: TritonServer) -> bool:
    """Returns whether it died of a race in Triton's gRPC service (issue 8034 of Triton's server, mended after 2.51)."""
    if server.process.poll() is None:
        return False
    before, signal, _ = server.log_end(20_000).partition("Signal (11) received")
    return bool(signal) and "HandleCancellation called even when" in before[-500:]


@pytest.fixture(scope="session")
def old_server(
    launcher: Path, write_models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """Yields the five models of the removed backend, with a batch dim."""
    models = write_models("--layout", "trtllm", "--max-batch-size", "4")
    with serving(launcher, models, tmp_path_factory.mktemp("log") / "old.log") as running:
        yield running
