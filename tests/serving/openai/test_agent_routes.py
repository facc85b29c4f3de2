# SPDX-License-Identifier: Apache-2.0
"""The responses of OpenAI's other API, and messages as Anthropic's API has them."""

import json

import pytest

from speccompile.common.chat_template import ChatTemplate
from speccompile.serving.openai.tools import ChatFormats
from tests.lab.servers import ask_openai
from tests.serving.asgi_lab import get, post
from tests.serving.openai.test_tools import PATH, WEATHER

pytest.importorskip("llguidance")
openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
FLAT = [{"type": "function", **WEATHER}]
SAID = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
CLAUDE_TOOLS = [{"name": "weather", "description": "w", "input_schema": WEATHER["parameters"]}]


def respond(app, **fields):
    return ask_openai(app, "responses", **{"model": "mock", "input": "a", "max_output_tokens": 200, **fields})


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
def test_truncated_response_is_incomplete(app, fields):
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


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/messages", {"messages": SAID["messages"]}, "`max_tokens` is missing"),
        ("/v1/messages", {**SAID, "messages": []}, "`messages`: got []; expected at least 1 item. "),
        ("/v1/messages", {**SAID, "mood": 1}, "Unknown field `mood`"),
        ("/v1/messages", {**SAID, "messages": 3}, "`messages`: got 3; expected a list. "),
        ("/v1/messages", {**SAID, "messages": ["a"]}, "`messages.0`: got 'a'; expected an object whose `role` is"),
        ("/v1/messages", {**SAID, "tool_choice": "auto"}, "`tool_choice`: got 'auto'; expected an object"),
        ("/v1/messages", {**SAID, "tool_choice": {"type": "all"}}, "type`: got 'all'; expected 'auto', 'any'"),
        ("/v1/messages", {**SAID, "tool_choice": {"type": "tool"}}, "`tool_choice.name`: it goes with the type `tool`"),
        ("/v1/messages", {**SAID, "system": [{"type": "image"}]}, "`system.0.type`: got 'image'; expected 'text'"),
        ("/v1/messages", {**SAID, "thinking": {"type": "enabled", "depth": 1}}, "Unknown field `thinking.depth`"),
        ("/v1/messages", {**SAID, "service_tier": "priority"}, "`service_tier`: it is not supported"),
        ("/v1/messages", {**SAID, "tools": [{"type": "web_search_20250305", "name": "a"}]}, "`tools.0.type`: got"),
        ("/v1/messages", {**SAID, "tools": [{"name": "a"}]}, "`tools.0.input_schema` is missing"),
        ("/v1/messages", {**SAID, "tools": [{**CLAUDE_TOOLS[0], "mood": 1}]}, "Unknown field `tools.0.mood`"),
        *(
            ("/v1/messages", {**SAID, "messages": [{"role": role, "content": [block]}]}, message)
            for role, block, message in [
                ("user", {"type": "image"}, "content.0`: got {'type': 'image'}; expected an object whose"),
                (
                    "user",
                    {"type": "tool_use", "id": "a", "name": "b", "input": {}},
                    "`messages.0.content.0`: got {'type'",
                ),
                ("user", {"type": "text", "text": "a", "mood": 1}, "Unknown field `messages.0.content.0.mood`"),
                ("user", {"type": "text", "text": "a", "citations": [1]}, "content.0.citations`: it is not"),
                ("user", {"type": "text"}, "`messages.0.content.0.text` is missing"),
                ("user", {"type": "tool_result", "tool_use_id": "a", "is_wrong": True}, "0.content.0.is_wrong`"),
                ("assistant", {"type": "tool_use", "id": "a", "name": "b"}, "`messages.0.content.0.input` is missing"),
                ("assistant", {"type": "redacted_thinking", "data": "a"}, "type` is text or tool_use or thinking"),
                ("assistant", {"type": "tool_use", "id": "a", "name": "b", "input": {}}, "goes on from texts alone"),
            ]
        ),
        ("/v1/responses", {"input": "a", "previous_response_id": "x"}, "`previous_response_id`: it is not supported"),
        ("/v1/responses", {"input": "a", "mood": 1}, "Unknown field `mood`"),
        ("/v1/responses", {"input": []}, "`input`: expected a text or a list of items"),
        ("/v1/responses", {"input": [3]}, "`input.0`: got 3; expected an object"),
        ("/v1/responses", {"input": [{"role": "user"}]}, "`input.0.content` is missing"),
        ("/v1/responses", {"input": [{"type": "item_reference"}]}, "expected an object whose `type` is"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "`input.0.content.0.type",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": "a", "mood": 1}]}, "Unknown field `input.0.mood`"),
        (
            "/v1/responses",
            {"input": [{"type": "reasoning", "id": "a", "encrypted_content": "b"}]},
            "0.encrypted_content`",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "mood": 1}]}]},
            "Unknown field `input.0.content.0.mood`",
        ),
        ("/v1/responses", {"input": "a", "text": {"verbosity": "low"}}, "`text.verbosity`: it is not supported"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "mood": 1}}}, "`text.format.mood`"),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "web_search"}]},
            "`tools.0.type`: got 'web_search'; expected 'function'",
        ),
        ("/v1/responses", {"input": "a", "tools": [{**FLAT[0], "mood": 1}]}, "Unknown field `tools.0.mood`"),
        ("/v1/responses", {"input": "a", "include": ["web_search_call.results"]}, "`include`: it is not supported"),
        ("/v1/responses", {"input": "a", "reasoning": {"mood": 1}}, "Unknown field `reasoning.mood`"),
        ("/v1/responses", [], "The body: got []; expected an object. Correct it."),
        ("/v1/messages/count_tokens", SAID, "Unknown field `max_tokens`"),
    ],
)
def test_unsupported_agent_fields_are_refused(app, path, body, message):
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
    assert respond(app, input="a<").output[0].type == "reasoning"
    monkeypatch.setattr(server, "_formats", ChatFormats(None, ("<", "}")))
    output = respond(app, input="a<", max_output_tokens=9).output
    assert [(item.type, item.status) for item in output] == [("reasoning", "completed"), ("message", "incomplete")]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize", PATH])
