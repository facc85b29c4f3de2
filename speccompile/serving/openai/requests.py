# SPDX-License-Identifier: Apache-2.0
"""From the body of a request to requests of the scheduler."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speccompile.common.chat_template import ChatTemplate
from speccompile.common.structured_outputs import StructuredOutputs
from speccompile.common.surfaces import BIASES, FLAG, STRINGS, Kind
from speccompile.common.tokenizer_file import LONG, encode_text
from speccompile.core.sampling_params import SAMPLING_PARAMETERS, SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.images import Image
from speccompile.runtime.requests import Request
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.serving.openai.errors import ApiError, error_from_fault
from speccompile.serving.openai.images import error_from_images, files_from_urls, read_images
from speccompile.serving.openai.message import MessageReader
from speccompile.serving.openai.protocol import ChatBody, CompletionBody, Sampled
from speccompile.serving.openai.structured import compile_constraint, structured_from_body
from speccompile.serving.openai.tools import ChatFormats, ChatPlan, plan_chat

MAX_CHOICES = 128  # of one request
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


def sampling_from_body(body: Sampled, defaults: SamplingParams) -> SamplingParams:
    """Returns the bundle's defaults, overridden by the fields of the body.

    Without a `seed`, requests that draw get one of their own each, as OpenAI's API has it.

    Raises:
        ApiError: a value is out of range.
    """
    given: dict[str, Any] = {}
    for name, declared in SAMPLING_PARAMETERS.items():
        if declared.body is not None:
            value = _value(getattr(body, declared.body.name or name), declared.kind)
            if value is not None:
                given[name] = declared.body.convert(value)
    if body.num_logprobs is not None:
        given["logprobs"] = body.num_logprobs
    if body.num_prompt_logprobs is not None:
        given["prompt_logprobs"] = body.num_prompt_logprobs
    if isinstance(body, CompletionBody) and body.tells_prompt_alone:
        given["max_new_tokens"] = 1  # no engine stops before its first token
    given.setdefault("seed", secrets.randbits(63))
    try:
        sampling = replace(defaults, **given)
    except RuntimeFault as fault:
        raise error_from_fault(fault) from fault
    _check_min_tokens(body.min_tokens, sampling)
    return sampling


def _check_min_tokens(num: int, sampling: SamplingParams) -> None:
    """Refuses a least length that the end of a text could undercut: texts have `max_tokens` where nothing ends them.

    Raises:
        ApiError: something may end the text before.
    """
    ends = [] if sampling.ignore_eos else ["texts that may end with a token: add `ignore_eos: true`"]
    ends += ["`stop` or `stop_token_ids`: leave these out"] * bool(sampling.stop or sampling.stop_token_ids)
    if num > sampling.max_new_tokens:
        ends = [f"max_tokens of {sampling.max_new_tokens}: raise it"]
    if num and ends:
        message = f"`min_tokens`: it is not supported beside {' and '.join(ends)}."
        raise ApiError(400, message, param="min_tokens", code="unsupported_field")


async def constrained(
    sampling: SamplingParams,
    found: tuple[str, StructuredOutputs] | None,
    engine: SpecEngine,
    timeout_s: float | None = None,
) -> SamplingParams:
    """Returns sampling parameters with a constraint.

    Raises:
        ApiError: it does not compile, or took too long.
    """
    if found is None:
        return sampling
    field, wanted = found
    await compile_constraint(engine, wanted, field, timeout_s)
    return replace(sampling, structured_outputs=wanted)


def _value(value: Any, kind: Kind) -> Any:
    """Returns a field's value in its parameter's type; None where the bundle's default holds."""
    if kind is BIASES:
        return _biases(value) if value else None
    if kind is FLAG:
        return value or None
    if kind is STRINGS and isinstance(value, str):
        return (value,)
    return value


def _biases(biases: dict[str, float]) -> dict[int, float]:
    wrong = next((token for token in biases if not (token.isascii() and token.isdigit())), None)
    if wrong is not None:
        raise ApiError(400, f"`logit_bias`: {wrong!r} is no token id.", param="logit_bias", code="invalid_value")
    return {int(token): bias for token, bias in biases.items()}


