# SPDX-License-Identifier: Apache-2.0
"""Incremental text of tokens: never half a character, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WINDOW = 16  # tokens: decoding so many takes little longer than decoding one
REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are not (yet) a character


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that decoding needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of a run of tokens."""
        ...


class TextStream:
    """Turns tokens into parts of text whose concatenation is the text of all tokens.

    Only a window of the latest tokens is decoded each time: from `_start` to the end; its text up to `_read` is known.
    A window that ends inside a character is held back; after one that became too long, a new one begins.

    Args:
        tokenizer: decodes runs of tokens.
        skips_special: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, skips_special: bool = True) -> None:
        self._tokenizer, self._skips = tokenizer, skips_special
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens before _read have been emitted; decoding starts at _start
        self._known = ""  # text of the tokens from _start to _read

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens complete."""
        self._tokens += tokens
        return self._advance(is_last=False)

    def finish(self) -> str:
        """Returns the text that was held back."""
        return self._advance(is_last=True)

    def _advance(self, is_last: bool) -> str:
        known, text = self._known, self._tokenizer.decode(self._tokens[self._start :], skip_special_tokens=self._skips)
        if len(text) <= len(known) or (text.endswith(REPLACEMENT) and not is_last):
            return ""
        start, self._read, self._known = self._read, len(self._tokens), text
        if self._read - self._start > WINDOW:
            self._start = start
            self._known = self._tokenizer.decode(self._tokens[start:], skip_special_tokens=self._skips)
        return text[len(known) :]


class StopStrings:
    """Finds the first stop string in a text that arrives in parts.

    Args:
        stops: non-empty strings; there may be none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None  # the one that ended the text

    def push(self, part: str) -> str:
        """Returns the text that can be shown: no part of a stop string, and nothing that may become one."""
        if not self._stops:
            return part
        text = self._held + part
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, self.found = min(found)
            self._held = ""
            return text[:end]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns the text that was held back, as it did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextSink:
    """Text of one sequence: parts to show, and the end at a stop string.

    Args:
        tokenizer: decodes runs of tokens.
        stops: stop strings.
        hidden: where special tokens are shown, those that are not; None: no special token is shown.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], hidden: frozenset[int] | None = None) -> None:
        self._stream, self._stops = TextStream(tokenizer, hidden is None), StopStrings(stops)
        self._hidden = hidden or frozenset()
        self._one_by_one = bool(stops)
        self.text = ""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """Adds tokens.

        Returns:
            The text to show, how many of the tokens were used, and whether a stop string ends the text there.
        """
        if not self._one_by_one:
            part = self._stream.push([token for token in tokens if token not in self._hidden])
            self.text += part
            return part, len(tokens), False
        shown = ""
        for num, token in enumerate(tokens, 1):
            shown += self._stops.push(self._stream.push(() if token in self._hidden else (token,)))
            if self._stops.found is not None:
                self.text += shown
                return shown, num, True
        self.text += shown
        return shown, len(tokens), False

    def finish(self) -> str:
        """Returns the text that was held back, after the last token."""
        if self._stops.found is not None:
            return ""
        part = self._stops.push(self._stream.finish())
        if self._stops.found is None:
            part += self._stops.finish()
        self.text += part
        return part
