# SPDX-License-Identifier: Apache-2.0
"""Tools and reasoning through OpenAI's client, in the process, over a service with a vocabulary for JSON."""

import json

import pytest

from speccompile.common.chat_template import ChatTemplate
from speccompile.errors import RuntimeFault
from speccompile.serving.openai.chat_body import ChatBody, Message
from speccompile.serving.openai.tool_formats import HERMES, LLAMA, MISTRAL, TOOL_FORMATS
from speccompile.serving.openai.tools import ChatFormats, formats_from_options, plan_chat
from tests.lab.servers import ask_openai
from tests.serving.asgi_lab import post
from tests.serving.openai.test_message import message_from_deltas

pytest.importorskip("llguidance")
openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
TEMPLATE = ChatTemplate(
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
)
PATH, USER = "/v1/chat/completions", {"role": "user", "content": "a"}
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "^[a-z]{2,5}$"}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
ASK = {"model": "mock", "messages": [USER], "tools": TOOLS, "max_tokens": 250, "temperature": 1.0}


def ask(app, **fields):
    return ask_openai(app, "chat.completions", **{**ASK, **fields})


def check_call(name, arguments):
    value = json.loads(arguments)
    if name == "clock":
        assert value == {}
    else:
        assert name == "weather" and set(value) == {"city", "days"} and value["days"] in (1, 2, 3)


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "gemma", "functiongemma"])
def test_required_call_in_every_family(server, app, form, monkeypatch):
    monkeypatch.setattr(server, "_formats", ChatFormats(TOOL_FORMATS[form]))
    for seed in range(3):
        [choice] = ask(app, tool_choice="required", seed=seed, parallel_tool_calls=False).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls
        check_call(call.function.name, call.function.arguments)
        # However much the model likes white space, it is what templates write.
        assert call.function.arguments == json.dumps(json.loads(call.function.arguments))


def test_a_named_function_is_called(app):
    named = {"type": "function", "function": {"name": "clock"}}
    [choice] = ask(app, tool_choice=named).choices
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, call.type) == ("clock", "{}", "function")


def test_with_auto_the_model_decides_and_with_none_it_has_no_tools(app):
    for choice in ("auto", "none"):
        [answer] = ask(app, tool_choice=choice, max_tokens=20, seed=1).choices
        assert answer.message.content and answer.message.tool_calls is None
    prompts = {ask(app, tool_choice=choice, max_tokens=1).usage.prompt_tokens for choice in ("auto", "none")}
    assert len(prompts) == 2


