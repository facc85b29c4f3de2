# SPDX-License-Identifier: Apache-2.0
"""Prompts of our own as conversations: what a build calibrates on and measures with, and `bench` by category."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CHATS = Path(__file__).with_name("chats.jsonl")


@dataclass(frozen=True)
class Chat:
    """A conversation whose next turn is the assistant's."""

    category: str  # kind of text: code, dialogue, maths, rewriting or languages
    messages: tuple[Mapping[str, str], ...]


def read_chats() -> list[Chat]:
    """Returns the conversations of `CHATS`; their categories take turns, so that the first few are of all kinds."""
    lines = CHATS.read_text(encoding="utf-8").splitlines()
    return [Chat(row["category"], tuple(row["messages"])) for row in map(json.loads, lines)]
