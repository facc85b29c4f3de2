# SPDX-License-Identifier: Apache-2.0
import json
from types import SimpleNamespace

import pytest

from speccompile.bundle.tokenizers import copy_tokenizer
from speccompile.common.chat_template import ChatTemplate, read_chat_template
from speccompile.errors import BundleError, RuntimeFault
from speccompile.serving.openai import chat
from speccompile.serving.openai.app import make_app
from speccompile.serving.openai.errors import ApiError
from speccompile.serving.openai.server import OpenAIServer, ServerOptions
from tests.lab.servers import chat_server
from tests.serving.asgi_lab import post
from tests.serving.mock_service import ALPHABET, make_engine, serving

PATH = "/v1/chat/completions"
# One letter for each role, so that the mock's tokenizer can read it.
LETTERS = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role[0] }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ turn or reasoning_effort or 'x' }}{% endif %}"
)
CHATML = """{{ bos_token }}{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\nBe brief <b>&\n<|im_end|>\n' }}
    {%- endif %}
    {%- if message.content is none %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}{% generation %}{{- message.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools is defined and tools %}{{ tools | tojson }}{% endif %}
{{ {'a': '<é>', 'b': messages | length} | tojson }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}"""
MESSAGES = [
    {"role": "user", "content": " Wie geht's? "},
    {"role": "assistant", "content": "Gut."},
    {"role": "user", "content": "a < b & c\n"},
]


@pytest.fixture(scope="module")
def app():
    with chat_server(make_engine()[0], ChatTemplate(LETTERS)) as (app, _):
        yield app


def test_an_answer_to_messages(app):
    messages = [{"role": "system", "content": "bc"}, {"role": "user", "content": [{"type": "text", "text": "de"}]}]
    answer = post(app, PATH, {"messages": messages, "max_completion_tokens": 9}).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    # The mock's tokenizer puts `a` in front where it is let; a template's prompt has its special tokens already.
    ids = [ALPHABET.index(letter) for letter in "sbcudex"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    same = post(app, "/v1/completions", {"prompt": ids, "max_tokens": 9}).json()["choices"][0]["text"]
    assert choice["message"] == {"role": "assistant", "content": same, "refusal": None}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": None}, "messages", "missing_field"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_field"),
        ({"messages": [{"role": "king", "content": "b"}]}, "messages.0.role", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "b", "tool_calls": [{}]}]},
            "messages.0.tool_calls.0.function",
            "missing_field",
        ),
        ({"messages": [{"role": "tool", "content": "b"}]}, "messages", "chat_template"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_field"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_field"),
        ({"prompt": "b"}, "prompt", "unknown_field"),
        *(
            ({"chat_template_kwargs": {name: value}}, f"chat_template_kwargs.{name}", "unsupported_field")
            for name, value in [
                ("messages", []),
                ("tools", []),
                ("chat_template", "x"),
                ("tokenize", False),
                ("add_generation_prompt", "no"),
                ("add_generation_prompt", None),
            ]
        ),
        ({"reasoning_effort": 3}, "reasoning_effort", "invalid_value"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(app, change, param, code):
    reply = post(app, PATH, {"messages": [{"role": "user", "content": "b"}], **change})
    assert reply.status == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_images_are_refused_where_the_bundle_has_no_vision_tower(app):
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "auto"}}]
    reply = post(app, PATH, {"messages": [{"role": "user", "content": parts}]})
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (400, "messages", "no_vision")
    assert "target.vision: true" in error["message"]


def test_images_are_decoded_after_the_length_check(monkeypatch):
    async def read_images(files, engine):
        raise ApiError(400, f"{len(files)} pictures were read")

    monkeypatch.setattr(chat, "read_images", read_images)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with serving() as (_, service, _):
        service.engine.images = SimpleNamespace(expand=lambda where, text, num: text)
        server = OpenAIServer(service, ServerOptions("mock"))
        server.template = ChatTemplate("{% for part in messages[0].content %}{{ part.text }}{% endfor %}")
        app = make_app(server)
        for text, max_tokens, message in [
            ("b" * 80, 2, "got 80 tokens; expected at most 64"),
            ("b" * 9, 60, "got 60 after a prompt of 9 tokens"),
            ("b" * 9, 2, "3 pictures were read"),
        ]:
            parts = [{"type": "text", "text": text}, *[image] * 3]
            reply = post(app, PATH, {"messages": [{"role": "user", "content": parts}], "max_tokens": max_tokens})
            assert reply.status == 400 and message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "part", [{"type": "input_audio"}, {"type": "image_url", "image_url": {"url": "x", "detail": "low"}}]
)
def test_other_parts_are_refused(app, part):
    reply = post(app, PATH, {"messages": [{"role": "user", "content": [part]}]})
    assert reply.status == 400 and reply.json()["error"]["param"].startswith("messages.0.content")


def test_a_template_gets_variables_of_the_request(app):
    body = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 4}
    one = post(app, PATH, {**body, "chat_template_kwargs": {"turn": "wvw"}}).json()
    assert one["usage"]["prompt_tokens"] == 5
    effort = post(app, PATH, {**body, "reasoning_effort": "low"}).json()
    assert effort["usage"]["prompt_tokens"] == 5
    for fields in ({"add_generation_prompt": False}, {"chat_template_kwargs": {"add_generation_prompt": False}}):
        assert post(app, PATH, {**body, **fields}).json()["usage"]["prompt_tokens"] == 2


def test_without_a_template_there_is_no_chat():
    with serving() as (app, _, _):
        reply = post(app, PATH, {"messages": [{"role": "user", "content": "b"}]})
        error = reply.json()["error"]
        assert reply.status == 400 and error["code"] == "no_chat_template" and "/v1/completions" in error["message"]


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}])
def test_templates_are_rendered_as_transformers_renders_them(prompted, extra):
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    ours = ChatTemplate(CHATML, {"bos_token": "<s>", "eos_token": "</s>"}).render(MESSAGES, prompted, extra)
    theirs, _ = transformers.render_jinja_template(
        [MESSAGES], chat_template=CHATML, add_generation_prompt=prompted, bos_token="<s>", eos_token="</s>", **extra
    )
    assert ours == theirs[0]
    assert "<é>" in ours and "Be brief <b>&" in ours and ours.startswith("<s><|im_start|>system\n")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{{ nothing.there }}",
        "{{ 1 + 'a' }}",
        "{% if %}",
    ],
)
def test_a_template_reaches_nothing_outside(source):
    with pytest.raises(RuntimeFault, match="expected messages that the chat template takes"):
        ChatTemplate(source).render(MESSAGES, True, {})


def test_where_a_template_is_found(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    assert read_chat_template(tmp_path) is None
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}))
    assert read_chat_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ bos_token }}{{ eos_token }}"}]
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": named}))
    found = read_chat_template(tmp_path)
    assert found is not None and found.render([], True, {}) == "d<s></s>"
    (tmp_path / "chat_template.jinja").write_text("file")  # where newer transformers writes it
    found = read_chat_template(tmp_path)
    assert found is not None and found.source == "file"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(BundleError, match="a chat_template of type int; expected a text"):
        read_chat_template(tmp_path)


def test_a_bundle_takes_the_template_with_it(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text("{}")
    copy_tokenizer(source, tmp_path / "tokenizer")
    assert read_chat_template(tmp_path / "tokenizer") == ChatTemplate("{}", {})
