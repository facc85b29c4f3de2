# SPDX-License-Identifier: Apache-2.0
"""Pages of `--help`: paragraphs that fill the terminal's width, and no type beside an option without a value."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup


def joined_paragraphs(text: str) -> str:
    """Returns a help text with each paragraph on one line, so that it is wrapped where the terminal ends."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _without_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""  # else typer shows <bool>, as if a value followed
    return params


class TidyCommand(TyperCommand):
    """A command whose help is laid out by the terminal's width."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        super().__init__(*args, help=None if help is None else joined_paragraphs(help), **options)

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the parameters, `--help` with them."""
        return _without_flag_types(super().get_params(ctx))


class TidyGroup(TyperGroup):
    """The same for the program's own page."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the parameters, `--help` with them."""
        return _without_flag_types(super().get_params(ctx))
