# SPDX-License-Identifier: Apache-2.0
"""Reasoning, content and tool calls of a text, whole and however it is cut into parts."""

import json

import pytest

from speccompile.serving.openai.chat import delta_from_event, message_from_choice
from speccompile.serving.openai.events import Choice, Event
from speccompile.serving.openai.gemma_calls import call_from_text
from speccompile.serving.openai.message import MessageReader
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
from speccompile.serving.openai.tool_reader import TEXT, Delta

THINK = REASONING["qwen3"]
CALL, OTHER = {"city": "Bonn", "n": [1, {"a": "}"}]}, {"q": 'say "hi" \\ </tool_call'}
ONE, TWO = json.dumps(CALL), json.dumps(OTHER)
HERMES_CALLS = (
    f'<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>\n'
    f'<tool_call>\n{{"arguments": {TWO}, "name": "find"}}\n</tool_call>'
)
LISTED = f'[{{"name": "weather", "arguments": {ONE}}}, {{"name": "find", "arguments": {TWO}}}]'
BOTH = [("weather", CALL), ("find", OTHER)]
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


HERMES_F, NOW = '{"name": "f", "arguments": {"a": 1}}', '<tool_call>\n{"name": "now"}\n</tool_call>'
NAMES = {"f", "g", "now", "weather", "find"}
F = ("f", {"a": 1})
KEPT = {  # no call of a tool: content to the letter
    LLAMA: [
        '{"name": "Ada", "age": 36}',
        '{"name": "f", "age": 36}',
        '{"name": "Ada", "parameters": {}}',
        '{"age": 3, "name": "f", "parameters": {}}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f"}',
        '{"name": 5, "parameters": {}}',
        ' \n{"x": [1, {"name": "f", "parameters": {}}]} and so on',
        "<|python_tag|>import os",
        "{",
    ],
    MISTRAL: [
        '[{"x": 1}, {"y": 2}]',
        '[TOOL_CALLS][{"x": 1}, {"y": 2}]',
        '[TOOL_CALLS]nope{"a": 1}',
        "[TOOL_CALLS] is a mark",
        '[{"name": "f"}]',
        "[1, 2]",
        " [",
        "[TOOL_CALLS]fo",
    ],
    GEMMA: [
        '[{"x": 1}, {"y": 2}]',
        "<|tool_call>call:nope{a:1}<tool_call|>",
        "<|tool_call>call:f{a:1<tool_call|>",
        "<|tool_call>calling<tool_call|>",
        '<|tool_call>{"x": 1}<tool_call|>',
        "<|tool_call>call:f{a:" + "[" * 3000 + "<tool_call|>",
    ],
    HERMES: [
        "<tool_call> begins a call",
        ' <tool_call>\n{"x": 1}\n</tool_call>\n',
        '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        "<tool_call>{'name': 'f'}</tool_call>",
        "<tool_call>",
        '{"name": "f", "arguments": {}}',
        " \n ",
    ],
}
READ = {  # what is content, and the calls
    HERMES: [
        (f" \n<tool_call>\n{HERMES_F}\n</tool_call>\n", None, [F]),
        (f"So.\n<tool_call>{HERMES_F}</tool_call>\n\nDone.", "So.\nDone.", [F]),
        (f"<tool_call>\n{HERMES_F[:-1]}\n</tool_call>\n{NOW}", None, [F, ("now", {})]),
        (f"<tool_call>\n{HERMES_F[:-2]}\n</tool_call>\n{NOW}", None, [F, ("now", {})]),
        (f"<tool_call>\n{HERMES_F}}}\n</tool_call>\n{NOW}", None, [F, ("now", {})]),
        (f"<tool_call>\n{HERMES_F}\n{NOW}", None, [F, ("now", {})]),
        (f"<tool_call>\n{HERMES_F[:-1]}\n{HERMES_F}\n</tool_call>", None, [F, F]),
        (f"<tool_call>\n<tool_call>\n{HERMES_F}\n</tool_call>", "<tool_call>\n", [F]),
        (f'<tool_call>{{"name": "no"}}</tool_call>\n{NOW}', '<tool_call>{"name": "no"}</tool_call>\n', [("now", {})]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}</tool_call>', None, [F]),
        ('<tool_call>{"arguments": {"a": 1}, "arguments": 3, "name": "f", "name": "g"}</tool_call>', None, [F]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', None, [("f", {})]),
        ('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', None, [F]),
        (f"<tool_call>{HERMES_F}</tool_call>\n<tool_call>\n{HERMES_F[:9]}", None, [F]),
        (f"<tool_call>{HERMES_F}</tool_call>\n<tool_", None, [F]),
    ],
    LLAMA: [
        ('{"name": "f", "parameters": {"a": 1}} it is', "it is", [F]),
        ('{"name": "f", "parameters": {"a": 1}}; {"x": 2}', '; {"x": 2}', [F]),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "f", "par', None, [F]),
        ('{"x": 1}<|python_tag|>{"name": "f", "parameters": {"a": 1}}', '{"x": 1}', [F]),
    ],
    MISTRAL: [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"y": 2}]', ', {"y": 2}]', [F]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, {"name": "now", "arguments": {}}]', None, [F, ("now", {})]),
        ('[TOOL_CALLS] f {"a": 1}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{}', None, [F, ("now", {})]),
        ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]no', None, [F]),
        ('[{"name": "f", "arguments": {"a": 1}}] so', "so", [F]),
    ],
    GEMMA: [
        ('<|tool_call>call:f{a:<|"|>x<tool_call|>y<|"|>}<tool_call|>', None, [("f", {"a": "x<tool_call|>y"})]),
        ('<|tool_call>call:f{a:"x<tool_call|>}\\"",b:1}<tool_call|>', None, [("f", {"a": 'x<tool_call|>}"', "b": 1})]),
        (
            '<|tool_call>{"name": "f", "arguments": {"a": "<tool_call|>"}}<tool_call|>',
            None,
            [("f", {"a": "<tool_call|>"})],
        ),
        ("<|tool_call>call:f{a:1}<|tool_call>call:now{}<tool_call|>", None, [F, ("now", {})]),
        ("<|tool_call>call:f{a:1<|tool_call>call:now{}<tool_call|>", "<|tool_call>call:f{a:1", [("now", {})]),
        ("<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:no", None, [F]),
        ('[{"name": "f", "parameters": {"a": 1}}, {"name": "n', None, [F]),
    ],
}
ROWS = [(form, text, text, []) for form, texts in KEPT.items() for text in texts]
ROWS += [(form, *row) for form, rows in READ.items() for row in rows]


