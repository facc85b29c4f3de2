# SPDX-License-Identifier: Apache-2.0
"""Twelve requests over the four APIs, whole and streamed: a refactor shows an empty diff (`make golden` writes it)."""

import difflib
import json
import os
import re
from pathlib import Path

import pytest

from speccompile.runtime.service import ServiceOptions
from speccompile.serving.openai.app import make_app
from speccompile.serving.openai.server import ServerOptions
from speccompile.serving.openai.tool_formats import HERMES
from speccompile.serving.openai.tools import ChatFormats
from tests.lab.servers import chat_server
from tests.runtime.test_structured_text import make_engine
from tests.serving.asgi_lab import post
from tests.serving.openai.test_tools import TEMPLATE, TOOLS, WEATHER

pytest.importorskip("llguidance")
FOLDER = Path(__file__).parent / "golden"
COMPLETION, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "a"}]
THINKING = [{"role": "user", "content": "a<"}]  # the prompt has begun the reasoning
REPEATS = {"logit_bias": {"5": 4.0}, "seed": 3, "temperature": 1.0}
FLAT = [{"type": "function", **WEATHER}]
CLAUDE_TOOLS = [{"name": "weather", "description": "w", "input_schema": WEATHER["parameters"]}]
SCHEMA = {"name": "w", "schema": WEATHER["parameters"], "strict": True}
DRAWN = {"temperature": 1.0, "seed": 4}
USAGE = {"stream_options": {"include_usage": True}}
# Name -> (path, fields of the body, further fields of a whole answer, further fields of a stream).
REQUESTS = {
    "completion-n": (COMPLETION, {"prompt": ["a", "bc"], "n": 2, "max_tokens": 4, **DRAWN}, {"return_stats": True}, {}),
    "completion-echo": (COMPLETION, {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 5}, {}, USAGE),
    "completion-prompt": (COMPLETION, {"prompt": "ab", "echo": True, "max_tokens": 0}, {"prompt_logprobs": 1}, {}),
    "chat-logprobs": (
        CHAT,
        {"messages": SAID, "n": 2, "max_tokens": 4, "logprobs": True, "top_logprobs": 1, **DRAWN},
        {"prompt_logprobs": 0},
        USAGE,
    ),
    "chat-call": (CHAT, {"messages": SAID, "tools": TOOLS, "tool_choice": "required", **DRAWN}, {}, USAGE),
    "chat-reasoning": (CHAT, {"messages": THINKING, "max_tokens": 24, "stop": ["#"], **REPEATS}, {}, {}),
    "chat-structured": (
        CHAT,
        {"messages": SAID, "response_format": {"type": "json_schema", "json_schema": SCHEMA}, **DRAWN},
        {},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat-error": (CHAT, {"messages": SAID, "max_tokens": 100_000}, {}, {}),
    "responses-reasoning": (RESPONSES, {"input": "a<", "max_output_tokens": 24, **REPEATS}, {}, {}),
    "responses-call": (RESPONSES, {"input": "a", "tools": FLAT, "tool_choice": "required", **DRAWN}, {}, {}),
    "messages-thinking": (MESSAGES, {"messages": THINKING, "max_tokens": 24, "stop_sequences": ["a"]}, {}, {}),
    "messages-call": (
        MESSAGES,
        {"messages": SAID, "tools": CLAUDE_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 200},
        {},
        {},
    ),
}
_ID = re.compile(r"((?:cmpl|chatcmpl)-|resp_|msg_)[0-9a-f]{32}|((?:fc_)?call_)[A-Za-z0-9]{9}(?=\")")
_TIME = re.compile(r'"([a-z_]+_(?:ms|per_s|per_second|at)|created)": ?[0-9.]+')
_FRACTION = re.compile(r"-?[0-9]+\.[0-9]{3,}")


@pytest.fixture(scope="module")
def server():
    options = ServerOptions("mock", request_metrics=True)
    with chat_server(make_engine("draft chain"), TEMPLATE, options, ServiceOptions(keep_prefixes=False)) as (_, server):
        yield server


def normalised(text: str) -> str:
    """Returns a text without what differs from run to run: identities, times, and the last bits of numbers."""
    text = _ID.sub(lambda found: f"{found[1] or found[2]}ID", text)
    text = _TIME.sub(lambda found: f'"{found[1]}": 0', text)
    return _FRACTION.sub(lambda found: f"{float(found[0]):.3f}", text)


def by_choice(lines: list[str]) -> list[str]:
    """Returns the chunks of a stream sorted by choice: which of two comes first depends on the scheduler."""
    return sorted(lines, key=lambda line: (re.findall(r'"choices":\[\{"index":(\d+)', line) or ["9"])[0])


def answers(app, name: str) -> str:
    """Returns both answers to a request as text, an event a line."""
    path, same, whole, streamed = REQUESTS[name]
    same = {**same, "speculation": "off"}
    lines = [f"POST {path} {json.dumps(same)}"]
    for more in (whole, {"stream": True, **streamed}):
        reply = post(app, path, {**same, **more})
        body = reply.body.decode()
        is_stream = reply.headers["content-type"].startswith("text/event-stream")
        lines += ["", f"{json.dumps(more)} -> {reply.status} {reply.headers['content-type']}"]
        events = [event.replace("\n", " ") for event in body.split("\n\n") if event]
        lines += by_choice(events) if is_stream else [json.dumps(json.loads(body))]
    return normalised("\n".join(lines)) + "\n"


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_as_recorded(server, monkeypatch, name):
    markers = ("<", "}}") if "reasoning" in name or "thinking" in name else None
    monkeypatch.setattr(server, "_formats", ChatFormats(HERMES, markers))
    text, path = answers(make_app(server), name), FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    recorded = path.read_text() if path.exists() else ""
    diff = "".join(difflib.unified_diff(recorded.splitlines(True), text.splitlines(True), str(path), "now"))
    assert not diff, f"{diff}\nIf this is meant: make golden"
