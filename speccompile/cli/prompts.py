# SPDX-License-Identifier: Apache-2.0
"""Prompt files: one JSON object a line, a text or a conversation, optionally with its own sampling fields."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.common.chat_prompts import check_messages, tokens_of_messages
from speccompile.common.json_reader import parse_json, shown
from speccompile.common.parameters import BIASES, FLAG, INTEGER, NUMBER, STRINGS, TEXT, TOKENS, Kind
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.core.sampling_params import SAMPLING_PARAMETERS
from speccompile.errors import BuildError, BundleError, RuntimeFault

if TYPE_CHECKING:
    from speccompile.bundle.bundle import Bundle


@dataclass(frozen=True)
class Request:
    """One prompt.

    Args:
        prompt: a text, or token ids; not read where there are messages.
        overrides: sampling fields that win over the options of the command.
        category: kind of text, by which `bench` groups; None: not stated.
        messages: the conversation that the chat template makes a prompt of; empty: it is `prompt`.
    """

    prompt: str | list[int]
    overrides: dict[str, Any]
    category: str | None = None
    images: tuple[Path, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="prompt", compare=False)


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
    try:
        return float(value)
    except OverflowError as fault:
        raise ValueError("a number of at most 308 digits") from fault


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of token ids")
    return tuple(_whole(token) for token in value)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
        raise ValueError("an object of biases by token id")
    return {int(token): _number(bias) for token, bias in value.items()}


_READERS: Mapping[Kind, Callable[[Any], Any]] = {
    INTEGER: _whole,
    NUMBER: _number,
    STRINGS: _stops,
    BIASES: _biases,
    FLAG: _truth,
    TOKENS: _tokens,
    TEXT: _text,
}


def read_requests(path: Path, limit: int | None = None) -> list[Request]:
    """Returns at most `limit` prompts of a file, in order; empty lines are skipped, unknown keys ignored.

    Raises:
        RuntimeFault: the file cannot be read, holds no prompt, or a line is wrong; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as fault:
        raise RuntimeFault(str(path), str(fault), "a file of JSON lines", "Check --prompts.") from fault
    folder, rows = path.parent, [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    requests = [_read_line(f"{path}:{number}", line, folder) for number, line in rows]
    if not requests:
        raise RuntimeFault(str(path), "no prompt", "one JSON object a line", 'Write lines like {"prompt": "..."}.')
    return requests[:limit]


def _read_line(where: str, line: str, folder: Path) -> Request:
    todo = 'Write a line like {"prompt": "...", "temperature": 0.8}.'
    try:
        data = parse_json(line)
    except ValueError as fault:
        raise RuntimeFault(where, str(fault), "one JSON object", todo) from fault
    prompt, messages = (data.get("prompt"), data.get("messages")) if isinstance(data, dict) else (None, None)
    is_ids = isinstance(prompt, list) and all(type(t) is int for t in prompt)
    if (prompt is None) == (messages is None) or not (messages is not None or isinstance(prompt, str) or is_ids):
        expected = "an object with `prompt`, a text or token ids, or with `messages`, a conversation"
        raise RuntimeFault(where, line[:60], expected, todo)
    if messages is not None:
        try:
            check_messages(messages)
        except RuntimeFault as fault:
            raise RuntimeFault(f"{where} ({fault.where})", fault.got, fault.expected, fault.todo) from fault
    variables = data.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        expected = "an object of variables for the chat template"
        raise RuntimeFault(f"{where} (chat_template_kwargs)", repr(variables)[:60], expected, todo)
    overrides = {}
    for key, declared in SAMPLING_PARAMETERS.items():
        if declared.in_prompts and data.get(key) is not None:
            try:
                overrides[key] = _READERS[declared.kind](data[key])
            except ValueError as fault:
                raise RuntimeFault(f"{where} ({key})", shown(data[key]), str(fault), todo) from fault
    category = data.get("category")
    if category is not None and not (isinstance(category, str) and category.strip()):
        raise RuntimeFault(f"{where} (category)", repr(category)[:60], "the name of a kind of text", todo)
    images = data.get("images") or []
    if not isinstance(images, list) or not all(
        isinstance(name, str) and os.path.isfile(folder / name) for name in images
    ):
        expected = f"a list of image files, by paths from {folder}"
        raise RuntimeFault(f"{where} (images)", repr(images)[:60], expected, todo)
    paths, prompt = tuple(folder / name for name in images), "" if prompt is None else prompt
    return Request(prompt, overrides, category, paths, tuple(messages or ()), variables, where)


def prompts_of_bundle(bundle: Bundle, requests: Sequence[Request]) -> list[str | list[int]]:
    """Returns the prompts, conversations as token ids by a bundle's tokenizer and chat template."""
    folder, tokenizer = bundle.tokenizer_folder, None
    if bundle.tokenizer_path is not None and any(request.messages for request in requests):
        tokenizer = load_tokenizer(bundle.tokenizer_path, BundleError, "Build the bundle again.")
    return prompts_of_requests(requests, tokenizer, folder)


def prompts_of_requests(requests: Sequence[Request], tokenizer: Any, folder: Path | None) -> list[str | list[int]]:
    """Returns the prompts, conversations as token ids by the tokenizer and chat template of `folder`, if any.

    Raises:
        RuntimeFault, BundleError: see `tokens_of_messages`.
    """
    return [
        tokens_of_messages(tokenizer, folder, one.messages, one.variables, where=f"{one.where} (messages)")
        if one.messages
        else one.prompt
        for one in requests
    ]


def check_results(path: Path | None) -> None:
    """Checks before the work that its results can be written; None and `-` always can. Raises as `check_file`."""
    from speccompile.bundle.files import check_file

    if path is not None and str(path) != "-":
        check_file(path)


def write_results(path: Path, data: Any) -> None:
    """Writes a JSON document; `-` is standard output, which also gets what fails. Raises BuildError: it failed."""
    from speccompile.bundle.files import write_file

    text = json.dumps(data, indent=1) + "\n"
    if str(path) == "-":
        print(text, end="")
        return
    try:
        write_file(path, text)
    except BuildError as fault:
        print(text, end="")
        todo = f"{fault.todo} The results are on standard output."
        raise BuildError(fault.where, fault.got, fault.expected, todo) from fault
