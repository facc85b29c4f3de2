# SPDX-License-Identifier: Apache-2.0
"""Splits the text of an answer into reasoning, content and tool calls, as it arrives: deltas of OpenAI's API."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from speccompile.serving.openai.gemma_calls import call_from_text
from speccompile.serving.openai.json_calls import JsonCall
from speccompile.serving.openai.tool_formats import Markers, ToolFormat

Delta = dict[str, Any]
_NAMED = re.compile(
    r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)"
)  # Mistral's name before arguments
_NAME_PART = re.compile(r"[\w.\-\[\]]*")
_LETTERS = string.ascii_letters + string.digits


def held_length(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of a text may become one of the marks."""
    most = max((len(mark) for mark in marks), default=1) - 1
    for size in range(min(len(text), most), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class ReasoningReader:
    """Separates a reasoning at the beginning of a text.

    Args:
        markers: what begins and ends it.
        is_open: the prompt has begun it.
    """

    def __init__(self, markers: Markers, is_open: bool) -> None:
        self._begin, self._end = markers
        self._state = "inside" if is_open else "before"
        self._text = ""
        self._is_fresh = True  # line ends at the beginning of a part are left out

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Returns (reasoning, content) of a part of the text."""
        self._text += text
        if self._state == "before":
            start = self._text.lstrip()
            if start.startswith(self._begin):
                self._text, self._state = start[len(self._begin) :], "inside"
            elif not is_last and self._begin.startswith(start):
                return "", ""
            else:
                self._state, self._is_fresh = "after", False
        reasoning = ""
        if self._state == "inside":
            reasoning, mark, rest = self._text.partition(self._end)
            keep = 0 if mark or is_last else held_length(reasoning, (self._end,))
            reasoning, held = reasoning[: len(reasoning) - keep], reasoning[len(reasoning) - keep :]
            reasoning = self._trimmed(reasoning)
            if not mark:
                self._text = held
                return reasoning, ""
            self._text, self._state, self._is_fresh = rest, "after", True
        content, self._text = self._text, ""
        return reasoning, self._trimmed(content)

    def _trimmed(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip("\n")
            self._is_fresh = not text
        return text


class ToolReader:
    """Separates tool calls from content.

    Args:
        form: how the family writes them.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form, self._text = form, ""
        self._state = "start"
        self._call: JsonCall | None = None
        self._is_told = False  # the name of the current call was passed on
        self._is_open = False  # after a mark that begins calls
        self.num_calls = 0

    def push(self, text: str, is_last: bool = False) -> list[Delta]:
        """Returns the deltas of a part of the text."""
        self._text += text
        deltas: list[Delta] = []
        while self._step(deltas, is_last):
            pass
        return deltas

    def _step(self, deltas: list[Delta], is_last: bool) -> bool:
        """Handles what it can of the text; returns whether there may be more to handle."""
        if self._call is not None:
            return self._read_call(deltas, is_last)
        if self._state == "calls":
            return self._between(deltas, is_last)
        return self._read_content(deltas, is_last)

    def _read_content(self, deltas: list[Delta], is_last: bool) -> bool:
        form = self._form
        if self._state == "start":
            start = self._text.lstrip()
            if not start and not is_last:
                return False
            if start[:1] in ("{", "[") and (form.is_bare or form.quote or form.is_list) and _may_be_calls(start, form):
                if start[:1] == "[" and len(start) < 2 and not is_last:
                    return False
                self._text, self._state, self._is_open = start, "calls", True
                return True
            self._state = "content"
        found = [(at, mark) for mark in form.begin if (at := self._text.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            _add(deltas, "content", self._text[:at].rstrip() if not self._text[:at].strip() else self._text[:at])
            self._text, self._state, self._is_open = self._text[at + len(mark) :], "calls", True
            return True
        keep = 0 if is_last else held_length(self._text, form.begin)
        _add(deltas, "content", self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _between(self, deltas: list[Delta], is_last: bool) -> bool:
        """Finds the next call, or the end of the calls."""
        form, rest = self._form, self._text.lstrip()
        begun = next((mark for mark in form.begin if rest.startswith(mark)), None)
        if begun is not None:
            self._text, self._is_open = rest[len(begun) :], True
            return True
        marks = (*form.begin, form.end) if form.end else form.begin
        if not is_last and (not rest or any(mark.startswith(rest) for mark in marks)):
            return False
        if form.end and rest.startswith(form.end):
            self._text, self._is_open = rest[len(form.end) :], False
            return True
        if self._is_open and form.quote and not rest.startswith(("[", "{", ",", "]")):
            return self._read_notation(deltas, is_last)
        if self._is_open:
            inner = rest.lstrip(" \t\r\n,;[]" if form.is_list or form.is_bare or form.quote else " \t\r\n")
            if inner.startswith("{"):
                self._text, self._call, self._is_told = inner, JsonCall(), False
                return True
            if form.is_list and (named := _NAMED.match(inner)):
                self._start(deltas, named[1])
                self._text, self._call, self._is_told = inner[named.end() :], _NamedArguments(name=named[1]), True
                return True
            if not is_last and (not inner or (form.is_list and _NAME_PART.fullmatch(inner))):
                return False
            rest = inner
        self._state, self._text = "content", rest
        return bool(rest)

    def _read_call(self, deltas: list[Delta], is_last: bool) -> bool:
        assert self._call is not None
        if not self._text and not is_last:
            return False
        news, used = self._call.push(self._text)
        self._text = self._text[used:]
        if news.name is not None and not self._is_told:
            self._start(deltas, news.name)
            self._is_told = True
        if news.arguments and self._is_told:
            _add_arguments(deltas, self.num_calls - 1, news.arguments)
        if not self._call.is_closed:
            if is_last and not self._is_told:
                _add(deltas, "content", self._call.raw)
                self._call.raw = ""
            return False
        if not self._is_told:  # an object, but no call
            _add(deltas, "content", self._call.raw)
            self._state = "content"
        self._call = None
        return True

    def _read_notation(self, deltas: list[Delta], is_last: bool) -> bool:
        """Reads a call in Gemma's notation, which is passed on as a whole."""
        body, mark, rest = self._text.partition(self._form.end)
        if not mark and not is_last:
            return False
        call = call_from_text(body, self._form.quote)
        if call is None:
            _add(deltas, "content", body if not mark else f"{self._form.begin[0]}{body}{mark}")
        else:
            self._start(deltas, call[0])
            _add_arguments(deltas, self.num_calls - 1, call[1])
        self._text, self._is_open = rest, False
        return bool(rest)

    def _start(self, deltas: list[Delta], name: str) -> None:
        # Mistral's templates take identifiers of nine letters alone; others take any.
        identity = "".join(secrets.choice(_LETTERS) for _ in range(9))
        if not self._form.is_list:
            identity = f"call_{identity}"
        call = {"index": self.num_calls, "id": identity, "type": "function"}
        deltas.append({"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]})
        self.num_calls += 1


def _may_be_calls(start: str, form: ToolFormat) -> bool:
    return start[0] == "{" if form.is_bare else start.startswith("[{") or start == "["


class _NamedArguments(JsonCall):
    """Arguments whose name is known already."""

    def push(self, text: str) -> tuple[Any, int]:
        news, used = super().push(text)
        news.name, news.arguments = None, text[:used]
        return news, used


def _add(deltas: list[Delta], name: str, text: str) -> None:
    if text:
        deltas.append({name: text})


def _add_arguments(deltas: list[Delta], index: int, piece: str) -> None:
    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})


class MessageReader:
    """Reads one answer.

    Args:
        markers: of reasoning; None: there is none.
        form: of tool calls; None: they are not read.
        is_thinking: the prompt has begun the reasoning.
        most_calls: later ones are left out; None: all are told.
    """

    def __init__(
        self,
        markers: Markers | None,
        form: ToolFormat | None,
        is_thinking: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self._most_calls = most_calls
        self._reasoning = None if markers is None else ReasoningReader(markers, is_thinking)
        self._tools = None if form is None else ToolReader(form)

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, is_last: bool = False) -> list[Delta]:
        """Returns the deltas of a part of the text; what may become a mark is held back until it has not."""
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.push(text, is_last)
        deltas: list[Delta] = []
        _add(deltas, "reasoning_content", reasoning)
        if self._tools is not None:
            told = self._tools.push(content, is_last) if content or is_last else []
            return deltas + [delta for delta in told if self._is_told(delta)]
        _add(deltas, "content", content)
        return deltas

    def _is_told(self, delta: Delta) -> bool:
        calls = delta.get("tool_calls")
        return calls is None or self._most_calls is None or calls[0]["index"] < self._most_calls


def message_from_deltas(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Returns the whole message of an answer."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