def message_from_deltas(deltas):
    """Returns the whole message of a chat's answer."""
    choice = Choice(0)
    for delta in deltas:
        choice.add(delta)
    return message_from_choice(choice)


def read(form, text, size, markers=None, is_thinking=False):
    return read_parts(form, [text[at : at + size] for at in range(0, len(text), size)], markers, is_thinking)


def read_parts(form, parts, markers=None, is_thinking=False, is_closed=False):
    reader = MessageReader(markers, form, is_thinking, names=NAMES, is_closed=is_closed)
    deltas = [delta for part in parts[:-1] for delta in reader.push(part)]
    return [*deltas, *reader.push(parts[-1], is_last=True)]


def cuts(text):
    """Yields the text as one part, in letters, and in two parts at every place (of a long one, at some)."""
    yield [text]
    yield [*text, ""]
    yield from ([text[:at], text[at:]] for at in range(1, len(text), 1 + len(text) // 200))


def calls_of(message):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]


@pytest.mark.parametrize("name", CASES)
def test_calls_are_the_same_however_the_text_is_cut(name):
    form, text, content, calls = CASES[name]
    for parts in cuts(text):
        message = message_from_deltas(read_parts(form, parts))
        assert (message["content"], calls_of(message)) == (content or (None if calls else ""), calls), parts


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_text_without_calls_is_content(row):
    form, text, content, calls = ROWS[row]
    for parts in cuts(text):
        message = message_from_deltas(read_parts(form, parts))
        assert (message["content"], calls_of(message)) == (content, calls), parts


def test_a_json_answer_streams_though_it_may_begin_like_a_call():
    reader = MessageReader(None, LLAMA, names=NAMES)
    assert reader.push('{"name": "Ada"') == [] and reader.push(', "age"') == [Delta(TEXT, '{"name": "Ada", "age"')]
    assert reader.push(": 36") == [Delta(TEXT, ": 36")]


def test_deltas_are_those_of_openai():
    choice = Choice(0)
    events = [Event(delta.kind, choice, choice.add(delta), delta.text) for delta in read(HERMES, HERMES_CALLS, 5)]
    parts = [part for event in events if event.kind == "call" for part in delta_from_event(event)["tool_calls"]]
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
    assert len(listed.call_id) == 9


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_truncated_call_keeps_its_text(size):
    message = message_from_deltas(read(HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b', size))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "b'}
    unnamed = message_from_deltas(read(HERMES, '<tool_call>\n{"na', size))
    assert unnamed["content"] == '<tool_call>\n{"na' and "tool_calls" not in unnamed


@pytest.mark.parametrize("marks", [THINK, REASONING["mistral"]])
@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("<think>\na < b</think>\n\nYes.", "", "a < b", "Yes."),
        ("a </th b</think>Yes.", "open", "a </th b", "Yes."),
        ("Yes.<think>", "", "", "Yes.<think>"),
        ("<thin", "", "", "<thin"),
        ("still thinking", "open", "still thinking", ""),
        ("\n<think>\na</think>b", "open", "a", "b"),
        ("<think>\n<think>\na</think>\n\nb", "", "a", "b"),
        ("<think>a<think>b</think>c</think>d", "", "ab", "cd"),
        ("<think>a</think>\n<think>\nb</think>\nc", "", "ab", "c"),
        ("<think>a</think></think>\n\nb", "", "a", "b"),
        ("</think>\n\nb", "", "", "b"),
        ("</think>\n\nb", "closed", "", "b"),
        ("<think>\na</think>b", "closed", "a", "b"),
        ("a</think>\nb", "", "", "a\nb"),
        ("The marks <think> and </think>.", "", "", "The marks <think> and </think>."),
        ("<think>a</think>The marks </think> and <think>.", "", "a", "The marks </think> and <think>."),
        ("It ends with </think>.", "closed", "", "It ends with </think>."),
        ("\n\nb", "closed", "", "\n\nb"),
        ("a</thi", "open", "a</thi", ""),
    ],
)
def test_reasoning_is_separated(text, prompt, reasoning, content, marks):
    texts = [one.replace("<think>", marks[0]).replace("</think>", marks[1]) for one in (text, reasoning, content)]
    for parts in cuts(texts[0]):
        message = message_from_deltas(read_parts(None, parts, marks, prompt == "open", prompt == "closed"))
        assert [message.get("reasoning_content", ""), message["content"]] == texts[1:], parts


def test_calls_follow_reasoning():
    message = message_from_deltas(read(HERMES, f"<think>\n<tool_call>no</think>\n{HERMES_CALLS}", 3, THINK))
    assert message["reasoning_content"] == "<tool_call>no" and len(message["tool_calls"]) == 2


def test_families_are_known_by_their_templates():
    for form in TOOL_FORMATS.values():
        assert format_from_template(f"x {form.template} y") is form
    assert format_from_template("plain") is None and markers_from_template("plain") is None
    assert markers_from_template("{{ '<think>' }} </think>") == THINK


@pytest.mark.parametrize("text", ["", "call:f", "call:f{a", "call:f{a:}", "call:f{:1}", "call:f[1]", "call:f{a:1}x"])
def test_invalid_gemma_call_is_text(text):
    assert call_from_text(text, '<|"|>') is None
