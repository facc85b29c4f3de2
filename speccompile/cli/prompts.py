# SPDX-License-Identifier: Apache-2.0
"""Prompt files: one JSON object a line, with its own sampling if it likes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.errors import RuntimeFault


@dataclass(frozen=True)
class Request:
    """One prompt.

    Args:
        prompt: a text, or token ids.
        overrides: sampling fields that win over the options of the command.
    """

    prompt: str | list[int]
    overrides: dict[str, Any]


def _stops(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError("a string or a list of strings")
    return tuple(strings)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return float(value)


def _biases(value: Any) -> dict[int, float]:
    """JSON has no numbers as keys: token ids are strings of digits, as in the OpenAI API."""
    if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
        raise ValueError("an object of biases by token id")
    return {int(token): _number(bias) for token, bias in value.items()}


READERS: Mapping[str, Callable[[Any], Any]] = {
    "seed": _whole,
    "temperature": _number,
    "top_k": _whole,
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _biases,
    "max_new_tokens": _whole,
    "stop": _stops,
}


def read_requests(path: Path, limit: int | None = None) -> list[Request]:
    """The prompts of a file, in order; empty lines are skipped, unknown keys ignored.

    Args:
        path: JSON lines.
        limit: read at most this many.

    Raises:
        RuntimeFault: the file cannot be read, holds no prompt, or a line is wrong; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise RuntimeFault(str(path), str(fault), "a file of JSON lines", "Check --prompts.") from fault
    requests = [_read_line(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise RuntimeFault(str(path), "no prompt", "one JSON object a line", 'Write lines like {"prompt": "..."}.')
    return requests[:limit]


def _read_line(where: str, line: str) -> Request:
    todo = 'Write a line like {"prompt": "...", "temperature": 0.8}.'
    try:
        data = json.loads(line)
    except ValueError as fault:
        raise RuntimeFault(where, str(fault), "one JSON object", todo) from fault
    prompt: Any = data.get("prompt") if isinstance(data, dict) else None
    is_ids = isinstance(prompt, list) and all(isinstance(t, int) for t in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise RuntimeFault(where, line[:60], "an object with `prompt`, a text or token ids", todo)
    overrides = {}
    for key, read in READERS.items():
        if data.get(key) is not None:
            try:
                overrides[key] = read(data[key])
            except ValueError as fault:
                raise RuntimeFault(f"{where} ({key})", repr(data[key]), str(fault), todo) from fault
    return Request(prompt, overrides)


def write_results(path: Path, data: Any) -> None:
    """Write a JSON document; `-` is standard output.

    Raises:
        RuntimeFault: the file cannot be written.
    """
    text = json.dumps(data, indent=1) + "\n"
    if str(path) == "-":
        print(text, end="")
        return
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as fault:
        part.unlink(missing_ok=True)
        raise RuntimeFault(str(path), str(fault), "a file that can be written", "Choose another --json.") from fault
