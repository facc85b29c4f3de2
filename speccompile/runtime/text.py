# SPDX-License-Identifier: Apache-2.0
"""Incremental text of tokens: never half a character, and stop strings; and how long a text may be."""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Protocol

from speccompile.errors import RuntimeFault

WINDOW = 16  # tokens: decoding so many takes little longer than decoding one
MAX_BYTES = 4  # of a character in UTF-8
REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are not (yet) a character


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that decoding needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """Turns tokens into parts of text: what they add to the text of the prompt, however they are cut into parts.

    Only a window is decoded: tokens whose text is known, and those that have none yet. It shows decoders that treat the
    beginning of a text in another way (SentencePiece's drop its first space) that this is none. Bytes that are no whole
    character wait while they may become one; then they are U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skips_special: bool = True, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._skips = tokenizer, skips_special
        self._context = self._end_of(prompt)  # tokens whose text is known
        self._known = self._decode(self._context)
        self._last = 0  # where the tokens of the context begin that gave text latest
        self._held: list[int] = []  # tokens after them, whose text is not known yet
        # SentencePiece's decoders read a run of bytes as a whole: it is broken, all of it, by one that does not fit.
        self._are_runs = hasattr(tokenizer, "token_to_id") and tokenizer.token_to_id("<0x80>") is not None
        while self._are_runs and self._known.endswith(REPLACEMENT):
            self._held.insert(0, self._context.pop())
            self._known = self._decode(self._context)
        self._num_old = self._num_of_bytes() or 0  # of these are the prompt's: it ended within a character
        self._held = self._held[len(self._held) - self._num_old :]

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens complete."""
        text = self._decode([*self._context, *self._held, *tokens])
        at = self._end_of_known(text)
        if at is not None and REPLACEMENT not in text[at:]:
            self._held += tokens
            return self._take(text, at)
        # A token that has no text, even in front of itself, is left out by the decoder.
        return "".join(self._push_one(token) for token in tokens if self._decode((token, token)))

    def finish(self) -> str:
        """Returns the text that was held back, without a character of which only a part is there."""
        if not self._held:
            return ""
        text = self._decode(self._context + self._held)
        at = self._end_of_known(text)
        new = REPLACEMENT * len(self._held) if at is None else text[at:]
        new = self._without_old(new[: len(new) - self._num_of_half(new)])
        self._held = []
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skips)

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        num = WINDOW // 2
        while num < len(prompt):
            text = self._decode(prompt[-num:])
            if text and (num >= 2 * WINDOW or not text.startswith(REPLACEMENT)):
                break
            num = num + 1 if text else 2 * num
        found = list(prompt[-num:])
        return found if self._decode(found) else found[-WINDOW:]

    def _end_of_known(self, text: str) -> int | None:
        known = self._known
        if text.startswith(known):
            return len(known)
        whole = known.removesuffix(REPLACEMENT)  # the prompt ended within a character
        if len(whole) < len(known) and text.startswith(whole):
            return len(whole)
        same = next((at for at, (one, other) in enumerate(zip(text, known, strict=False)) if one != other), len(text))
        return None if REPLACEMENT in text[same:] else len(known)

    def _push_one(self, token: int) -> str:
        self._held.append(token)
        text = self._decode(self._context + self._held)
        at = self._end_of_known(text)
        is_open = text.endswith(REPLACEMENT) and at != len(text)
        if at is not None and not is_open:
            return self._take(text, at)
        if is_open and len(self._held) < MAX_BYTES:
            return ""
        if at is not None and not self._are_runs:  # all of the text but its last character is final
            return self._take(text, at, num_open=1)
        _, *rest = self._held  # a byte a token, and the first begins no character
        self._held = []
        self._num_old, shown = max(self._num_old - 1, 0), "" if self._num_old else REPLACEMENT
        return shown + "".join(self._push_one(token) for token in rest)

    def _take(self, text: str, at: int, num_open: int = 0) -> str:
        new, num_before = text[at : len(text) - num_open], len(self._context)
        if new or num_before <= 2 * WINDOW:  # else special tokens without end
            self._context, self._known = self._context + self._held, text[: len(text) - num_open]
        self._held = []
        if new:
            last, self._last = self._last, num_before
            if len(self._context) > WINDOW:
                self._context, self._last = self._context[last:], num_before - last
                self._known = self._decode(self._context)
                self._known = self._known[: len(self._known) - num_open]
        return self._without_old(new)

    def _without_old(self, text: str) -> str:
        num, self._num_old = self._num_old, 0
        return text.removeprefix(REPLACEMENT * num)

    def _num_of_half(self, text: str) -> int:
        num = len(text) - len(text.rstrip(REPLACEMENT))
        is_run = num == len(self._held)  # one for each byte, as byte-fallback decoders write them
        half = self._num_of_bytes()
        if half is None:
            return num if is_run else min(num, 1)
        return half if self._are_runs else min(half, 1)

    def _num_of_bytes(self) -> int | None:
        found = [bytes_of_token(self._tokenizer, token) for token in self._held]
        parts = [part for part in found if part is not None]
        reader = getincrementaldecoder("utf-8")("replace")
        reader.decode(b"".join(parts))
        return None if len(parts) < len(found) else len(reader.getstate()[0])


