# SPDX-License-Identifier: Apache-2.0
"""The responses of OpenAI's other API, and messages as Anthropic's API has them."""

import asyncio
import json

import pytest

from speccompile.runtime.service import Service
from speccompile.serving.openai.agent_routes import agent_routes
from speccompile.serving.openai.app import OpenAIServer, ServerOptions, make_app
from speccompile.serving.openai.tool_formats import REASONING
from speccompile.serving.openai.tools import ChatFormats
from tests.runtime.test_structured_text import make_engine
from tests.serving.asgi_lab import get, post
from tests.serving.openai.test_tools import TEMPLATE, TOOLS, WEATHER

pytest.importorskip("llguidance")
openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
FLAT = [{"type": "function", **WEATHER}]
SAID = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
CLAUDE_TOOLS = [{"name": "weather", "description": "w", "input_schema": WEATHER["parameters"]}]


@pytest.fixture(scope="module")
def server():
    service = Service(make_engine("draft chain"))
    options = ServerOptions("mock", tool_call_parser="hermes", request_metrics=True, vllm_metrics=True)
    server = OpenAIServer(service, options)
    server.template = TEMPLATE
    service.start()
    yield server
    service.close()


@pytest.fixture(scope="module")
def app(server):
    return make_app(server, [agent_routes])


def respond(app, **fields):
    async def run():
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as http,
            openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0) as client,
        ):
            answer = await client.responses.create(
                **{"model": "mock", "input": "a", "max_output_tokens": 200, **fields}
            )
            return [event async for event in answer] if fields.get("stream") else answer

    return asyncio.run(run())


def test_a_response_is_the_chats_text(app):
    answer = respond(
        app, input=[{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], max_output_tokens=9
    )
    chat = post(app, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}).json()
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    ends = {"length": ("incomplete", "max_output_tokens"), "stop": ("completed", None)}[
        chat["choices"][0]["finish_reason"]
    ]
    details = answer.incomplete_details
    assert (answer.status, details and details.reason) == ends
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_output_tokens": 3},
        {"max_output_tokens": 45, "tools": FLAT, "tool_choice": "required", "temperature": 1.0},
        {"tools": FLAT, "tool_choice": "required", "temperature": 1.0},
    ],
    ids=["text", "call", "whole call"],
)
def test_what_a_limit_cut_off_is_incomplete(app, fields):
    status = "incomplete" if "max_output_tokens" in fields else "completed"
    whole = respond(app, **fields)
    assert [whole.status, *(item.status for item in whole.output)] == [status, status]
    events = respond(app, stream=True, **fields)
    begun, [done] = [
        [event.item for event in events if event.type == f"response.output_item.{w}"] for w in ("added", "done")
    ]
    assert [item.status for item in begun] == ["in_progress"] and done.status == status
    assert events[-1].type == f"response.{status}" and events[-1].response.output == [done]


def test_a_response_calls_a_function_and_takes_its_result(app):
    choice = {"type": "function", "name": "weather"}
    answer = respond(app, tools=FLAT, tool_choice=choice, temperature=1.0)
    [call] = answer.output
    assert (
        call.type == "function_call" and call.name == "weather" and set(json.loads(call.arguments)) == {"city", "days"}
    )
    items = [{"role": "user", "content": "a"}, call.model_dump(exclude_none=True)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "b"})
    assert respond(app, input=items, tools=FLAT, max_output_tokens=2).usage.input_tokens > answer.usage.input_tokens


def test_a_response_follows_a_schema(app):
    text = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER["parameters"], "strict": True}}
    assert set(json.loads(respond(app, text=text, temperature=1.0).output_text)) == {"city", "days"}


@pytest.mark.parametrize("fields", [{"max_output_tokens": 9}, {"tools": FLAT, "tool_choice": "required"}])
def test_a_stream_of_events_ends_with_the_whole_response(app, fields):
    events = respond(app, stream=True, **fields)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    last = events[-1].response
    assert last.status in ("completed", "incomplete") and last.usage.output_tokens > 0
    [item] = last.output
    kind = "response.output_text.delta" if item.type == "message" else "response.function_call_arguments.delta"
    pieces = "".join(event.delta for event in events if event.type == kind)
    assert pieces == (item.content[0].text if item.type == "message" else item.arguments)