@pytest.mark.parametrize("is_parallel", [True, False])
def test_parallel_tool_calls_false_keeps_one_call(is_parallel):
    body = ChatBody.model_validate({"messages": [USER], "tools": TOOLS, "parallel_tool_calls": is_parallel})
    reader = plan_chat(body, ChatFormats(HERMES), TEMPLATE, None).reader("a")
    text = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    deltas = [delta for letter in text * 2 for delta in reader.push(letter)] + reader.push("", is_last=True)
    calls = message_from_deltas(deltas)["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "clock", "arguments": "{}"}] * (1 + is_parallel)


@pytest.mark.parametrize(("text", "value"), [("", {}), (" ", {}), ("null", {}), ('{"a": 1}', {"a": 1}), ("{a", "{a")])
def test_arguments_of_earlier_calls_are_objects(text, value):
    call = {"function": {"name": "clock", "arguments": text}}
    told = Message.model_validate({"role": "assistant", "tool_calls": [call]}).for_template()
    assert told["content"] == "" and told["tool_calls"][0]["function"] == {"name": "clock", "arguments": value}


def test_unknown_tool_names_are_content():
    body = ChatBody.model_validate({"messages": [USER], "tools": TOOLS})
    plan = plan_chat(body, ChatFormats(LLAMA, ("<think>", "</think>")), TEMPLATE, None)
    text = '{"name": "Ada", "parameters": {}}'
    for prompt, before in (("a", ""), ("<think>\n\n</think>\n\n", "</think>")):
        message = message_from_deltas(plan.reader(prompt).push(before + text, is_last=True))
        assert message["content"] == text and "tool_calls" not in message
    [call] = message_from_deltas(plan.reader("a").push(text.replace("Ada", "clock"), is_last=True))["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": "{}"}


ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        *((form, FORMAT) for form in ("hermes", "llama3_json", "mistral", "gemma", "functiongemma")),
        ("hermes", {"type": "json_object"}),
    ],
)
def test_beside_a_format_the_model_may_call(server, app, form, wanted, monkeypatch):
    """Of some seeds the answers are calls and of the others of the format, whole and streamed."""
    monkeypatch.setattr(server, "_formats", ChatFormats(TOOL_FORMATS[form], None))
    reasons = set()
    for seed in range(12):
        asked = {"seed": seed, "temperature": 100.0, "parallel_tool_calls": False, "response_format": wanted}
        answer = ask(app, **asked)
        [choice] = answer.choices
        if choice.finish_reason == "tool_calls":
            [call] = choice.message.tool_calls
            check_call(call.function.name, call.function.arguments)
            assert choice.message.content is None
        else:
            assert choice.finish_reason == "stop" and isinstance(json.loads(choice.message.content), dict)
            assert set(json.loads(choice.message.content)) == {"ok"} or wanted != FORMAT
        if choice.finish_reason not in reasons:  # a call and a text are streamed once each
            reasons.add(choice.finish_reason)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in ask(app, **asked, stream=True))
            assert text == (choice.message.content or "")
        if seed >= 5 and len(reasons) == 2:
            break
    assert reasons == {"tool_calls", "stop"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_call_overrides_response_format(app, choice):
    [made] = ask(app, tool_choice=choice, response_format=FORMAT, parallel_tool_calls=False).choices
    assert made.finish_reason == "tool_calls" and made.message.content is None
    [free] = ask(app, tool_choice="none", response_format=FORMAT).choices
    assert set(json.loads(free.message.content)) == {"ok"} and not free.message.tool_calls


def test_reasoning_is_content_of_its_own_and_the_grammar_begins_after_it(server, app, monkeypatch):
    monkeypatch.setattr(server, "_formats", ChatFormats(HERMES, ("<", ">")))
    body = {"messages": [{"role": "user", "content": "a<"}], "max_tokens": 250, "temperature": 1.0, "seed": 3}
    body["response_format"] = {"type": "json_schema", "json_schema": {"schema": WEATHER["parameters"]}}
    message = post(app, PATH, {**body, "logit_bias": {"31": 8}}).json()["choices"][0]["message"]
    assert message["reasoning_content"] and "city" in json.loads(message["content"])
    *events, _ = post(app, PATH, {**body, "logit_bias": {"31": 8}, "stream": True}).events()
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "got no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "got 'x'; expected the name"),
        ({"tool_choice": "always"}, "tool_choice", "got 'always'; expected 'none', 'auto' or 'required', or"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "or an object with `function`."),
        ({"tools": [{"type": "web"}]}, "tools.0.type", "`tools.0.type`: got 'web'; expected 'function'."),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice", "and guided_regex; expected one of them"),
        ({"guided_regex": "a"}, "guided_regex", "got a regex beside tools that the model may call; expected"),
        ({"guided_choice": ["a"]}, "guided_choice", "got a choice beside tools"),
        ({"guided_json": "["}, "guided_json", "got a text that is no JSON: EOF while parsing"),
        ({"guided_json": "[" * 5000}, "guided_json", "got a text that is no JSON: recursion limit exceeded"),
        ({"guided_grammar": "start: /a/"}, "guided_grammar", "Send `tool_choice: none`, or leave one out"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools.0.function.name", "missing"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
                "tool_choice": "required",
            },
            "tools",
            "got parameters of type 'objekt' of 'f'; expected an object",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/$defs/none"}}}],
                "tool_choice": "required",
            },
            "tool_choice",
            "Pointer '/$defs/none' does not exist",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(app, fields, param, message):
    reply = post(app, PATH, {**ASK, **fields})
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (400, param) and message in error["message"]


def test_a_model_without_tools_refuses_them(server, app, monkeypatch):
    monkeypatch.setattr(server, "_formats", ChatFormats(None))
    assert post(app, PATH, ASK).json()["error"]["code"] == "no_tool_parser"
    monkeypatch.setattr(server, "template", ChatTemplate("a"))
    assert post(app, PATH, ASK).json()["error"]["code"] == "no_tools_in_template"


def test_parsers_are_chosen_by_option_or_by_template():
    assert formats_from_options("auto", "auto", ChatTemplate("[TOOL_CALLS]"), None).tools is MISTRAL
    assert formats_from_options("llama3_json", "none", ChatTemplate("[TOOL_CALLS]"), None).tools is LLAMA
    think = ChatTemplate("<think></think>")
    assert formats_from_options("none", "auto", think, None) == ChatFormats()  # its marks are no tokens
    assert formats_from_options("none", "qwen3", think, None).markers == ("<think>", "</think>")
    with pytest.raises(RuntimeFault, match="--tool-call-parser: got 'x'; expected auto, none, hermes"):
        formats_from_options("x", "auto", None, None)
