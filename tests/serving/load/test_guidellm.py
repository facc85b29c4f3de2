# SPDX-License-Identifier: Apache-2.0
"""GuideLLM against `speccompile serve` on the example bundle: its requests succeed, and its counts are the server's."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.serving.live_server import Live, bundle_with_template, live_server

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples/models/pycode-16m"
NUM_REQUESTS, NUM_STREAMS, NUM_TOKENS = 12, 4, 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    bundle = bundle_with_template(ROOT / "bundles/pycode", tmp_path_factory.mktemp("bundle") / "pycode")
    with live_server(bundle) as live:
        yield live


def run_guidellm(server: Live, route: str, folder: Path) -> dict[str, Any]:
    """Returns the benchmark in GuideLLM's report over the first of the example prompts."""
    lines = (ROOT / "examples/prompts.jsonl").read_text().splitlines()[:NUM_REQUESTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    options = {
        "backend": f"kind=openai_http,target={server.url},request_format={route},max_tokens={NUM_TOKENS}",
        "profile": f"kind=concurrent,streams={NUM_STREAMS}",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={MODEL}",
        "data": f"kind=json_file,path={folder / 'prompts.jsonl'}",
        "output": f"kind=json,path={folder / 'report.json'}",
    }
    command = [os.environ["SPECCOMPILE_GUIDELLM"], "run", "--disable-console"]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [benchmark] = json.loads((folder / "report.json").read_text())["benchmarks"]
    found: dict[str, Any] = benchmark
    return found


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_all_requests_succeed_and_their_tokens_are_counted(server: Live, route: str, tmp_path: Path) -> None:
    before = {name: server.metric(name) for name in ("prompt_tokens_total", "generated_tokens_total")}
    benchmark = run_guidellm(server, route, tmp_path)
    totals = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert benchmark["metrics"]["request_totals"] == totals
    requests = benchmark["requests"]["successful"]
    assert len(requests) == NUM_REQUESTS and not benchmark["requests"]["errored"]
    told = {name: server.metric(name) - count for name, count in before.items()}
    assert sum(one["prompt_tokens"] for one in requests) == told["prompt_tokens_total"]
    assert sum(one["output_tokens"] for one in requests) == told["generated_tokens_total"]
    for one in requests:
        assert 1 <= one["output_tokens"] <= NUM_TOKENS and one["output"]
        assert 0 < one["time_to_first_token_ms"] <= 1e3 * one["request_latency"]
        # Several tokens a chunk: with the usage of each, drafts are seen in the tokens of an iteration.
        assert one["inter_token_latency_ms"] > 0 and one["iter_tokens_per_iteration"] >= 1
    assert any(one["iter_tokens_per_iteration"] > 1 for one in requests)
    if route == "/v1/completions":
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
        wanted = sorted(len(tokenizer.encode(json.loads(line)["prompt"]).ids) for line in lines)
        assert sorted(one["prompt_tokens"] for one in requests) == wanted