def test_a_message_has_blocks_in_anthropics_shape(app):
    body = {"model": "mock", "max_tokens": 9, "system": "b", "messages": [{"role": "user", "content": "a"}]}
    answer = post(app, "/v1/messages", body).json()
    assert (answer["type"], answer["role"], answer["content"][0]["type"]) == ("message", "assistant", "text")
    assert answer["stop_reason"] in ("max_tokens", "end_turn") and answer["usage"]["output_tokens"] > 0
    body |= {"max_tokens": 200, "tools": CLAUDE_TOOLS, "tool_choice": {"type": "any"}, "temperature": 1.0}
    called = post(app, "/v1/messages", body).json()
    [use] = called["content"]
    assert (use["type"], use["name"], called["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert set(use["input"]) == {"city", "days"}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "b"}]}
    messages = [*body["messages"], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    again = post(app, "/v1/messages", {**body, "messages": messages, "tool_choice": {"type": "auto"}, "max_tokens": 2})
    assert again.status == 200 and again.json()["usage"]["input_tokens"] > called["usage"]["input_tokens"]


def test_a_message_names_the_stop_sequence_that_ended_it(app):
    whole = post(app, "/v1/messages", {**SAID, "max_tokens": 20}).json()
    [text] = [block["text"] for block in whole["content"]]
    assert whole["stop_reason"] in ("max_tokens", "end_turn") and whole["stop_sequence"] is None
    stop = next(text[at] for at in range(2, len(text)) if text[at] not in text[:at])
    body = {**SAID, "max_tokens": 20, "stop_sequences": ["nowhere", stop]}
    ended = post(app, "/v1/messages", body).json()
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)
    assert ended["content"][0]["text"] == text.partition(stop)[0]
    delta = events_of(post(app, "/v1/messages", {**body, "stream": True}))[-2][1]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def events_of(reply):
    """Returns (name, data) of the events of a stream."""
    parts = [part.split("\n") for part in reply.body.decode().strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def test_a_message_is_streamed_in_blocks(server, app, monkeypatch):
    body = {"max_tokens": 200, "messages": [{"role": "user", "content": "a"}], "stream": True}
    body |= {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "weather"}, "temperature": 1.0}
    events = events_of(post(app, "/v1/messages", body))
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"] and names[-3:] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in events)
    arguments = "".join(data["delta"]["partial_json"] for name, data in events if name == "content_block_delta")
    assert set(json.loads(arguments)) == {"city", "days"} and events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/messages", {"messages": []}, "max_tokens"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "mood": 1}, "mood"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 3}, "image"),
        ("/v1/messages", {"messages": 3, "max_tokens": 3}, "`messages`: got 3; expected a list of objects"),
        ("/v1/messages", {"messages": ["a"], "max_tokens": 3}, "`messages.0`: got a text; expected an object"),
        ("/v1/messages", {**SAID, "tool_choice": "auto"}, "`tool_choice`: got a text; expected an object"),
        ("/v1/messages", {**SAID, "tool_choice": {"type": "all"}}, "`tool_choice.type`: got 'all'; expected auto"),
        ("/v1/messages", {**SAID, "tools": {}, "tool_choice": {"type": {}}}, "another type"),
        ("/v1/messages", {**SAID, "system": [{"type": "image"}]}, "`system.0`: got a part of type image"),
        (
            "/v1/messages",
            {**SAID, "messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
            "`messages.0.content.0.input` is missing",
        ),
        ("/v1/responses", {"input": "a", "previous_response_id": "x"}, "previous_response_id"),
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [3]}, "`input.0`: got 3; expected an object"),
        ("/v1/responses", {"input": [{"role": "user"}]}, "`input.0.content` is missing"),
        ("/v1/responses", {"input": [{"type": "item_reference"}]}, "`input.0`: got an item of type item_reference"),
        ("/v1/responses", {"input": [{"content": [{"type": "input_image"}]}]}, "`input.0.content.0`: got a part of"),
        ("/v1/responses", {"input": "a", "text": {"verbosity": "low"}}, "`text.verbosity`: got 'low'"),
        ("/v1/responses", [], "no JSON object"),
    ],
)
def test_what_they_do_not_read_is_refused(app, path, body, message):
    reply = post(app, path, body)
    assert reply.status == 400 and message in reply.json()["error"]["message"]
    assert path == "/v1/responses" or reply.json()["type"] == "error"


def test_answers_and_metrics_have_vllms_shape(app):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20, "ignore_eos": True, "speculation": "on"}
    answer = post(app, "/v1/chat/completions", body).json()
    told, details = answer["metrics"]["speculative_decoding"], answer["usage"]["completion_tokens_details"]
    assert told["num_accepted_draft_tokens"] == details["accepted_prediction_tokens"] > 0
    assert told["mean_acceptance_length"] == 1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"]
    assert sum(i * count for i, count in enumerate(told["acceptance_histogram"])) == told["num_accepted_draft_tokens"]
    assert len(told["acceptance_histogram"]) == told["num_spec_tokens"] + 1
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = post(app, "/v1/chat/completions", {**body, **options}).events()
    assert last["metrics"]["speculative_decoding"] == told
    assert "metrics" not in post(app, "/v1/chat/completions", {**body, "n": 2}).json()
    lines = get(app, "/metrics").body.decode().splitlines()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        [line] = [x for x in lines if x.startswith(f'vllm:spec_decode_{name}_total{{engine="0",model_name="mock"}}')]
        assert float(line.split()[-1]) > 0
    assert any(x.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{") for x in lines)


def test_a_reasoning_is_a_block_of_its_own(server, app, monkeypatch):
    monkeypatch.setattr(server, "_formats", ChatFormats(None, ("<", ">")))
    body = {"max_tokens": 60, "messages": [{"role": "user", "content": "a<"}]}
    answer = post(app, "/v1/messages", body).json()
    assert answer["content"][0]["type"] == "thinking"
    assert REASONING and TOOLS and respond(app, input="a<").output[0].type == "reasoning"
    monkeypatch.setattr(server, "_formats", ChatFormats(None, ("<", "}")))
    output = respond(app, input="a<", max_output_tokens=9).output
    assert [(item.type, item.status) for item in output] == [("reasoning", "completed"), ("message", "incomplete")]
