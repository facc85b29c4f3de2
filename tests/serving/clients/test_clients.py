# SPDX-License-Identifier: Apache-2.0
"""Clients as their users write them, against `speccompile serve` on the example pair.

The pair writes Python and decides on nothing sensible, so that tools are forced and answers have schemas; what comes
back must be whole values of the types that were asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

MODEL, SAID = "pycode", "def add(a, b):"
FOLDER = Path(__file__).parents[3] / "examples/models/pycode-16m"
USER = [{"role": "user", "content": SAID}]
# The first token of a call, so that an answer which may be a call or a value is a value.
NO_CALL = {"logit_bias": {"30": -100}}


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: int = Field(ge=0, le=99)
    y: int = Field(ge=0, le=99)


class Shape(BaseModel):
    """A shape with corners."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["line", "polygon"]
    color: Color
    corners: list[Point] = Field(min_length=1, max_length=3)
    next: Point | None


def plain_text(server, **fields):
    """Returns the answer's text over plain HTTP."""
    status, answer = server.ask("POST", "/v1/chat/completions", {"messages": USER, "max_tokens": 16, **fields})
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


# OpenAI's own.


@pytest.fixture
def openai_client(base_url):
    import openai

    with openai.OpenAI(base_url=base_url, max_retries=0, timeout=120) as client:
        yield client


def test_openai_parses_answers_and_calls(openai_client, server):
    import openai

    answer = openai_client.chat.completions.parse(model=MODEL, messages=USER, response_format=Shape, max_tokens=300)
    assert isinstance(answer.choices[0].message.parsed, Shape)
    tool = openai.pydantic_function_tool(Shape)
    called = openai_client.chat.completions.parse(
        model=MODEL, messages=USER, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=400
    )
    [call] = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Shape)
    with openai_client.chat.completions.stream(
        model=MODEL, messages=USER, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=400
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
    text = openai_client.chat.completions.create(model=MODEL, messages=USER, max_tokens=16)
    assert text.choices[0].message.content == plain_text(server)


def test_openai_responses(openai_client, server):
    answer = openai_client.responses.parse(model=MODEL, input=SAID, text_format=Shape, max_output_tokens=300)
    assert isinstance(answer.output_parsed, Shape)
    assert openai_client.responses.create(model=MODEL, input=SAID, max_output_tokens=16).output_text == plain_text(
        server
    )
    with openai_client.responses.stream(model=MODEL, input=SAID, text_format=Shape, max_output_tokens=300) as stream:
        events = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == answer.output_parsed
    assert "response.output_text.delta" in events


# Anthropic's.


def test_anthropic(base_url, server):
    import anthropic

    with anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=120) as client:
        text = client.messages.create(model=MODEL, max_tokens=16, messages=USER)
        assert text.content[0].text == plain_text(server) and text.stop_reason in ("max_tokens", "end_turn")
        assert client.messages.count_tokens(model=MODEL, messages=USER).input_tokens == text.usage.input_tokens
        with client.messages.stream(model=MODEL, max_tokens=16, messages=USER) as stream:
            assert "".join(stream.text_stream) == text.content[0].text
        tool = {"name": "Shape", "description": "A shape.", "input_schema": Shape.model_json_schema()}
        asked = {"model": MODEL, "max_tokens": 400, "tools": [tool]}
        called = client.messages.create(messages=USER, tool_choice={"type": "tool", "name": "Shape"}, **asked)
        [use] = called.content
        assert Shape.model_validate(use.input) and called.stop_reason == "tool_use"
        one = {"type": "any", "disable_parallel_tool_use": True}
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "it does not fit", "is_error": True}
        turns = [*USER, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(messages=turns, tool_choice=one, **asked) as stream:
            final = stream.get_final_message()
        assert [Shape.model_validate(block.input) for block in final.content]
        filled = [*USER, {"role": "assistant", "content": "return"}]
        goes_on = client.messages.create(model=MODEL, max_tokens=8, messages=filled).content[0].text
        _, same = server.ask(
            "POST", "/v1/completions", {"prompt": f"<s># user: {SAID}\n# assistant: return", "max_tokens": 8}
        )
        assert goes_on == same["choices"][0]["text"]


# instructor.


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_makes_nested_models(openai_client, mode):
    import instructor

    client = instructor.from_openai(openai_client, mode=instructor.Mode[mode])
    limit = {"max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens": 400}
    made = client.chat.completions.create(model=MODEL, messages=USER, response_model=Shape, max_retries=1, **limit)
    assert isinstance(made, Shape)


def test_instructor_iterates_over_models(openai_client):
    import instructor

    client = instructor.from_openai(openai_client, mode=instructor.Mode.TOOLS)
    # Its schema allows other keys than `tasks`: the pair is shown what to write, and goes on with it without end.
    call = '{"name": "IterablePoint", "arguments": {"tasks": [{"x": 1, "y": 2}, {"x": 3, "y": 4}]}}'
    said = [{"role": "user", "content": f"<tool_call>\n{call}\n</tool_call>\n" * 3}]
    made = client.chat.completions.create_iterable(model=MODEL, messages=said, response_model=Point, max_tokens=200)
    points = list(itertools.islice(made, 3))
    assert len(points) == 3 and all(isinstance(point, Point) for point in points)


# pydantic-ai.


@pytest.mark.parametrize("kind", ["chat", "responses"])
@pytest.mark.parametrize("output", ["tool", "native"])
def test_pydantic_ai(base_url, kind, output):
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key="none")
    make = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind]
    wanted = Shape if output == "tool" else NativeOutput(Shape)
    agent = Agent(make(MODEL, provider=provider), output_type=wanted, model_settings={"max_tokens": 400})
    assert isinstance(agent.run_sync(SAID).output, Shape)


