# SPDX-License-Identifier: Apache-2.0
"""Two replicas on a local Ray cluster, run by `make test-ray`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.engine import load

pytestmark = [
    pytest.mark.skipif("SPECCOMPILE_TEST_RAY" not in os.environ, reason="run by make test-ray"),
    pytest.mark.live,
]
ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
openai = pytest.importorskip("openai")

LINES = (Path(__file__).parents[3] / "examples/prompts.jsonl").read_text().splitlines()
PROMPTS = [json.loads(line)["prompt"] for line in LINES][:12]
NUM = 24
WAIT_S = 60


@pytest.fixture(scope="module")
def url(pair):
    from ray import serve

    from speccompile.serving.ray import Settings, build

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = Settings(bundle=pair, model_name="pycode", num_replicas=2, num_cpus=0.5, threads=1, drain_s=5)
        serve.run(build(settings), name="test", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def offline(pair):
    engine = load(pair)
    return [engine.generate(prompt, SamplingParams(max_new_tokens=NUM))[0].text for prompt in PROMPTS]


def replicas(url):
    """Returns {id: its answer} of both replicas; Ray chooses which one answers a request."""
    import httpx

    found, end_s = {}, time.monotonic() + WAIT_S
    while len(found) < 2:
        assert time.monotonic() < end_s, found
        try:
            answer = httpx.get(f"{url}/replica", timeout=10).json()
        except httpx.HTTPError:
            continue
        found[answer["replica"]] = answer
    return found


async def stream(client, prompt):
    options = {"include_usage": True}
    chunks = await client.completions.create(
        model="pycode", prompt=prompt, max_tokens=NUM, stream=True, stream_options=options
    )
    got = [chunk async for chunk in chunks]
    assert got[-1].usage.completion_tokens == NUM
    return "".join(chunk.choices[0].text for chunk in got[:-1]), len(got)


async def stream_all(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3) as client:
        return await asyncio.gather(*(stream(client, prompt) for prompt in PROMPTS))


def test_streams_on_two_replicas_are_the_offline_texts(url, offline):
    answers = asyncio.run(stream_all(url))
    assert [text for text, _ in answers] == offline
    assert all(num > 4 for _, num in answers), "they came in several chunks"
    both = replicas(url)
    assert len({answer["pid"] for answer in both.values()}) == 2
    taken = [answer["stats"]["num_requests"] for answer in both.values()]
    assert sum(taken) == len(PROMPTS) and min(taken) > 0


def test_a_dropped_stream_frees_its_slot(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chunks = client.completions.create(model="pycode", prompt=PROMPTS[0], max_tokens=450, stream=True)
        next(iter(chunks))
        chunks.close()
    end_s = time.monotonic() + WAIT_S
    while not any("cancelled" in answer["stats"]["num_finished"] for answer in replicas(url).values()):
        assert time.monotonic() < end_s
    assert all(answer["stats"]["num_active"] == 0 for answer in replicas(url).values())


def test_errors_are_those_of_the_server(url):
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        pytest.raises(openai.BadRequestError, match="`best_of`: it is not supported"),
    ):
        client.completions.create(model="pycode", prompt="x", best_of=2)


def test_a_killed_replica_is_replaced(url, offline):
    before = replicas(url)
    victim, killed = next(iter(before.items()))
    os.kill(killed["pid"], signal.SIGKILL)
    end_s = time.monotonic() + WAIT_S
    while victim in (now := replicas(url)):
        assert time.monotonic() < end_s
    assert len(now) == 2
    assert [text for text, _ in asyncio.run(stream_all(url))] == offline
