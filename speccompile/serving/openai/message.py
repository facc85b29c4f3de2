# SPDX-License-Identifier: Apache-2.0
"""Splits the text of an answer into reasoning, content and tool calls as it arrives."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from speccompile.serving.openai.tool_formats import Markers, ToolFormat
from speccompile.serving.openai.tool_reader import CALL, REASONING, TEXT, Delta, ToolReader, prefix_length


class ReasoningReader:
    """Separates the reasoning at the beginning of a text from the content; marks there are in neither part."""

    def __init__(self, markers: Markers, is_open: bool, is_closed: bool = False) -> None:
        self._begin, self._end = markers
        self._is_inside = self._has_begun = self._trims = is_open
        self._is_start = True  # no letter of this part was returned
        self._num_ends = 0 if is_closed else 1  # marks of an end that may still come
        self._text = ""

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """Returns (reasoning, content) of a part of the text."""
        self._text += text
        reasoning, content, goes_on = "", "", True
        while goes_on:
            if self._is_inside:
                part, goes_on = self._read_reasoning(is_last)
                reasoning += part
            else:
                part, goes_on = self._read_content(is_last)
                content += part
        return reasoning, content

    def _read_reasoning(self, is_last: bool) -> tuple[str, bool]:
        part, mark = self._until((self._begin, self._end), is_last)
        if self._is_start:  # line ends at the beginning of a part are left out
            part = part.lstrip("\n")
            self._is_start = not part
        self._note(mark)
        return part, bool(mark)

    def _read_content(self, is_last: bool) -> tuple[str, bool]:
        marks = (self._begin, self._end)
        if self._is_start:
            start = self._text.lstrip()
            if (mark := next((mark for mark in marks if start.startswith(mark)), "")) != "":
                self._text = start[len(mark) :]
                self._note(mark)
                return "", True
            if not is_last and any(mark.startswith(start) for mark in marks):
                return "", False
            self._text = self._text.lstrip("\n") if self._trims else self._text
            self._is_start = False
        part, mark = self._until(marks if self._num_ends else (), is_last)
        if mark == self._begin:  # content that tells of it
            self._num_ends = 0
            return part + mark, True
        if mark:
            self._num_ends -= 1
        return part, bool(mark)

    def _note(self, mark: str) -> None:
        if mark == self._begin:
            self._num_ends += self._has_begun
            self._has_begun = self._is_inside = True
        elif mark:
            self._num_ends -= self._num_ends > 0
            self._is_inside, self._is_start = False, True
        self._trims = self._trims or bool(mark)

    def _until(self, marks: Sequence[str], is_last: bool) -> tuple[str, str]:
        found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        end, mark = min(found, default=(len(self._text) - (0 if is_last else prefix_length(self._text, marks)), ""))
        part, self._text = self._text[:end], self._text[end + len(mark) :]
        return part, mark


class MessageReader:
    """Reads one answer.

    Args:
        markers: of reasoning; None: there is none.
        form: of tool calls; None: they are not read.
        max_calls: later calls are left out; None: none is.
        names: of the tools; None: any.
    """

    def __init__(
        self,
        markers: Markers | None,
        form: ToolFormat | None,
        is_thinking: bool = False,
        max_calls: int | None = None,
        names: Collection[str] | None = None,
        is_closed: bool = False,
    ) -> None:
        self._max_calls, self._num_calls = max_calls, 0
        self._reasoning = None if markers is None else ReasoningReader(markers, is_thinking, is_closed)
        self._tools = None if form is None else ToolReader(form, names)

    def push(self, text: str, is_last: bool = False) -> list[Delta]:
        """Returns the deltas of a part of the text; text that may become a mark is kept until it cannot."""
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.push(text, is_last)
        deltas = [Delta(REASONING, reasoning)] if reasoning else []
        if self._tools is None:
            return [*deltas, Delta(TEXT, content)] if content else deltas
        for delta in self._tools.push(content, is_last) if content or is_last else ():
            self._num_calls += bool(delta.call_id)
            if delta.kind != CALL or self._max_calls is None or self._num_calls <= self._max_calls:
                deltas.append(delta)
        return deltas
