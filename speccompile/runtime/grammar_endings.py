# SPDX-License-Identifier: Apache-2.0
"""Endings of texts of JSON, so that an answer is whole before its tokens are used up.

Near the end only tokens remain after which a known ending fits. It depends on the tokens so far and the number left, as
the mask must.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from speccompile.core.tree import Bools, Ints

_ALLOWED = 200  # in llguidance's biases
_WIDTH, _CHILDREN = 6, 8  # texts of one length, and tokens after each, of a search
MAX_ENDING, MAX_TEXTS = 4096, 3000  # tokens; texts that a search looks at
_OPEN_COST = 8  # texts for which one counts that is free and may not end yet: llguidance takes longer for it
# A mark is not tried again where more than two others had its outcome, or it was tried so often.
_MAX_ALIKE, _MAX_OUTCOMES = 2, 8
_MAX_TRIED, _NUM_MANY = 256, 64  # tokens that are tried one by one; a quarter of what is free text
_CLOSING = frozenset(b'"[]{},:0')
_QUOTE = ord('"')
# First bytes by how soon they end a text; other digits are one group.
_ORDER = {bytes([byte]): at for at, byte in enumerate(b'"]}0,:')} | {bytes([byte]): 400 for byte in b"123456789"}
_ORDER |= {b"[": 500, b"{": 501}
_CONTINUATIONS = (b"\x80", b"\xa0", b"\x80\x80", b"\xa0\x80", b"\x90\x80\x80", b"\x80\x80\x80")


class TokenKinds:
    """What a search and a check want to know of a vocabulary."""

    def __init__(self, vocabulary: Any, vocab_size: int) -> None:
        num = min(vocab_size, vocabulary.vocab_size)
        self.texts: list[bytes] = [
            b"" if vocabulary.is_special_token(token) else vocabulary.decode_bytes([token]) for token in range(num)
        ]
        self.eos: int = vocabulary.eos_token  # one of them
        closing = [token for token, text in enumerate(self.texts) if text and _CLOSING.issuperset(text)]
        self.closing = sorted((token for token in closing if len(self.texts[token]) <= 4), key=self._rank)
        self.quotes = [token for token in self.closing if self.texts[token][0] == _QUOTE]
        self.sizes = np.array([len(text) for text in self.texts], dtype=np.int64)
        # Tokens after which a text of JSON goes on as before.
        self.plain = np.zeros(vocab_size, dtype=np.bool_)
        self.plain[[token for token, text in enumerate(self.texts) if _is_plain(text)]] = True
        self.continuations = [
            [self.texts.index(bytes([byte])) for byte in text]
            for text in _CONTINUATIONS
            if all(bytes([byte]) in self.texts for byte in text)
        ]

    def _rank(self, token: int) -> tuple[int, int]:
        text = self.texts[token]
        return sum(text.count(char) for char in b"[{,"), -len(text)

    def by_size(self, tokens: Ints) -> Ints:
        found: Ints = tokens[np.argsort(self.sizes[tokens], kind="stable")]
        return found

    def is_open(self, allowed: bytes) -> bool:
        return allowed.count(_ALLOWED) > 4 * _NUM_MANY and not any(allowed[token] == _ALLOWED for token in self.quotes)

    def children(self, allowed: bytes, ordinary: Collection[int] = ()) -> list[int]:
        """Returns some tokens, but no `ordinary` marks, that bring a text to its end, or each alternative further."""
        found = np.flatnonzero(np.frombuffer(allowed, dtype=np.uint8)[: len(self.texts)])
        groups: dict[int, list[int]] = {}
        marks: list[int] = []
        if is_free := len(found) > 4 * _NUM_MANY:  # of a free text, what ends it, or makes it longest
            tokens = [token for token in self.closing if allowed[token] == _ALLOWED]
            if self.is_open(allowed):
                plain = [token for token in found.tolist() if self.plain[token] and not self.texts[token].isspace()]
                tokens += sorted(plain, key=lambda token: -len(self.texts[token]))[:2]
                # A pattern may wait for a mark, as an address for the one in its middle.
                marks = [token for token in plain if len(self.texts[token]) == 1 and not self.texts[token].isalnum()]
                marks = [token for token in marks if token not in ordinary]
        else:
            tokens = found.tolist()
            tokens = [token for token in tokens if not self.texts[token].isspace()] or tokens
        for token in sorted(tokens, key=self._rank):
            first = self.texts[token][:1] or b"\0"
            groups.setdefault(_ORDER.get(first, 100 + first[0]), []).append(token)
        rounds = zip_longest(*(groups[order] for order in sorted(groups)))
        chosen = [token for each in rounds for token in each if token is not None]
        return marks + chosen[: _CHILDREN // 2 if is_free else _CHILDREN]


def _is_plain(text: bytes) -> bool:
    try:
        return bool(text) and all(char >= " " and char not in '"\\' for char in text.decode())
    except UnicodeDecodeError:
        return False


def find_ending(matcher: Any, kinds: TokenKinds, most: int, num_texts: int = MAX_TEXTS) -> tuple[int, ...] | None:
    """Returns the tokens of a short way to the end of a text, the end itself left out; None: none was found.

    Searches by length; of the texts of one length it keeps a few that allow different tokens.
    """
    waiting: dict[int, list[tuple[Any, list[int], bytes]]] = {0: [(matcher.deep_copy(), [], b"")]}
    # Tokens by what is allowed before and after them.
    outcomes: dict[tuple[bytes, bytes], list[int]] = {}
    ordinary: set[int] = set()
    while waiting and num_texts > 0:
        length = min(waiting)
        seen: set[bytes] = set()
        for state, path, before in waiting.pop(length):
            if state.is_accepting():
                return tuple(path)
            if len(seen) == _WIDTH or length >= most:
                continue
            forced, allowed = state.compute_ff_tokens(), b""
            if not forced:
                allowed = state.compute_logit_bias()
                num_texts -= _OPEN_COST if kinds.is_open(allowed) else 1
                same = outcomes.setdefault((before, allowed), [])
                same += path[-1:]
                if len(same) > _MAX_OUTCOMES or len(set(same)) > _MAX_ALIKE:
                    ordinary.update(same)
                if state.is_error() or allowed in seen:
                    continue
                seen.add(allowed)
            for tokens in [forced] if forced else ([token] for token in kinds.children(allowed, ordinary)):
                copy = state.deep_copy()
                if copy.try_consume_tokens(tokens) == len(tokens):
                    waiting.setdefault(length + len(tokens), []).append((copy, [*path, *tokens], allowed))
    return None


@dataclass(frozen=True)
class Ending:
    """What is known of the end of a text."""

    tokens: tuple[int, ...] | None  # that end it; None: not known
    next_check: int


class EndingRule:
    """Which tokens may follow so that a text can still end; lengths are of the sequence, prompt included.

    Args:
        growth: tokens by which one token may lengthen the shortest ending.
    """

    def __init__(self, kinds: TokenKinds, growth: int, num_tokens: int) -> None:
        self._kinds, self._growth, self.num_tokens = kinds, growth, num_tokens

    def known(self, tokens: tuple[int, ...], length: int) -> Ending:
        if len(tokens) > self.num_tokens - length:
            return Ending(None, self.num_tokens + 1)
        spare = self.num_tokens - length - 1 - len(tokens) - self._growth
        return Ending(tokens, length + 1 + max(0, spare) // (self._growth + 1))

    def after(self, ending: Ending, token: int, length: int, matcher: Any) -> Ending:
        """Returns the ending after one more token."""
        before = ending.tokens
        if length < ending.next_check:
            return ending
        if before is not None and self._is_near(before, length - 1):
            if before[:1] == (token,):
                return self.known(before[1:], length)
            for tokens in (before[1:], before):
                if _can_follow(matcher, tokens):
                    return self.known(tokens, length)
        found = find_ending(matcher, self._kinds, self.num_tokens - length)
        return Ending(None, length + 1) if found is None else self.known(found, length)

    def _is_near(self, tokens: Sequence[int], length: int) -> bool:
        return self.num_tokens - length - 1 - len(tokens) < self._growth

    def restrict(self, mask: Bools, ending: Ending, length: int, matcher: Any) -> None:
        """Leaves in a mask [vocab] bool the tokens after which the ending fits, and the text's own end."""
        if ending.tokens is None or not self._is_near(ending.tokens, length):
            return
        kinds, room = self._kinds, self.num_tokens - length - 1
        ways = [[*more, *ending.tokens, kinds.eos] for more in ((), *kinds.continuations)]
        ways = [way for way in ways if len(way) - 1 <= room]

        def fits(token: int) -> bool:
            return any(
                matcher.validate_tokens([token, *way]) == 1 + len(way)
                for way in ways[: 1 if kinds.plain[token] else None]
            )

        wanted, first = mask.copy(), list(ending.tokens[:1])
        mask[:] = False
        mask[first] = wanted[first]
        plain, others = np.flatnonzero(wanted & kinds.plain), np.flatnonzero(wanted & ~kinds.plain)
        if 2 * len(plain) > np.count_nonzero(kinds.plain):  # inside a text, where all do the same
            by_size = kinds.by_size(plain)
            if all(fits(int(by_size[at])) for at in (0, len(by_size) // 2, -1)):
                mask[plain] = True
                plain = plain[:0]
        for group in (plain, others):
            for token in kinds.by_size(group)[:_MAX_TRIED].tolist():
                mask[token] |= fits(token)


def _can_follow(matcher: Any, tokens: Sequence[int]) -> bool:
    copy = matcher.deep_copy()
    for token in tokens:
        if copy.compute_logit_bias()[token] != _ALLOWED:
            return False
        copy.try_consume_tokens([token])
    return bool(copy.is_accepting())
