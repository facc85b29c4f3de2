# SPDX-License-Identifier: Apache-2.0
"""Conversations with an engine: its bundle's chat template makes the prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import BundleError, RuntimeFault
from speccompile.runtime.spec_engine import SpecEngine
from tests.runtime.test_spec_engine import Letters, make_engine, text

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
    made.bundle = SimpleNamespace(tokenizer_path=tmp_path / "tokenizer.json")
    return made


def test_an_answer_is_that_to_the_rendered_prompt(engine: SpecEngine) -> None:
    params = SamplingParams(max_new_tokens=6)
    assert engine.chat(ABC, params).text == text("abcd", 6)
    assert engine.chat(ABC, params, variables={"more": "cb"}).text == text("abccbd", 6)
    assert engine.chat(ABC, params, speculative=False).stats["num_draft_tokens"] == 0
    stream = engine.stream(engine.chat_prompt(ABC), params)
    assert "".join(step.text for step in stream) == text("abcd", 6)


@pytest.mark.parametrize("messages", ["abc", [], [{"content": "a"}], ["a"], {"role": "user"}, None])
def test_what_are_no_messages_is_refused(engine: SpecEngine, messages: Any) -> None:
    with pytest.raises(RuntimeFault, match=r"messages: got .*; expected a list of messages with `role` and `content`"):
        engine.chat(messages)


def test_what_the_template_refuses_is_told(engine: SpecEngine, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RuntimeFault, match="messages: got roles must alternate; expected messages that the chat templ"):
        engine.chat(ABC)


def test_without_a_template_or_its_package(engine: SpecEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(BundleError, match="got no chat template"):
        engine.chat(ABC)
    with pytest.raises(BundleError, match="chat: got no chat template"):
        make_engine().chat(ABC)
    monkeypatch.setitem(sys.modules, "speccompile.runtime.chat_template", None)
    with pytest.raises(RuntimeFault, match=r"no package .*; expected the packages of the extra \[serve\]"):
        engine.chat(ABC)
