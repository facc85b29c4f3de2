# SPDX-License-Identifier: Apache-2.0
"""Conversations with an engine: its bundle's chat template makes the prompt."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speccompile.common.chat_prompts import message_for_template
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import BundleError, RuntimeFault
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.serving.openai.chat_body import ChatBody
from tests.lab.engines import Letters
from tests.runtime.test_spec_engine import make_engine, text

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ more }}{% if add_generation_prompt %}d{% endif %}"
ABC = [{"role": "system", "content": "a"}, {"role": "user", "content": "bc"}]


class Tokenizer(Letters):
    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        assert not add_special_tokens  # the template writes them
        return super().encode(text)


@pytest.fixture
def engine(tmp_path: Path) -> SpecEngine:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    made: SpecEngine = make_engine(Tokenizer())
    made.bundle = SimpleNamespace(tokenizer_folder=tmp_path)
    return made


def test_an_answer_is_that_to_the_rendered_prompt(engine):
    params = SamplingParams(max_new_tokens=6)
    assert engine.chat(ABC, params).text == text("abcd", 6)
    assert engine.chat(ABC, params, variables={"more": "cb"}).text == text("abccbd", 6)
    assert engine.chat(ABC, params, speculative=False).stats["num_draft_tokens"] == 0
    stream = engine.stream(engine.chat_prompt(ABC), params)
    assert "".join(step.text for step in stream) == text("abcd", 6)


LIST, NAME, CONTENT = "a list of messages with `role` and `content`", "a name such as", "a text, or a list of parts"


@pytest.mark.parametrize(
    ("messages", "where", "expected"),
    [
        *((wrong, "messages", LIST) for wrong in ("abc", [], {"role": "user"}, None, 3)),
        (["a"], r"messages\[0\]", "an object with `role`"),
        ([*ABC, {"content": "a"}], r"messages\[2\]\.role", NAME),
        ([{"role": 3, "content": "a"}], r"messages\[0\]\.role", NAME),
        *(
            ([{"role": "user", "content": wrong}], r"messages\[0\]\.content", CONTENT)
            for wrong in (None, 3, {"type": "text"}, ["a"], [{"type": "text"}], [{"type": "audio"}])
        ),
        ([{"role": "user", "content": "\ud800"}], "messages", "Unicode text"),
    ],
)
def test_what_are_no_messages_is_refused(engine, messages, where, expected):
    with pytest.raises(RuntimeFault, match=rf"{where}: got .*; expected {expected}"):
        engine.chat(messages)


def test_contents_are_read_as_the_server_reads_them(tmp_path, engine):
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, {"function": {"name": "g", "arguments": "{"}}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
    ]
    told = [message_for_template(message) for message in messages]
    assert told[0]["content"] == "ab" and told[1]["content"] == "" and told[2] == messages[2]
    assert [c["function"]["arguments"] for c in told[1]["tool_calls"]] == [{"x": 1}, "{"]
    body = ChatBody(messages=[{**m, "tool_calls": m.get("tool_calls", [])} for m in messages[:2]])
    for ours, theirs in zip(told, [message.for_template() for message in body.messages], strict=False):
        assert (ours["role"], ours["content"]) == (theirs["role"], theirs["content"])


def test_what_the_template_refuses_is_told(engine, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RuntimeFault, match="messages: got roles must alternate; expected messages that the chat templ"):
        engine.chat(ABC)


def test_without_a_template_or_its_package(engine, tmp_path, monkeypatch):
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(BundleError, match="got no chat template"):
        engine.chat(ABC)
    with pytest.raises(BundleError, match="messages: got no chat template, as there"):
        make_engine().chat(ABC)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setitem(sys.modules, "speccompile.common.chat_template", None)
    with pytest.raises(RuntimeFault, match=r"no package .*; expected the packages of the extra \[serve\]"):
        engine.chat(ABC)
