# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client against a server that runs the example pair."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.engine import load
from tests.runtime.grammar_lab import SCHEMAS, is_valid

pytestmark = pytest.mark.export

openai = pytest.importorskip("openai")

LINES = (Path(__file__).parents[3] / "examples/prompts.jsonl").read_text().splitlines()
PROMPTS = [json.loads(line)["prompt"] for line in LINES][:16]
NUM = 24


@pytest.fixture(scope="module")
def offline(pair):
    """Returns the greedy texts of the prompts, decoded one by one without a server."""
    engine = load(pair)
    return [engine.generate(prompt, SamplingParams(max_new_tokens=NUM))[0].text for prompt in PROMPTS]


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_completion_is_the_offline_one(client, offline):
    extra = {"speculation": "on"}
    answer = client.completions.create(model="pycode-chat", prompt=PROMPTS[0], max_tokens=NUM, extra_body=extra)
    assert answer.choices[0].text == offline[0] and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == NUM
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert answer.system_fingerprint.startswith("sc-")


def test_sixteen_streams_at_once_are_the_offline_ones(live, offline):
    async def stream(client, prompt):
        options = {"include_usage": True}
        chunks = await client.completions.create(
            model="pycode-chat", prompt=prompt, max_tokens=NUM, stream=True, stream_options=options
        )
        got = [chunk async for chunk in chunks]
        assert got[-1].usage.completion_tokens == NUM and got[-1].choices == []
        return "".join(chunk.choices[0].text for chunk in got[:-1])

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in PROMPTS))

    assert asyncio.run(run()) == offline


def test_thirty_clients_get_texts_of_their_schemas(live):
    """Every schema, at temperatures of 0 and 1 in turn: all texts that end are valid, and all end."""
    pytest.importorskip("llguidance")
    jobs = [(schema, float(at % 2)) for at, schema in enumerate(SCHEMAS)]
    results = list[tuple[dict, str, str]]()

    async def work(client):
        while jobs:
            schema, heat = jobs.pop()
            # No whitespace between the parts of a value: the model writes Python, and would indent at will.
            asked = {"name": "a", "schema": {**schema, "x-guidance": {"whitespace_flexible": False}}}
            answer = await client.completions.create(
                model="pycode-chat",
                prompt="data = ",
                max_tokens=300,
                temperature=heat,
                seed=len(jobs),
                extra_body={"response_format": {"type": "json_schema", "json_schema": asked}, "speculation": "on"},
            )
            results.append((schema, answer.choices[0].finish_reason, answer.choices[0].text))

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            await asyncio.gather(*(work(client) for _ in range(30)))

    asyncio.run(run())
    assert len(results) == 30
    for schema, reason, text in results:
        assert reason == "stop" and is_valid(json.loads(text), schema), (schema, reason, text)


def test_a_chat_is_the_completion_of_its_template(client):
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "def add(a, b):"}]
    answer = client.chat.completions.create(model="pycode-chat", messages=messages, max_completion_tokens=12)
    prompt = "<s># system: Write Python.\n# user: def add(a, b):\n# assistant:"
    same = client.completions.create(model="pycode-chat", prompt=prompt, max_tokens=12)
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.usage.prompt_tokens == same.usage.prompt_tokens
    chunks = client.chat.completions.create(
        model="pycode-chat", messages=messages, max_completion_tokens=12, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content


def test_penalties_and_biases_are_those_of_the_offline_engine(client, pair):
    engine = load(pair)
    [banned] = {engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=1))[0].tokens[0]}
    params = {"temperature": 0.8, "seed": 3, "presence_penalty": 0.7, "frequency_penalty": 0.3}
    bias = {banned: -100.0}
    answer = client.completions.create(
        model="pycode-chat",
        prompt=PROMPTS[1],
        max_tokens=NUM,
        logit_bias={str(banned): -100},
        **params,
        extra_body={"repetition_penalty": 1.1, "min_p": 0.05},
    )
    wanted = SamplingParams(NUM, logit_bias=bias, repetition_penalty=1.1, min_p=0.05, **params)
    assert answer.choices[0].text == engine.generate(PROMPTS[1], wanted, speculative=False)[0].text
    free = client.completions.create(model="pycode-chat", prompt=PROMPTS[1], max_tokens=1)
    forbidden = client.completions.create(
        model="pycode-chat", prompt=PROMPTS[1], max_tokens=1, logit_bias={str(banned): -100}
    )
    assert free.choices[0].text != forbidden.choices[0].text


def test_errors_are_those_that_the_client_knows(client):
    with pytest.raises(openai.BadRequestError, match="`suffix`: it is not supported") as refused:
        client.completions.create(model="pycode-chat", prompt="x", suffix="y")
    assert refused.value.param == "suffix" and refused.value.code == "unsupported_field"
    with pytest.raises(openai.BadRequestError, match="expected at most 1024"):
        client.completions.create(model="pycode-chat", prompt="x " * 1200)


def test_the_logprobs_of_a_prompt_are_those_of_transformers(client, pair):
    """To the rounding of float32, in chunks, and as well where rows of the prompt were kept."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = Path(__file__).parents[3] / "examples/models/pycode-16m"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = "".join(PROMPTS)[:1200]
    ids = load(pair).encode(prompt)
    assert len(ids) > 100
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy()
    asked = {"model": "pycode-chat", "prompt": prompt, "echo": True, "logprobs": 1}
    client.completions.create(model="pycode-chat", prompt=prompt, max_tokens=2)
    for num in (0, 1):
        [choice] = client.completions.create(**asked, max_tokens=num).choices
        told = choice.logprobs
        assert choice.text.startswith(prompt) and len(told.tokens) == len(ids) + num
        own = [row[token] for row, token in zip(rows[:-1], ids[1:], strict=True)]
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1 : len(ids)] == pytest.approx(own, abs=2e-4)
        assert [max(top.values()) for top in told.top_logprobs[1 : len(ids)]] == pytest.approx(
            rows[:-1].max(axis=-1).tolist(), abs=2e-4
        )
        assert all(choice.text.startswith(t, at) for t, at in zip(told.tokens, told.text_offset, strict=True))


def test_a_stream_that_is_dropped_frees_its_slot(live, client):
    before = num_cancelled(live)
    stream = client.completions.create(model="pycode-chat", prompt=PROMPTS[2], max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    while live.metric("active_outputs") or live.metric("queued_outputs"):
        pass
    assert num_cancelled(live) == before + 1


def num_cancelled(live):
    _, text = live.ask("GET", "/metrics")
    found = re.search(r'speccompile_finished_outputs_total\{reason="cancelled"\} (\S+)', text)
    return float(found[1]) if found else 0.0