@pytest.mark.parametrize("field", ["input", "messages", "tools", "system"])
def test_a_hundred_thousand_brackets_are_refused(app, path, field):
    reply = post(app, path, f'{{"{field}": {"[" * 100_000}'.encode() + b"]" * 100_000 + b"}")
    assert reply.status == 400 and "JSON" in reply.json()["error"]["message"]


def test_deep_json_in_a_text_stays_a_text(app):
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "[" * 100_000}
    assert post(app, "/v1/responses", {"input": [{"role": "user", "content": "a"}, call]}).status == 200


def test_an_answer_goes_on_from_a_turn_of_the_assistant(app):
    """The text of that turn is not in the answer, and what the template writes after it not in the prompt."""
    turns = [
        *SAID["messages"],
        {"role": "assistant", "content": [{"type": "text", "text": "b "}, {"type": "text", "text": "cd"}]},
    ]
    answer = post(app, "/v1/messages", {"max_tokens": 9, "messages": turns}).json()
    prompt = post(app, "/tokenize", {"prompt": "ab cd", "add_special_tokens": False}).json()["tokens"]
    [same] = post(app, "/v1/completions", {"prompt": prompt, "max_tokens": 9}).json()["choices"]
    assert answer["content"] == [{"type": "text", "text": same["text"]}]
    chat = {"messages": [*SAID["messages"], {"role": "assistant", "content": "b cd"}], "continue_final_message": True}
    assert post(app, PATH, {**chat, "max_tokens": 9}).json()["choices"][0]["message"]["content"] == same["text"]
    for fields, message in [
        ({"add_generation_prompt": True}, "excludes add_generation_prompt"),
        ({"messages": SAID["messages"]}, "not the assistant's"),
    ]:
        reply = post(app, PATH, {**chat, **fields})
        assert reply.status == 400 and message in reply.json()["error"]["message"]


def test_continuation_needs_the_last_turn_in_the_template(server, app, monkeypatch):
    monkeypatch.setattr(server, "template", ChatTemplate("{{ messages[0].content }}"))
    turns = [*SAID["messages"], {"role": "assistant", "content": "b"}]
    reply = post(app, "/v1/messages", {**SAID, "messages": turns})
    assert reply.status == 400 and "does not write the text of the last message" in reply.json()["error"]["message"]


def test_previous_turns_reach_the_template(server, app, monkeypatch):
    """Reasoning, calls and failed results, in both shapes, are one assistant's message and those of its tools."""
    monkeypatch.setattr(server, "template", ChatTemplate("{{ messages | tojson }}"))
    seen = []
    monkeypatch.setattr(ChatTemplate, "render", lambda self, messages, *rest: seen.append(messages) or "a")
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "ab"}}
    said = [{"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "b"}, use]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "d", "is_error": True}
    turns = [*SAID["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    assert post(app, "/v1/messages", {**SAID, "messages": turns}).status == 200
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": "b"},
        {
            "type": "function_call",
            "call_id": "c",
            "name": "weather",
            "arguments": '{"city": "ab"}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c", "output": "Error: d"},
    ]
    assert post(app, "/v1/responses", {"input": items, "max_output_tokens": 3}).status == 200
    assert seen[0] == seen[1]
    assert [message["role"] for message in seen[0]] == ["user", "assistant", "tool"]
    assert (seen[0][1]["reasoning_content"], seen[0][1]["content"], seen[0][2]["content"]) == ("t", "b", "Error: d")
    assert seen[0][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "ab"}}


def test_tokens_of_a_message_are_counted_without_an_answer(server, app):
    before = server.service.stats()["num_requests"]
    asked = {"messages": SAID["messages"], "system": "b", "tools": CLAUDE_TOOLS}
    count = post(app, "/v1/messages/count_tokens", asked).json()
    assert server.service.stats()["num_requests"] == before
    answer = post(app, "/v1/messages", {**asked, "max_tokens": 2}).json()
    assert count == {"input_tokens": answer["usage"]["input_tokens"]}
    assert post(app, "/v1/messages/count_tokens", {**asked, "model": "other"}).json()["type"] == "error"
