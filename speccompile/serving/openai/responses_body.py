# SPDX-License-Identifier: Apache-2.0
"""The body of `POST /v1/responses`: the part of OpenAI's Responses API that agents need, and the chat it stands for."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from speccompile.runtime.requests import Speculation
from speccompile.serving.openai.neutral import BODY, LABEL, LABELS, Neutral
from speccompile.serving.openai.protocol import Body, Function
from speccompile.serving.openai.unions import by_type, tag, text_or_list

_LABELS = {"id": LABEL, "status": LABEL}  # of items that are sent back
_NO_STORE = Neutral("nothing is stored: send the whole input")
_NO_TOOLS = Neutral("the client's functions are the only tools")


class TextPart(Body):
    """A text in an item."""

    neutral: ClassVar = {
        "annotations": Neutral("put them into the text", ([],)),
        "logprobs": Neutral("they are not read", ([],)),
        "prompt_cache_breakpoint": LABELS,
    }

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


Texts = Annotated[Annotated[str, tag("text")] | Annotated[list[TextPart], tag("list")], text_or_list()]


class MessageItem(Body):
    """A message."""

    neutral: ClassVar = {**_LABELS, "phase": LABEL}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class CallItem(Body):
    """A call of the model, sent back."""

    neutral: ClassVar = {**_LABELS, "caller": Neutral("tools are called by the model alone", ({"type": "direct"},))}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Body):
    """What a call gave."""

    neutral: ClassVar = CallItem.neutral

    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class ReasoningItem(Body):
    """A reasoning of the model, sent back."""

    neutral: ClassVar = {**_LABELS, "encrypted_content": Neutral("this server made none")}

    type: Literal["reasoning"]
    summary: list[TextPart] = Field(default_factory=list)
    content: list[TextPart] = Field(default_factory=list)


Item = Annotated[
    Annotated[MessageItem, tag("message")]
    | Annotated[CallItem, tag("function_call")]
    | Annotated[ResultItem, tag("function_call_output")]
    | Annotated[ReasoningItem, tag("reasoning")],
    by_type("message", "function_call", "function_call_output", "reasoning", default="message"),
]


class FunctionTool(Function):
    """A function that may be called; tools that a server would run are not known."""

    neutral: ClassVar = {"defer_loading": Neutral(_NO_TOOLS.reason, (False,))}

    type: Literal["function"]


class NamedChoice(Body):
    """One function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def chat(self) -> dict[str, Any]:
        named = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, **({"json_schema": named} if self.type == "json_schema" else {})}


class TextOptions(Body):
    """`text`."""

    neutral: ClassVar = {"verbosity": BODY["verbosity"]}

    format: TextFormat | None = None


class Reasoning(Body):
    """`reasoning`: summaries are given anyway, and are the whole reasoning."""

    neutral: ClassVar = {"summary": LABEL, "generate_summary": LABEL}

    effort: str | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    neutral: ClassVar = {
        **{name: BODY[name] for name in ("service_tier", "safety_identifier", "prompt_cache_key", "moderation")},
        **{name: BODY[name] for name in ("prompt_cache_options", "prompt_cache_retention")},
        "user": LABEL,
        "metadata": LABELS,
        "store": Neutral(_NO_STORE.reason, (False, True)),
        "previous_response_id": _NO_STORE,
        "conversation": _NO_STORE,
        "prompt": _NO_STORE,
        "context_management": _NO_STORE,
        "background": Neutral(_NO_STORE.reason, (False,)),
        "truncation": Neutral("shorten the input yourself", ("disabled",)),
        "include": Neutral("it asks for what this server does not have", ([], ["reasoning.encrypted_content"])),
        "top_logprobs": Neutral("it is for chat completions", (0,)),
        "max_tool_calls": _NO_TOOLS,
        "stream_options": Neutral("events are not padded", ({"include_obfuscation": False}, {})),
    }

    model: str | None = None
    input: Annotated[Annotated[str, tag("text")] | Annotated[list[Item], tag("list")], text_or_list()]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    speculation: Speculation = "auto"
    seed: int | None = None
    logit_bias: dict[str, float] | None = None

    @model_validator(mode="after")
    def _check_input(self) -> ResponsesBody:
        if not self.input:
            raise PydanticCustomError("invalid_value", "expected a text or a list of items", {"param": "input"})
        return self

    def chat(self) -> dict[str, Any]:
        """Returns the body of a chat that asks for the same."""
        same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "speculation", "seed", "logit_bias")
        chat: dict[str, Any] = {name: getattr(self, name) for name in same}
        chat |= {"max_completion_tokens": self.max_output_tokens, "reasoning_effort": self.reasoning.effort}
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        chat["messages"] = [*system, *messages_from_items(items)]
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]
        chat["tool_choice"] = choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        if self.text.format is not None:
            chat["response_format"] = self.text.format.chat()
        return chat


def messages_from_items(items: list[Any]) -> list[dict[str, Any]]:
    """Returns the messages of a chat: reasoning, text and calls that follow one another are one of the assistant's."""
    messages: list[dict[str, Any]] = []
    is_open = False  # the last message is the assistant's and has no text or calls yet

    for item in items:
        last = messages[-1] if messages else {}
        is_own = last.get("role") == "assistant"
        if isinstance(item, ReasoningItem):
            parts = item.content or item.summary
            messages.append({"role": "assistant", "content": "", "reasoning_content": _joined(parts)})
            is_open = True
            continue
        if isinstance(item, CallItem):
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            if not is_own:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            last.setdefault("tool_calls", []).append(call)
        elif isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        elif is_open and item.role == "assistant":
            last["content"] = _joined(item.content)
        else:
            messages.append({"role": item.role, "content": _joined(item.content)})
        is_open = False
    return messages


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
