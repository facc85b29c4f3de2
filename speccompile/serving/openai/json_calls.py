# SPDX-License-Identifier: Apache-2.0
"""Reads tool calls that are written as JSON objects, piece by piece as the text arrives."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass
class CallPart:
    """News of one call.

    Args:
        name: of the function, once it is known; None: nothing new about it.
        arguments: the next piece of the arguments' JSON.
    """

    name: str | None = None
    arguments: str = ""


@dataclass
class JsonCall:
    """One object with a name and arguments; only its own keys count, whatever is inside of the arguments.

    Arguments are passed on as they are written, from when the name is known.
    """

    raw: str = ""  # all of the object so far
    is_closed: bool = False
    name: str | None = None
    _depth: int = 0
    _in_string: bool = False
    _is_escaped: bool = False
    _key: str | None = None  # of the value that is being read
    _token: str = ""  # the key or the value that is being read
    _held: list[str] = field(default_factory=list)  # arguments before the name
    _has_arguments: bool = False

    def push(self, text: str) -> tuple[CallPart, int]:
        """Reads a text that goes on with the object.

        Returns:
            The news, and how many characters belong to the object.
        """
        news = CallPart()
        for at, letter in enumerate(text):
            self.raw += letter
            self._read(letter, news)
            if self.is_closed:
                if self.name is not None and not self._has_arguments:
                    news.arguments += "{}"
                return news, at + 1
        return news, len(text)

    def _read(self, letter: str, news: CallPart) -> None:
        inside = self._key is not None and (self._depth > 1 or self._in_string or letter not in ",}")
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif letter == "\\":
                self._is_escaped = True
            elif letter == '"':
                self._in_string = False
            self._token += letter
        elif letter == '"':
            self._in_string = True
            self._token += letter
        elif letter in "{[":
            self._depth += 1
            self._token += letter if self._depth > 1 else ""
        elif letter in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(news)
                self.is_closed = True
                return
            self._token += letter
        elif self._depth == 1 and letter == ":" and self._key is None:
            self._key, self._token = _text(self._token), ""
            return
        elif self._depth == 1 and letter == ",":
            self._end_value(news)
            return
        else:
            self._token += letter
        if inside and self._key in ARGUMENT_KEYS:
            self._tell(letter, news)

    def _tell(self, letter: str, news: CallPart) -> None:
        if not self._has_arguments and letter.isspace():
            return
        self._has_arguments = True
        if self.name is None:
            self._held.append(letter)
        else:
            news.arguments += letter

    def _end_value(self, news: CallPart) -> None:
        if self._key == NAME_KEY and self.name is None and (name := _text(self._token)) is not None:
            self.name = news.name = name
            news.arguments += "".join(self._held)
            self._held.clear()
        self._key, self._token = None, ""


def _text(token: str) -> str | None:
    """Returns the text that a JSON string stands for; None: it is none."""
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
