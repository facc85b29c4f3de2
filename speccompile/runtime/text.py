# SPDX-License-Identifier: Apache-2.0
"""Text from tokens as they come: never half a character, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WINDOW = 16  # tokens: to decode so many costs little more than to decode one
REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are not (yet) a character


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that decoding needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a run of tokens."""
        ...


class TextStream:
    """Turns tokens into outputs of steps of text whose concatenation is the text of all of them.

    Only a window of the latest tokens is decoded each time: from `_start`, whose text is known up to `_read`, to the
    end. A window that ends inside a character is held back; one that has become long begins anew.

    Args:
        tokenizer: decodes runs of tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens before _read have been emitted; decoding starts at _start
        self._known = ""  # text of the tokens from _start to _read

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._tokens += tokens
        return self._advance(is_last=False)

    def finish(self) -> str:
        """The text that was held back."""
        return self._advance(is_last=True)

    def _advance(self, is_last: bool) -> str:
        known, text = self._known, self._tokenizer.decode(self._tokens[self._start :], skip_special_tokens=True)
        if len(text) <= len(known) or (text.endswith(REPLACEMENT) and not is_last):
            return ""
        start, self._read, self._known = self._read, len(self._tokens), text
        if self._read - self._start > WINDOW:
            self._start = start
            self._known = self._tokenizer.decode(self._tokens[start:], skip_special_tokens=True)
        return text[len(known) :]


class StopStrings:
    """Finds the first of some strings in a text that comes in outputs of steps.

    Args:
        stops: non-empty strings; none is allowed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def push(self, step_output: str) -> str:
        """The text that can be shown: nothing of a stop string, nothing that may yet become one."""
        if not self._stops:
            return step_output
        text = self._held + step_output
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_found, self._held = True, ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back; no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextSink:
    """Text of one sequence: outputs of steps to show, and the end at a stop string.

    Args:
        tokenizer: decodes runs of tokens.
        stops: stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._stream, self._stops = TextStream(tokenizer), StopStrings(stops)
        self._one_by_one = bool(stops)
        self.text = ""

    def push(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """Take in tokens.

        Returns:
            The text to show, how many of the tokens were used, and whether a stop string ends the text there.
        """
        if not self._one_by_one:
            step_output = self._stream.push(tokens)
            self.text += step_output
            return step_output, len(tokens), False
        shown = ""
        for num, token in enumerate(tokens, 1):
            shown += self._stops.push(self._stream.push((token,)))
            if self._stops.is_found:
                self.text += shown
                return shown, num, True
        self.text += shown
        return shown, len(tokens), False

    def finish(self) -> str:
        """The text that was held back, once no token follows."""
        if self._stops.is_found:
            return ""
        step_output = self._stops.push(self._stream.finish())
        if not self._stops.is_found:
            step_output += self._stops.finish()
        self.text += step_output
        return step_output
