# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of Gemma's tool calls: `call:name{key:<escape>text<escape>,other:3}`."""

from __future__ import annotations

import json
import re
from typing import Any

_CALL = re.compile(r"\s*call:\s*([\w.\-]+)\s*(\{.*)", re.DOTALL)
_BARE = re.compile(r"[^,{}\[\]]*")
_KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:\s*")
_WORDS = {"true": True, "false": False, "null": None, "None": None}


def call_from_text(text: str, quote: str) -> tuple[str, str] | None:
    """Returns the name and the arguments, as JSON, of a call between its markers; None: it is none.

    Args:
        text: between the markers.
        quote: what stands around texts.
    """
    found = _CALL.fullmatch(text)
    if found is None:
        return None
    try:
        value, at = _value(found[2], 0, quote)
    except (IndexError, ValueError):
        return None
    if found[2][at:].strip() or not isinstance(value, dict):
        return None
    return found[1], json.dumps(value, ensure_ascii=False)


def _value(text: str, at: int, quote: str) -> tuple[Any, int]:
    """Returns the value that begins at a position, and where it ends."""
    while text[at].isspace():
        at += 1
    if text.startswith(quote, at):
        start = at + len(quote)
        end = text.index(quote, start)
        return text[start:end], end + len(quote)
    if text[at] == "{":
        return _members(text, at + 1, quote, "}")
    if text[at] == "[":
        return _members(text, at + 1, quote, "]")
    found = _BARE.match(text, at)
    word = found[0].strip() if found else ""
    if not word:
        raise ValueError("no value")
    if word in _WORDS:
        return _WORDS[word], at + len(found[0] if found else "")
    try:
        return json.loads(word), at + len(found[0] if found else "")
    except ValueError:
        return word, at + len(found[0] if found else "")


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
        if text.startswith(quote, at):
            key, at = _value(text, at, quote)
            at = text.index(":", at) + 1
        else:
            named = _KEY.match(text, at)
            if named is None:
                raise ValueError("no key")
            key, at = named[1], named.end()
        members[key], at = _value(text, at, quote)
