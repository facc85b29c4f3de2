# SPDX-License-Identifier: Apache-2.0
"""Reads Gemma's tool calls: `call:name{key:<escape>text<escape>,other:3}`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

_CALL = re.compile(r"\s*call:\s*([\w.\-]+)\s*(\{.*)", re.DOTALL)
_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:\s*")
_STRING = re.compile(r'([:\[,{]\s*)"(?:[^"\\]|\\.)*"', re.DOTALL)  # of JSON, where a value or a key begins
_OPEN_STRING = re.compile(r'[:\[,{]\s*"')
_START = re.compile(r"\s*(?:c|ca|cal|call|call:\s*([\w.\-]*)\s*(\{.*)?)?", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None, "None": None}


def may_begin_call(text: str, names: Collection[str] | None) -> bool:
    """Returns whether a call of one of the tools may begin with a text."""
    match = _START.fullmatch(text)
    if match is None or names is None:
        return match is not None
    name = match[1] or ""
    if match[2] or (name and text[-1:].isspace()):
        return name in names
    return any(one.startswith(name) for one in names)


def find_call(text: str, begin: str, end: str, quote: str) -> tuple[int, tuple[str, str] | None] | None:
    """Returns where a call ends, and its (name, arguments) or None if it is not a call; None: the text is too short.

    Marks end a call outside of its strings.
    """
    marks, at = re.compile("|".join(re.escape(mark) for mark in (quote, begin, end))), 0
    while (match := marks.search(text, at)) is not None:
        if match[0] == quote:
            closing = text.find(quote, match.end())
            if closing < 0:
                return None
            at = closing + len(quote)
            continue
        body = text[: match.start()]
        call = call_from_text(body, quote)
        if call is None and match[0] == end and _is_in_string(body, quote):
            at = match.end()
            continue
        return match.start(), call
    return None


def _is_in_string(text: str, quote: str) -> bool:
    plain = re.sub(f"{re.escape(quote)}.*?{re.escape(quote)}", "0", text, flags=re.DOTALL)
    return _OPEN_STRING.search(_STRING.sub(r"\g<1>0", plain)) is not None


def call_from_text(text: str, quote: str) -> tuple[str, str] | None:
    """Returns the name and the arguments, as JSON, of a call between its markers; None: it is none."""
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    try:
        value, at = _value(match[2], 0, quote)
    except (IndexError, ValueError, RecursionError):
        return None
    if match[2][at:].strip() or not isinstance(value, dict):
        return None
    return match[1], json.dumps(value, ensure_ascii=False)


def _value(text: str, at: int, quote: str) -> tuple[Any, int]:
    """Returns the value that begins at a position, and where it ends."""
    while text[at].isspace():
        at += 1
    if text.startswith(quote, at):
        start = at + len(quote)
        end = text.index(quote, start)
        return text[start:end], end + len(quote)
    if text[at] == '"':
        return json.JSONDecoder(strict=False).raw_decode(text, at)
    if text[at] == "{":
        return _members(text, at + 1, quote, "}")
    if text[at] == "[":
        return _members(text, at + 1, quote, "]")
    match = _BARE.match(text, at)
    word = match[0].strip() if match else ""
    if not word:
        raise ValueError("no value")
    if word in _WORDS:
        return _WORDS[word], at + len(match[0] if match else "")
    try:
        return json.loads(word), at + len(match[0] if match else "")
    except ValueError:
        return word, at + len(match[0] if match else "")


def _members(text: str, at: int, quote: str, closing: str) -> tuple[Any, int]:
    members: dict[str, Any] = {}
    items: list[Any] = []
    while True:
        while text[at].isspace() or text[at] == ",":
            at += 1
        if text[at] == closing:
            return (members if closing == "}" else items), at + 1
        if closing == "]":
            value, at = _value(text, at, quote)
            items.append(value)
            continue
        if text.startswith((quote, '"'), at):
            key, at = _value(text, at, quote)
            at = text.index(":", at) + 1
        else:
            named = _KEY.match(text, at)
            if named is None:
                raise ValueError("no key")
            key, at = named[1], named.end()
        members[key], at = _value(text, at, quote)