@cache
def bytes_by_letter() -> Mapping[str, int]:
    """Returns the byte that each letter of a byte-level vocabulary stands for (the GPT-2 alphabet)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + at): byte for at, byte in enumerate(hidden)}


def bytes_of_token(tokenizer: Any, token: int) -> bytes | None:
    """Returns the bytes that a token is a name for, as byte-level and byte-fallback vocabularies have them."""
    name = tokenizer.id_to_token(token) if hasattr(tokenizer, "id_to_token") else None
    if name is None:
        return None
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes([int(found[1], 16)])
    letters = bytes_by_letter()
    return bytes(letters[letter] for letter in name) if all(letter in letters for letter in name) else name.encode()


def text_of_token(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of a token inside of a text, special ones too."""
    alone = tokenizer.decode([token], skip_special_tokens=False)
    twice = tokenizer.decode([token, token], skip_special_tokens=False)
    return twice[len(alone) :] if twice.startswith(alone) else alone


def text_of_tokens(tokenizer: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()) -> str:
    """Returns what tokens add to the text of a prompt, without special ones; see `TextStream`."""
    stream = TextStream(tokenizer, prompt=prompt)
    parts = [stream.push(tokens[at : at + WINDOW]) for at in range(0, len(tokens), WINDOW)]
    return "".join(parts) + stream.finish()


class StopStrings:
    """Finds the first of some non-empty stop strings in a text that arrives in parts, looking once at each letter."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)  # how much of each string the text ends with
        self._held = ""
        self.found: str | None = None  # the one that ended the text

    def push(self, part: str) -> str:
        """Returns the text that can be shown: no part of a stop string, and nothing that may become one."""
        if not self._stops:
            return part
        text = self._held + part
        ends = ((self._advance(index, part), stop) for index, stop in enumerate(self._stops))
        if found := [(len(self._held) + end - len(stop), stop) for end, stop in ends if end >= 0]:
            end, self.found = min(found)
            self._held = ""
            return text[:end]
        keep = max(self._lengths)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _advance(self, index: int, part: str) -> int:
        stop, borders, num = self._stops[index], self._borders[index], self._lengths[index]
        for at, letter in enumerate(part, 1):
            while num and stop[num] != letter:
                num = borders[num - 1]
            num += stop[num] == letter
            if num == len(stop):
                return at
        self._lengths[index] = num
        return -1

    def finish(self) -> str:
        """Returns the text that was held back, as it did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """Returns by prefix the length of the longest shorter prefix that it ends with (Knuth, Morris, Pratt 1977)."""
    borders, num = [0], 0
    for letter in stop[1:]:
        while num and stop[num] != letter:
            num = borders[num - 1]
        num += stop[num] == letter
        borders.append(num)
    return borders


class TextSink:
    """Text of one sequence: parts to show, and the end at a stop string.

    Args:
        hidden: where special tokens are shown, those that are not; None: no special token is shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        hidden: frozenset[int] | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._stream, self._stops = TextStream(tokenizer, hidden is None, prompt), StopStrings(stops)
        self._hidden = hidden or frozenset()
        self._one_by_one = bool(stops)
        self.text = ""

    @property
    def stop_string(self) -> str | None:
        return self._stops.found

    def push(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """Adds tokens; returns the text to show, how many tokens were used, and whether a stop string ends the text."""
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


class PromptBytes:
    """Most bytes of the text of a prompt. `tokenizer`: of the bundle; None: prompts are token ids."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    @cached_property
    def most(self) -> int | None:
        """Bytes of a text above which it has more than `max_tokens` tokens; None: its bytes say nothing."""
        longest = most_bytes_of_a_token(self._tokenizer)
        return None if longest is None else longest * self._max_tokens

    def check(self, where: str, text: str) -> None:
        """Refuses a text that cannot fit. Raises RuntimeFault: it is one."""
        size = len(text.encode(errors="surrogatepass"))
        if self.most is not None and size > self.most:
            todo = "Shorten it, or build the bundle with a larger engine.max_seq_len."
            expected = f"at most {self._max_tokens} tokens, which {self.most} bytes have at the most"
            raise RuntimeFault(where, f"a text of {size} bytes", expected, todo)


def most_bytes_of_a_token(tokenizer: Any) -> int | None:
    """Returns the most bytes of a text that one token stands for; None: the tokenizer may drop or merge bytes."""
    if type(getattr(tokenizer, "model", None)).__name__ != "BPE" or tokenizer.pre_tokenizer is None:
        return None
    steps = list(_steps(json.loads(tokenizer.pre_tokenizer.__getstate__())))
    is_bytes = any(step.get("type") == "ByteLevel" for step in steps)
    drops = tokenizer.normalizer is not None or any(step.get("behavior") == "Removed" for step in steps)
    added = tokenizer.get_added_tokens_decoder().values()
    if not is_bytes or drops or any(token.lstrip or token.rstrip for token in added):
        return None
    # A letter of the vocabulary is a byte.
    return max((*map(len, tokenizer.get_vocab(False)), *(len(token.content.encode()) for token in added)))


def _steps(pre_tokenizer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield pre_tokenizer
    for step in pre_tokenizer.get("pretokenizers") or ():
        yield from _steps(step)
