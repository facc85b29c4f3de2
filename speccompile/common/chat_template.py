# SPDX-License-Identifier: Apache-2.0
"""Chat templates: a bundle's own, rendered in jinja's sandbox as transformers renders them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from speccompile.common.tokenizer_file import read_template_file
from speccompile.errors import RuntimeFault


class _Generation(Extension):
    """`{% generation %}` marks what training learns from; here its contents stand for themselves."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja declares it

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@dataclass(frozen=True)
class ChatTemplate:
    """Makes a prompt of messages."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        where: str = "messages",
    ) -> str:
        """Returns the prompt, special tokens included. Raises RuntimeFault: the template refuses these messages.

        Args:
            add_generation_prompt: open the assistant's turn at the end.
        """
        try:
            template = _compiled(self.source)
            variables = {**self.special_tokens, **extra, "messages": messages}
            return template.render(add_generation_prompt=add_generation_prompt, **variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError) as fault:
            todo = "Correct the messages: roles, their order, and what the template reads of them."
            raise RuntimeFault(where, f"{fault}", "messages that the chat template takes", todo) from fault


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja's own escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Returns the template beside a tokenizer; None where there is none."""
    found = read_template_file(folder)
    return None if found is None else ChatTemplate(*found)
