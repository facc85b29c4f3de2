# SPDX-License-Identifier: Apache-2.0
"""Reasoning, content and tool calls of a text, whole and however it is cut into parts."""

import json

import pytest

from speccompile.serving.openai.gemma_calls import call_from_text
from speccompile.serving.openai.message import MessageReader, message_from_deltas
from speccompile.serving.openai.tool_formats import (
    GEMMA,
    HERMES,
    LLAMA,
    MISTRAL,
    REASONING,
    TOOL_FORMATS,
    format_from_template,
    markers_from_template,
)

THINK = REASONING["qwen3"]
CALL, OTHER = {"city": "Bonn", "n": [1, {"a": "}"}]}, {"q": 'say "hi" \\ </tool_call'}
ONE, TWO = json.dumps(CALL), json.dumps(OTHER)
HERMES_CALLS = (
    f'<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>\n'
    f'<tool_call>\n{{"arguments": {TWO}, "name": "find"}}\n</tool_call>'
)
LISTED = f'[{{"name": "weather", "arguments": {ONE}}}, {{"name": "find", "arguments": {TWO}}}]'
BOTH = [("weather", CALL), ("find", OTHER)]
TWO_CALLS = [("f", {"a": 1}), ("g", {})]
CASES = {
    "hermes": (HERMES, HERMES_CALLS, "", BOTH),
    "hermes after text": (HERMES, f"I look it up.\n{HERMES_CALLS}", "I look it up.\n", BOTH),
    "hermes without calls": (HERMES, "a < b and <tool", "a < b and <tool", []),
    "llama": (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    "llama, tagged, two": (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    "llama, plain text": (LLAMA, "It is {warm}.", "It is {warm}.", []),
    "llama, another object": (LLAMA, '{"a": {"name": "f"}}', '{"a": {"name": "f"}}', []),
    "mistral list": (MISTRAL, f"[TOOL_CALLS]{LISTED}", "", BOTH),
    "mistral names": (
        MISTRAL,
        'Yes. [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "Yes. ",
        [("f", {"a": 1}), ("g", {})],
    ),
    "gemma": (
        GEMMA,
        '<|tool_call>call:f{city:<|"|>a, {b}<|"|>,n:3,on:true,l:[1,<|"|>x<|"|>],o:{p:-1.5}}<tool_call|>',
        "",
        [("f", {"city": "a, {b}", "n": 3, "on": True, "l": [1, "x"], "o": {"p": -1.5}})],
    ),
    "gemma by grammar": (GEMMA, LISTED, "", BOTH),
    "functiongemma": (
        TOOL_FORMATS["functiongemma"],
        "<start_function_call>call:f{a:<escape>b<escape>}<end_function_call>",
        "",
        [("f", {"a": "b"})],
    ),
}


def read(form, text, size, markers=None, is_thinking=False):
    reader, deltas = MessageReader(markers, form, is_thinking), []
    for at in range(0, len(text), size):
        deltas += reader.push(text[at : at + size])
    return [*deltas, *reader.push("", is_last=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_calls_are_the_same_however_the_text_is_cut(name, size):
    form, text, content, calls = CASES[name]
    message = message_from_deltas(read(form, text, size))
    got = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
    assert got == calls
    assert message["content"] == (content or (None if calls else ""))


def test_deltas_are_those_of_openai():
    deltas = [delta for delta in read(HERMES, HERMES_CALLS, 5) if delta.get("tool_calls")]
    parts = [part for delta in deltas for part in delta["tool_calls"]]
    first = [part for part in parts if "id" in part]
    assert [part["index"] for part in first] == [0, 1] and first[0]["function"] == {"name": "weather", "arguments": ""}
    assert len({part["id"] for part in first}) == 2 and all(part["id"].startswith("call_") for part in first)
    assert all(
        set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
        for part in parts
        if part not in first
    )
    assert sum(part["index"] == 0 for part in parts) > 5  # arguments come in pieces
    [listed, *_] = read(MISTRAL, f"[TOOL_CALLS]{LISTED}", 1000)
    assert len(listed["tool_calls"][0]["id"]) == 9


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_call_that_is_cut_off_shows_what_there_is(size):
    message = message_from_deltas(read(HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b', size))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "b'}
    unnamed = message_from_deltas(read(HERMES, '<tool_call>\n{"na', size))
    assert unnamed["content"] == '{"na' and "tool_calls" not in unnamed


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "is_thinking", "reasoning", "content"),
    [
        ("<think>\na < b</think>\n\nYes.", False, "a < b", "Yes."),
        ("a </th b</think>Yes.", True, "a </th b", "Yes."),
        ("Yes.<think>", False, "", "Yes.<think>"),
        ("<thin", False, "", "<thin"),
        ("still thinking", True, "still thinking", ""),
    ],
)
def test_reasoning_is_separated(text, is_thinking, reasoning, content, size):
    message = message_from_deltas(read(None, text, size, THINK, is_thinking))
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)


def test_calls_follow_reasoning():
    message = message_from_deltas(read(HERMES, f"<think>\n<tool_call>no</think>\n{HERMES_CALLS}", 3, THINK))
    assert message["reasoning_content"] == "<tool_call>no" and len(message["tool_calls"]) == 2


def test_families_are_known_by_their_templates():
    for form in TOOL_FORMATS.values():
        assert format_from_template(f"x {form.template} y") is form
    assert format_from_template("plain") is None and markers_from_template("plain") is None
    assert markers_from_template("{{ '<think>' }} </think>") == THINK


@pytest.mark.parametrize("text", ["", "call:f", "call:f{a", "call:f{a:}", "call:f{:1}", "call:f[1]", "call:f{a:1}x"])
def test_what_is_no_call_stays_text(text):
    assert call_from_text(text, '<|"|>') is None
