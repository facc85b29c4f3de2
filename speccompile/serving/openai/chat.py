# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/chat/completions`: the request of a body, and the shape of its answer."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from speccompile.common.chat_template import ChatTemplate
from speccompile.errors import RuntimeFault
from speccompile.runtime.images import Image
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.serving.openai.bodies import sampling_from_body
from speccompile.serving.openai.chat_body import ChatBody
from speccompile.serving.openai.completions import (
    CompletionApi,
    check_length,
    constrained,
    encode,
    request_from_tokens,
    structured_from_body,
)
from speccompile.serving.openai.errors import ApiError, error_from_validation
from speccompile.serving.openai.events import CALL, REASONING, TEXT, Answer, Choice, Event, Part
from speccompile.serving.openai.server import OpenAIServer
from speccompile.serving.openai.tools import ChatPlan, plan_chat

MAX_IMAGES = 16  # of one request
_DATA_URL = re.compile(r"data:image/(?:png|jpeg|jpg|webp);base64,", re.IGNORECASE)
_PARAM = "messages"
# Variables of templates that requests set otherwise, and options of transformers' function that are none.
_RESERVED = {
    "messages": "use the field `messages`",
    "tools": "use the field `tools`",
    "chat_template": "the template is the bundle's own",
    "tokenize": "prompts are always tokenized",
}
_NO_TEMPLATE = (
    "This model has no chat template, so that it is unknown how it wants messages to be written. "
    "Use /v1/completions, or build the bundle from a checkpoint whose tokenizer has a chat_template."
)


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat."""

    text: str
    tokens: list[int]
    plan: ChatPlan
    files: list[bytes]


async def prompt_from_chat(server: OpenAIServer, body: ChatBody) -> ChatPrompt:
    """Returns the prompt of a chat, without decoding its images. Raises ApiError: a value is wrong, or the template."""
    engine, template = server.engine, server.template
    if template is None:
        raise ApiError(400, _NO_TEMPLATE, param="messages", code="no_chat_template")
    files = files_from_urls([url for message in body.messages for url in message.image_urls()], engine)
    plan = plan_chat(body, server.formats, template, structured_from_body(body))
    text = _render(body, template, plan.variables)
    try:
        expanded = engine.expand_images(text, len(files))
    except RuntimeFault as fault:
        raise error_from_images(fault) from fault
    # Templates write special tokens themselves.
    return ChatPrompt(text, await encode(engine, expanded, special=False), plan, files)


def chat_from_fields(fields: dict[str, Any]) -> ChatBody:
    """Returns the chat body of another API's body. Raises ApiError: a value is out of the chat's range."""
    try:
        chat: ChatBody = ChatBody.model_validate(fields)
    except ValidationError as fault:
        raise error_from_validation(fault) from fault
    return chat


class ChatApi(CompletionApi):
    """Chat completions."""

    path, body = "/v1/chat/completions", ChatBody
    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    @staticmethod
    async def answer_from_body(server: OpenAIServer, body: ChatBody) -> Answer:
        prompt, engine = await prompt_from_chat(server, body), server.engine
        sampling, read = sampling_from_body(body, engine.defaults), prompt.plan.reader
        check_length(prompt.tokens, body, engine)  # before what takes time: pictures, and constraints
        images = await read_images(prompt.files, engine)
        sampling = await constrained(sampling, prompt.plan.constraint, server.service, body.timeout_s)
        if read is not None:
            sampling = replace(sampling, skip_special_tokens=False)
        make_reader = None if read is None else functools.partial(read, prompt.text)
        return Answer([request_from_tokens(prompt.tokens, body, sampling, images)], make_reader)

    def whole(self) -> dict[str, Any]:
        answer = super().whole()
        if self._fields.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._texts.prompt(self._answer.choices[0].prompt_logprobs)
        return answer

    def chunk_from_event(self, event: Event) -> bytes:
        logprobs = self._texts.chat(event.logprobs) if event.logprobs else None
        return self._chunk([self._choice(event.choice, {"delta": delta_from_event(event)}, logprobs, event.is_end)])

    def _opening(self) -> list[dict[str, Any]]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._choice(choice, delta, None, False) for choice in self._answer.choices]

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None if self._fields.num_logprobs is None else self._texts.chat(choice.logprobs)
        return self._choice(choice, {"message": message_from_choice(choice)}, logprobs, True)


def delta_from_event(event: Event) -> dict[str, Any]:
    """Returns what an event adds to a message."""
    if event.kind != CALL or event.part is None:
        name = "reasoning_content" if event.kind == REASONING else "content"
        return {name: event.text} if event.text else {}
    at = {"index": event.choice.calls.index(event.part)}
    if event.text:
        return {"tool_calls": [{**at, "function": {"arguments": event.text}}]}
    return {"tool_calls": [{**at, **_call(event.part, "")}]}


def _call(part: Part, arguments: str) -> dict[str, Any]:
    return {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": arguments}}


def message_from_choice(choice: Choice) -> dict[str, Any]:
    """Returns the whole message of a choice."""
    content, reasoning, calls = choice.text(TEXT), choice.text(REASONING), choice.calls
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(part, part.text) for part in calls]
    return message


def _render(body: ChatBody, template: ChatTemplate, variables: dict[str, Any]) -> str:
    messages = [message.for_template() for message in body.messages]
    opens, given = _template_variables(body, variables)
    if not body.continue_final_message:
        return _rendered(template, messages, opens, given)
    end = secrets.token_hex(16)  # what the template writes after the message's text is left out
    messages[-1]["content"] += end
    text, found, rest = _rendered(template, messages, False, given).partition(end)
    if not found or end in rest:
        message = "`continue_final_message`: the chat template does not write the text of the last message once."
        raise ApiError(400, message, param="continue_final_message", code="chat_template")
    return text


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]], opens: bool, given: dict[str, Any]) -> str:
    try:
        return template.render(messages, opens, given)
    except RuntimeFault as fault:
        message = f"The chat template refuses: {fault.got}"
        raise ApiError(400, message, param="messages", code="chat_template") from fault


def _template_variables(body: ChatBody, variables: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    given = {**variables, **body.chat_template_kwargs}
    opens = given.pop("add_generation_prompt", body.add_generation_prompt is not False)
    wrong = next((name for name in _RESERVED if name in body.chat_template_kwargs), None)
    if wrong is not None:
        message = f"it is not supported here: {_RESERVED[wrong]}."
    elif not isinstance(opens, bool):
        wrong, message = "add_generation_prompt", f"got {opens!r:.50}; expected true or false. Correct it."
    if wrong is not None:
        field = f"chat_template_kwargs.{wrong}"
        raise ApiError(400, f"`{field}`: {message}", param=field, code="unsupported_field")
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return opens, {**effort, **given}


def files_from_urls(urls: Sequence[str], engine: SpecEngine) -> list[bytes]:
    """Returns the files of a chat's images in order, from base64 data URLs of PNG, JPEG or WebP.

    Raises:
        ApiError: the bundle reads no images, there are too many, or one is no such URL.
    """
    if not urls:
        return []
    if engine.images is None:
        message = (
            "This model reads text alone: leave out `image_url`, or serve a bundle built with target.vision: true."
        )
        raise ApiError(400, message, param=_PARAM, code="no_vision")
    if len(urls) > MAX_IMAGES:
        message = f"`{_PARAM}`: got {len(urls)} images, expected at most {MAX_IMAGES}."
        raise ApiError(400, message, param=_PARAM, code="invalid_value")
    return [file_from_url(url) for url in urls]


async def read_images(files: Sequence[bytes], engine: SpecEngine) -> list[Image]:
    """Returns the images of a chat, decoded."""
    if not files:
        return []
    try:
        return await asyncio.to_thread(engine.read_images, files)
    except RuntimeFault as fault:
        raise error_from_images(fault) from fault


def file_from_url(url: str) -> bytes:
    """Returns the contents of a data URL. Raises ApiError: it is none of an image in base64."""
    head = _DATA_URL.match(url)
    if head is None:
        is_remote = re.match(r"[a-z][a-z0-9+.-]*://", url, re.IGNORECASE) is not None
        got = "this server fetches nothing" if is_remote else "it is no data URL of an image in base64"
        message = f"`image_url`: {got}; send the image itself: data:image/png;base64,... (PNG, JPEG or WebP)."
        raise ApiError(400, message, param=_PARAM, code="unsupported_url" if is_remote else "invalid_value")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as fault:
        raise ApiError(400, f"`image_url`: not base64: {fault}.", param=_PARAM, code="invalid_value") from fault


def error_from_images(fault: RuntimeFault) -> ApiError:
    message = f"`{_PARAM}`: got {fault.got}; expected {fault.expected}. {fault.todo}"
    return ApiError(400, message, param=_PARAM, code="invalid_value")