async def requests_from_completion(body: CompletionBody, engine: SpecEngine) -> list[Request]:
    """Returns one request for each prompt, as token ids.

    Raises:
        ApiError: a value is out of range, no prompt or too many of them.
    """
    prompts = body.prompts()
    if not prompts or (body.n <= MAX_CHOICES < len(prompts) * body.n):
        message = (
            f"`prompt`: got {len(prompts)} prompts with {body.n} outputs each, expected 1 to {MAX_CHOICES} in all."
        )
        raise ApiError(400, message, param="prompt", code="invalid_value")
    sampling, constraint = sampling_from_body(body, engine.defaults), structured_from_body(body)
    ids = [await encode(engine, p, special=True) if isinstance(p, str) else p for p in prompts]
    for tokens in ids:
        check_length(tokens, body, engine)
    sampling = await constrained(sampling, constraint, engine, body.timeout_s)
    return [request_from_tokens(tokens, body, sampling) for tokens in ids]


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat."""

    text: str
    tokens: list[int]
    plan: ChatPlan
    files: list[bytes]


async def prompt_from_chat(
    body: ChatBody, engine: SpecEngine, template: ChatTemplate | None, formats: ChatFormats
) -> ChatPrompt:
    """Returns the prompt of a chat; its images are not decoded.

    Raises:
        ApiError: a value is out of range, the bundle has no chat template, or that refuses the messages.
    """
    if template is None:
        raise ApiError(400, _NO_TEMPLATE, param="messages", code="no_chat_template")
    files = files_from_urls([url for message in body.messages for url in message.image_urls()], engine)
    plan = plan_chat(body, formats, template, structured_from_body(body))
    text = _render(body, template, plan.variables)
    try:
        expanded = engine.expand_images(text, len(files))
    except RuntimeFault as fault:
        raise error_from_images(fault) from fault
    # Templates write special tokens themselves.
    return ChatPrompt(text, await encode(engine, expanded, special=False), plan, files)


async def request_from_chat(
    body: ChatBody, engine: SpecEngine, template: ChatTemplate | None, formats: ChatFormats
) -> tuple[Request, Callable[[], MessageReader] | None]:
    """Returns the request of a chat, as token ids, and what makes the readers of its choices; None: content alone.

    Raises:
        ApiError: as `prompt_from_chat`; or the prompt is too long, or an image cannot be read.
    """
    prompt = await prompt_from_chat(body, engine, template, formats)
    sampling, read = sampling_from_body(body, engine.defaults), prompt.plan.reader
    check_length(prompt.tokens, body, engine)  # before what takes time: pictures, and constraints
    images = await read_images(prompt.files, engine)
    sampling = await constrained(sampling, prompt.plan.constraint, engine, body.timeout_s)
    if read is not None:
        sampling = replace(sampling, skip_special_tokens=False)
    reader = None if read is None else functools.partial(read, prompt.text)
    return request_from_tokens(prompt.tokens, body, sampling, images), reader


def check_length(tokens: Sequence[int], body: Sampled, engine: SpecEngine) -> None:
    """Refuses a prompt that does not fit, and a `max_tokens` that does not fit after it.

    Raises:
        ApiError: one of these.
    """
    try:
        engine.check_prompt("prompt", tokens)
    except RuntimeFault as fault:
        raise error_from_fault(fault) from fault
    context = engine.context.max_seq_len
    left = context - len(tokens)
    if body.max_tokens is not None and body.max_tokens > max(left, 1):
        message = (
            f"`max_tokens`: got {body.max_tokens} after a prompt of {len(tokens)} tokens; expected at most {left}, as "
            f"the context has {context}. Lower it, or leave it out."
        )
        raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")


def _render(body: ChatBody, template: ChatTemplate, variables: dict[str, Any]) -> str:
    """Returns the text of a chat's prompt.

    Raises:
        ApiError: the template refuses it; or the last message is to be continued and cannot be.
    """
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
    """Returns whether the template opens the assistant's turn, and its variables.

    Raises:
        ApiError: `chat_template_kwargs` has a name that is not the template's to read.
    """
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


def request_from_tokens(
    tokens: Sequence[int], body: Sampled, sampling: SamplingParams, images: Sequence[Image] = ()
) -> Request:
    """Returns the request of a prompt.

    Raises:
        ApiError: a value is out of range.
    """
    try:
        return Request(tokens, sampling, body.n, body.speculation, body.timeout_s, images=images)
    except RuntimeFault as fault:
        raise error_from_fault(fault) from fault


async def encode(engine: SpecEngine, text: str, special: bool) -> list[int]:
    """Returns the token ids of a text; those of a long one in a thread, so that other requests go on.

    Args:
        special: with the special tokens that the tokenizer puts around it.

    Raises:
        ApiError: the bundle has no tokenizer, or that fails on the text, or this cannot fit into the context.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "This bundle has no tokenizer: give token ids.", param="prompt", code="no_tokenizer")

    try:
        if len(text) <= LONG:
            return encode_text(tokenizer, text, special=special)
        await asyncio.to_thread(engine.prompt_bytes.check, "prompt", text)
        return await asyncio.to_thread(encode_text, tokenizer, text, special=special)
    except RuntimeFault as fault:
        raise error_from_fault(fault) from fault
