# SPDX-License-Identifier: Apache-2.0
"""Fields that are not supported: values that ask for nothing are accepted, others are refused by name."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from speccompile.serving.openai import bodies
from speccompile.serving.openai.chat_body import ChatBody
from speccompile.serving.openai.completions import CompletionBody
from speccompile.serving.openai.errors import error_from_validation

DOCS = (Path(__file__).parents[3] / "docs/reference/server.md").read_text()
USER = {"role": "user", "content": "b"}
# What OpenAI's client, vLLM's server and front ends have as defaults.
DEFAULTS = {
    "audio": None,
    "continue_final_message": False,
    "functions": [],
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "metadata": {"app": "notes"},
    "modalities": ["text"],
    "priority": 0,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "in_memory",
    "safety_identifier": "me",
    "service_tier": "auto",
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "store": False,
    "user": "me",
    "verbosity": "medium",
}
ECHOED = {
    "role": "assistant",
    "content": "c",
    "annotations": [],
    "audio": None,
    "function_call": None,
    "reasoning_content": None,
    "refusal": None,
    "tool_calls": [],
}


def chat(**change):
    return ChatBody.model_validate_json(json.dumps({"messages": [USER], **change}))


def completion(**change):
    return CompletionBody.model_validate_json(json.dumps({"prompt": "b", **change}))


def param_of(read, **change):
    with pytest.raises(ValidationError) as fault:
        read(**change)
    error = error_from_validation(fault.value)
    assert error.status == 400 and error.code in ("unsupported_field", "unknown_field")
    return error.param


def test_explicit_defaults_change_nothing():
    assert chat(messages=[USER, ECHOED, USER], **DEFAULTS) == chat(
        messages=[USER, {"role": "assistant", "content": "c"}, USER]
    )
    assert chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).stream_options
    text = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    assert chat(messages=[{**USER, "content": [text]}]).messages[0].for_template() == USER


@pytest.mark.parametrize(("read", "fields"), [(chat, bodies.CHAT), (completion, bodies.COMPLETION)])
def test_every_unsupported_field_takes_no_op_values_only(read, fields):
    plain = read()
    for name, field in fields.items():
        labels = {str: ["x", ""], dict: [{}, {"a": "b"}], None: []}[field.kind]
        for value in (None, *field.values, *labels):
            assert read(**{name: value}) == plain, (name, value)
        for value in ("something else", 7, [{"a": 1}], {"a": 1}):
            if field.kind is None or not isinstance(value, field.kind):
                assert param_of(read, **{name: value}) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", False), ("store", 0), ("length_penalty", True), ("best_of", True), ("top_logprobs", False)],
)
def test_booleans_are_not_numbers(name, value):
    assert param_of(completion, **{name: value}) == name


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"annotations": [{"type": "url_citation"}]}, "annotations"),
        ({"refusal": "no"}, "refusal"),
        ({"audio": {"id": "1"}}, "audio"),
        ({"weight": 1}, "weight"),
    ],
)
def test_unsupported_message_field_is_named(message, param):
    assert param_of(chat, messages=[USER, {**ECHOED, **message}]) == f"messages.1.{param}"


def test_unsupported_stream_options_are_refused():
    options = {"include_obfuscation": True}
    assert param_of(chat, stream=True, stream_options=options) == "stream_options.include_obfuscation"


def test_the_page_of_the_server_has_the_fields_of_the_table():
    section = DOCS.partition("### No-op values")[2].partition("\n## ")[0]
    missing = [name for name in {**bodies.CHAT, **bodies.MESSAGE} if f"`{name}" not in section]
    assert not missing
