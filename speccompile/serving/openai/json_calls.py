# SPDX-License-Identifier: Apache-2.0
"""Reads tool calls in JSON as the text arrives."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # that an object may have which no mark makes a call
_PAIRS = {"}": "{", "]": "["}


@dataclass
class CallPart:
    """What a text adds to a call."""

    name: str | None = None
    arguments: str = ""


def find_mark(text: str, at: int, marks: Sequence[str], is_last: bool) -> bool | None:
    """Returns whether a mark stands at a position of a text; None: the text is too short to decide."""
    if any(text.startswith(mark, at) for mark in marks):
        return True
    return None if not is_last and any(mark.startswith(text[at:]) for mark in marks) else False


class JsonCall:
    """One object that may be a call: of a tool's name, and with arguments that are an object.

    It is a call from when both are known, and then its arguments are passed on as they are written; null or an empty
    text is `{}`, JSON in a text is what it says. Of keys that are written twice, or by both names, the first counts. An
    object ends early at a misplaced mark or bracket.

    Args:
        names: of the tools; None: any.
        marks: of calls, which end the object where they stand outside of its texts.
        is_bare: no mark says that it is a call: it must have arguments, and no keys but a call's.
        name: written before the object, which holds the arguments alone.
    """

    def __init__(
        self, names: Collection[str] | None, marks: Sequence[str], is_bare: bool = False, name: str | None = None
    ) -> None:
        self._names, self._marks, self._is_bare = names, marks, is_bare
        self._firsts = {mark[0] for mark in marks}
        self.is_call = self.is_ended = False
        self._is_alone = name is not None  # the arguments are all of it
        self._name = name
        self._stack = ["{"] * self._is_alone  # brackets that are open
        self._expects = "value"  # or `key`, `colon`, `next`
        self._in_string = self._is_escaped = False
        self._key: str | None = ARGUMENT_KEYS[0] if self._is_alone else None  # of the value that is being read
        self._token: list[str] = []  # the key or the value that is being read
        self._arguments: list[str] = []  # that were not passed on
        self._has_arguments = self._is_telling = False

    def push(self, text: str, is_last: bool = False) -> tuple[CallPart, int]:
        """Reads more text; returns what it adds, and how many characters were read: the others must come again."""
        was_call = self.is_call
        used = self._read_all(text, is_last)
        if not self.is_call:
            return CallPart(), used
        arguments, self._arguments = "".join(self._arguments), []
        return CallPart(None if was_call else self._name, arguments), used

    def _read_all(self, text: str, is_last: bool) -> int:
        for at, letter in enumerate(text):
            if letter in self._firsts if not self._in_string else letter == "\n":
                # No JSON string holds a line end: before a mark it is an end of the string that is missing.
                found = find_mark(text, at + self._in_string, self._marks, is_last)
                if found is None:
                    return at
                if found:
                    self._end()
                    return at
            if not self._fits(letter):
                self._end()
                return at
            self._read(letter)
            if self.is_ended:
                return at + 1
        return len(text)

    def _fits(self, letter: str) -> bool:
        if self._in_string or letter not in "{}[]":
            return True
        if letter in _PAIRS:
            return self._stack[-1:] == [_PAIRS[letter]] and self._expects != "colon"
        return self._expects == "value"

    def _read(self, letter: str) -> None:
        if self._in_string:
            self._read_string(letter)
        elif letter == '"':
            self._in_string = True
            self._expects = "colon" if self._expects == "key" else "next"
        elif letter in "{[":
            self._stack.append(letter)
            self._expects = "key" if letter == "{" else "value"
            if len(self._stack) == 1:
                return
            if len(self._stack) == 2 and letter == "{" and self._key in ARGUMENT_KEYS and not self._has_arguments:
                self._has_arguments = self._is_telling = True
                self._decide()
        elif letter in "}]":
            self._stack.pop()
            self._expects = "next"
            if not self._stack:
                self._end()
                return
        elif letter == "," and self._expects == "next":
            self._expects = "key" if self._stack[-1] == "{" else "value"
            if len(self._stack) == 1:
                self._end_value()
                return
        elif letter == ":" and self._expects == "colon":
            self._expects = "value"
            if len(self._stack) == 1:
                self._begin_value()
                return
        elif not letter.isspace() and self._expects in ("key", "value"):
            self._expects = "colon" if self._expects == "key" else "next"
        if self._is_telling:
            self._arguments.append(letter)
            self._is_telling = len(self._stack) > 1
            self.is_ended = self._is_alone and not self._is_telling
        else:
            self._token.append(letter)

    def _read_string(self, letter: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif letter == "\\":
            self._is_escaped = True
        elif letter == '"':
            self._in_string = False

    def _begin_value(self) -> None:
        self._key, self._token = _text(self._taken()), []
        is_known = self._key in (NAME_KEY, *ARGUMENT_KEYS, *OTHER_KEYS)
        if self._is_bare and not is_known and not self.is_call:
            self.is_ended = True

    def _end_value(self) -> None:
        key, token = self._key, self._taken()
        self._key = None
        if self.is_call:
            return
        if key == NAME_KEY and self._name is None:
            self._name = _text(token)
            if self._name is None or (self._names is not None and self._name not in self._names):
                self.is_ended = True
        elif key in ARGUMENT_KEYS and not self._has_arguments:
            found = _object(token)
            self._has_arguments, self._arguments, self.is_ended = True, [found or ""], found is None
        self._decide()

    def _decide(self) -> None:
        self.is_call = self._name is not None and self._has_arguments and not self.is_ended

    def _end(self) -> None:
        if len(self._stack) <= 1:
            self._end_value()
            if not (self.is_call or self.is_ended or self._has_arguments or self._is_bare):
                self._has_arguments, self._arguments = True, ["{}"]
                self._decide()
        elif self._is_telling and self.is_call and not self._in_string:
            self._arguments += ["}" if bracket == "{" else "]" for bracket in reversed(self._stack[1:])]
        self.is_ended = True

    def _taken(self) -> str:
        token, self._token = "".join(self._token), []
        return token


def _text(token: str) -> str | None:
    try:
        value = json.loads(token)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _object(token: str) -> str | None:
    try:
        value = json.loads(token)
        inner = value.strip() if isinstance(value, str) else value
        if inner is None or inner == "":
            return "{}"
        found = json.loads(inner) if isinstance(inner, str) else None
    except (ValueError, RecursionError):
        return None
    return inner if isinstance(found, dict) else "{}" if isinstance(inner, str) and found is None else None
