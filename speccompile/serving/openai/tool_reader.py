# SPDX-License-Identifier: Apache-2.0
"""Separates tool calls from content as a text arrives, independent of how it is cut into parts."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection, Sequence
from typing import NamedTuple

from speccompile.serving.openai.gemma_calls import call_from_text, find_call, may_begin_call
from speccompile.serving.openai.json_calls import JsonCall
from speccompile.serving.openai.tool_formats import ToolFormat

TEXT, REASONING, CALL = "text", "reasoning", "call"
_SPACE = " \t\r\n"
# Mistral's name before arguments, and what may become one.
_NAMED = re.compile(r"([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_NAME = re.compile(r"([\w.\-]*)([\s\w\[\]]{0,80})")
_LETTERS = string.ascii_letters + string.digits


class Delta(NamedTuple):
    """What a part of the text adds to an answer's text, reasoning or call, whose first delta has its name."""

    kind: str
    text: str = ""
    call_id: str = ""
    name: str = ""


def prefix_length(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of a text may become one of the marks."""
    most = max((len(mark) for mark in marks), default=1) - 1
    for size in range(min(len(text), most), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class ToolReader:
    """Separates tool calls from content.

    Text that is not a call of one of the tools (`names`; None: any) is content, with its marks. White space around
    calls, and an incomplete call after another call, are left out.
    """

    def __init__(self, form: ToolFormat, names: Collection[str] | None = None) -> None:
        self._form, self._names = form, names
        self._marks = (*form.begin, form.end) if form.end else form.begin
        self._has_lists = form.is_list or bool(form.quote)
        self._text = ""  # not returned yet
        self._state = "start"  # or `content`, `calls`
        self._call: JsonCall | None = None
        self._opener = self._at = 0  # letters of the text before the call; those that were read
        self._is_open = False  # after a mark that begins calls
        self._is_bare = False  # nothing but its name says that an object is a call
        self._has_content = False
        self.num_calls = 0

    def push(self, text: str, is_last: bool = False) -> list[Delta]:
        """Returns the deltas of a part of the text."""
        self._text += text
        deltas: list[Delta] = []
        steps = {"start": self._read_start, "content": self._read_content, "calls": self._read_between}
        while (self._read_call if self._call is not None else steps[self._state])(deltas, is_last):
            pass
        if is_last and self._text:  # it might have become a call
            self._tell(deltas, "" if self.num_calls else self._text)
        return deltas

    # Each step handles what it can of the text, and returns whether there may be more to handle.

    def _read_start(self, deltas: list[Delta], is_last: bool) -> bool:
        start = self._text.lstrip()
        inner = start[1:].lstrip() if self._has_lists and start[:1] == "[" else start
        is_first = self._form.is_bare or (self._has_lists and start[:1] == "[")
        if is_first and inner[:1] == "{":
            self._is_bare = True
            self._begin(0, len(self._text) - len(inner))
            return True
        if not inner and (is_first or not start) and not is_last:
            return False
        self._state = "content"
        return bool(self._text)

    def _read_content(self, deltas: list[Delta], is_last: bool) -> bool:
        found = [(at, mark) for mark in self._form.begin if (at := self._text.find(mark)) >= 0]
        num_pending = 0 if is_last else prefix_length(self._text, self._form.begin)
        end = min(found)[0] if found else len(self._text) - num_pending
        if not self._has_content and not self._text[:end].strip() and not (is_last and not found):
            end = 0  # white space before the first call, or not
        self._tell(deltas, self._text[:end])
        self._text = self._text[end:]
        if not found:
            return False
        mark = min(found)[1]
        self._is_bare = False
        return self._read_begin(deltas, self._text.index(mark) + len(mark), is_last)

    def _read_begin(self, deltas: list[Delta], opener: int, is_last: bool) -> bool:
        inner = self._text[opener:].lstrip(_SPACE + "[" if self._has_lists else _SPACE)
        at = len(self._text) - len(inner)
        if inner[:1] == "{":
            self._begin(opener, at)
            return True
        if self._form.quote and "[" not in self._text[opener:at]:
            return self._read_notation(deltas, opener, is_last)
        if self._form.is_list and self._begin_named(opener, at):
            return True
        if not inner or (self._form.is_list and self._may_be_name(inner)):
            return False
        return self._refuse(deltas, opener)

    def _begin(self, opener: int, at: int, name: str | None = None) -> None:
        self._opener, self._at = opener, at
        self._call = JsonCall(self._names, self._marks, self._is_bare, name)

    def _begin_named(self, opener: int, at: int) -> bool:
        named = _NAMED.match(self._text, at)
        if named is None or (self._names is not None and named[1] not in self._names):
            return False
        self._begin(opener, named.end(), name=named[1])
        return True

    def _may_be_name(self, text: str) -> bool:
        found = _NAME.fullmatch(text)
        if found is None or self._names is None:
            return found is not None
        return found[1] in self._names if found[2] else any(name.startswith(found[1]) for name in self._names)

    def _read_call(self, deltas: list[Delta], is_last: bool) -> bool:
        assert self._call is not None
        call = self._call
        part, used = call.push(self._text[self._at :], is_last)
        self._at += used
        if call.is_call:
            self._text, self._at, self._state, self._is_open = self._text[self._at :], 0, "calls", True
            if part.name is not None:
                self._start(deltas, part.name)
            if part.arguments:
                deltas.append(Delta(CALL, part.arguments))
        if call.is_ended:
            self._call = None
            return True if call.is_call else self._refuse(deltas, self._opener)
        if is_last and call.is_call:
            self._text = ""
        return False

    def _read_between(self, deltas: list[Delta], is_last: bool) -> bool:
        """Finds the next call, or the end of the calls."""
        form, self._text = self._form, self._text.lstrip()
        text = self._text
        mark = next((mark for mark in form.begin if text.startswith(mark)), None)
        if mark is not None:
            return self._read_begin(deltas, len(mark), is_last)
        if not text or any(mark.startswith(text) for mark in self._marks):
            return False
        if self._is_open and form.end and text.startswith(form.end):
            self._text, self._is_open = text[len(form.end) :], False
            return True
        if self._is_open and text[0] in ("]}" if self._has_lists else "}"):  # the end of a list, or one too many
            self._text = text[1:]
            return True
        if self._is_open:
            inner = text.lstrip(_SPACE + ",;" if self._has_lists or form.is_bare else _SPACE)
            at = len(text) - len(inner)
            if inner[:1] == "{":
                self._begin(0, at)
                return True
            if form.is_list and self._begin_named(0, at):
                return True
            if not inner or (form.is_list and self._may_be_name(inner)):
                return False
        self._state, self._is_open = "content", False
        return True

    def _read_notation(self, deltas: list[Delta], opener: int, is_last: bool) -> bool:
        """Reads a call in Gemma's notation, whole."""
        form, body = self._form, self._text[opener:]
        if not may_begin_call(body, self._names):
            return self._refuse(deltas, opener)
        seen = max(self._at - max(map(len, self._marks)), opener)
        self._at = len(self._text)
        has_mark = any(mark in self._text[seen:] for mark in self._marks)
        found = find_call(body, form.begin[0], form.end, form.quote) if has_mark else None
        if found is None and is_last and (call := call_from_text(body, form.quote)) is not None:
            found = len(body), call
        if found is None:
            return False
        self._at = 0
        end, called = found
        if called is None:
            return self._refuse(deltas, opener)
        self._start(deltas, called[0])
        deltas.append(Delta(CALL, called[1]))
        self._text, self._state, self._is_open = body[end:], "calls", True
        return True

    def _refuse(self, deltas: list[Delta], opener: int) -> bool:
        self._tell(deltas, self._text[:opener])
        self._text, self._state, self._is_open, self._at = self._text[opener:], "content", False, 0
        return True

    def _tell(self, deltas: list[Delta], text: str) -> None:
        if text:
            deltas.append(Delta(TEXT, text))
        self._has_content = self._has_content or bool(text)

    def _start(self, deltas: list[Delta], name: str) -> None:
        # Mistral's templates take identifiers of nine letters alone; others take any.
        identity = "".join(secrets.choice(_LETTERS) for _ in range(9))
        if not self._form.is_list:
            identity = f"call_{identity}"
        deltas.append(Delta(CALL, call_id=identity, name=name))
        self.num_calls += 1