def test_pydantic_ai_calls_a_tool_and_reads_its_result(base_url):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider, calls = OpenAIProvider(base_url=base_url, api_key="none"), []
    # No token begins the name of the output's tool, so that the other is called first; then that is the only one.
    vocabulary = json.loads((FOLDER / "tokenizer.json").read_text())["model"]["vocab"]
    starts = ("final_result"[:end] for end in range(1, 13))
    bias = {str(vocabulary[start]): -100 for start in starts if start in vocabulary}
    settings = {"max_tokens": 300, "parallel_tool_calls": False, "logit_bias": bias}
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=Shape, model_settings=settings)

    async def only_first(context, tool):
        return tool if context.run_step <= 1 else None

    @agent.tool_plain(prepare=only_first)
    def area(point: Point) -> int:
        calls.append(point)
        return point.x * point.y

    found = agent.run_sync(SAID)
    assert isinstance(found.output, Shape) and len(calls) == 1 and isinstance(calls[0], Point)


# OpenAI's agents.


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents_call_a_tool_and_answer_in_a_type(base_url, kind):
    import agents
    import openai

    calls = []

    @agents.function_tool
    def area(point: Point) -> int:
        """Returns the area up to a point."""
        calls.append(point)
        return point.x * point.y

    async def run():
        async with openai.AsyncOpenAI(base_url=base_url, max_retries=0, timeout=120) as client:
            make = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[kind]
            # The first turn must call; afterwards the runner goes back to `auto`.
            settings = agents.ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=400, extra_body=NO_CALL
            )
            agent = agents.Agent(
                "a",
                instructions="Answer.",
                model=make(MODEL, client),
                tools=[area],
                output_type=Shape,
                model_settings=settings,
            )
            return await agents.Runner.run(agent, SAID, max_turns=3)

    result = asyncio.run(run())
    assert isinstance(result.final_output, Shape) and len(calls) == 1 and isinstance(calls[0], Point)


# litellm.


def test_litellm(base_url, server):
    import litellm

    asked = {"model": f"openai/{MODEL}", "api_base": base_url, "api_key": "none", "max_tokens": 16}
    assert litellm.completion(messages=USER, **asked).choices[0].message.content == plain_text(server)
    stream = litellm.completion(messages=USER, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == plain_text(server)
    shaped = litellm.completion(messages=USER, response_format=Shape, **{**asked, "max_tokens": 400})
    assert Shape.model_validate_json(shaped.choices[0].message.content)
    tool = {"type": "function", "function": {"name": "Shape", "parameters": Shape.model_json_schema()}}
    asked_once = {**asked, "max_tokens": 400, "parallel_tool_calls": False}
    called = litellm.completion(messages=USER, tools=[tool], tool_choice="required", **asked_once)
    [call] = called.choices[0].message.tool_calls
    assert Shape.model_validate_json(call.function.arguments)
    answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=base_url, api_key="none", input=SAID, max_output_tokens=16
    )
    assert answer.output[0].content[0].text == plain_text(server)
    there = {"model": f"anthropic/{MODEL}", "api_base": server.url, "api_key": "none"}
    spoken = asyncio.run(litellm.anthropic.messages.acreate(messages=USER, max_tokens=16, **there))
    assert spoken["content"][0]["text"] == plain_text(server)


# langchain.


def test_langchain(base_url, server):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, max_tokens=16)
    assert chat.invoke(SAID).content == plain_text(server) == "".join(part.content for part in chat.stream(SAID))
    long = ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, max_tokens=400)
    for method in ("function_calling", "json_schema"):
        assert isinstance(long.with_structured_output(Shape, method=method).invoke(SAID), Shape)

    @tool
    def area(point: Point) -> int:
        """Returns the area up to a point."""
        return point.x * point.y

    called = long.bind_tools([area], tool_choice="any", parallel_tool_calls=False).invoke(SAID)
    [call] = called.tool_calls
    assert area.invoke(call["args"]) == call["args"]["point"]["x"] * call["args"]["point"]["y"]
    completion = OpenAI(base_url=base_url, api_key="none", model=MODEL, max_tokens=16, temperature=0)
    _, same = server.ask("POST", "/v1/completions", {"prompt": SAID, "max_tokens": 16, "temperature": 0})
    assert completion.invoke(SAID) == same["choices"][0]["text"]


def test_langchain_agents(base_url):
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
    from langchain_openai import ChatOpenAI

    alone = {**NO_CALL, "parallel_tool_calls": False}
    chat = ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, max_tokens=400, extra_body=alone)
    for strategy in (ToolStrategy, ProviderStrategy):
        agent = create_agent(chat, tools=[], response_format=strategy(Shape))
        found = agent.invoke({"messages": USER})
        assert isinstance(found["structured_response"], Shape)
