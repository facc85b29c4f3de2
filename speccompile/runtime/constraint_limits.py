# SPDX-License-Identifier: Apache-2.0
"""Bounds of constraints: while they are tried in a process of their own, and while a text follows them."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

MAX_CPU_S, MAX_WALL_S = 2, 20  # of trying one; seconds
MAX_BYTES = 512 << 20  # that trying one may take
MAX_STACK_BYTES = 1 << 20  # an eighth of what threads have where the constraint is used
MAX_JOBS = 8  # at a time; processes of their own, so that small ones pass large ones
MAX_QUEUE_S, MAX_TURN_S = 10, 3  # that one may wait; that one may take while others wait
MAX_STEP_S = 0.1  # of a mask; it is computed where all texts are decoded
_MAX_STATES = 50_000  # of a lexer, about 1.5 KiB each
_NUM_WALKS, _NUM_STEPS, _WALK_S = 4, 400, 0.25  # seconds of one
_GROWTH = 4
_ALLOWED = b"\xc8"  # in llguidance's biases
EMPTY = "an empty language: no text is of it"


def make_vocabulary(source: Mapping[str, Any]) -> Any:
    """Returns `llguidance.LLTokenizer` after its first mask, which takes long.

    Args:
        source: `tokenizer`, the text of a tokenizer.json, or `tokens`, lists of bytes; `num` tokens; `eos`, ids.
    """
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    tokenizer = source.get("tokenizer") or TokenizerWrapper(_Tokens(source["tokens"], source["eos"]))
    vocabulary = LLTokenizer(tokenizer, n_vocab=source["num"], eos_token=source["eos"])
    LLMatcher(vocabulary, LLMatcher.grammar_from_regex("a"), log_level=0).compute_bitmask()
    return vocabulary


class _Tokens:
    """A tokenizer by the bytes of its tokens, the longest first."""

    def __init__(self, tokens: list[list[int]], eos: list[int]) -> None:
        self.tokens = [bytes(token) for token in tokens]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = eos[0], None, eos
        self._ids = {token: at for at, token in enumerate(self.tokens) if at not in eos and token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        left, ids = text.encode() if isinstance(text, str) else bytes(text), []
        while left:
            size = next((n for n in range(self._longest, 0, -1) if left[:n] in self._ids), 0)
            ids += [self._ids[left[:size]]] if size else []
            left = left[size or 1 :]
        return ids


def make_matcher(vocabulary: Any, grammar: str) -> Any:
    """Returns `llguidance.LLMatcher` at the start of a text; it may be in error."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=_MAX_STATES, verbose_errors=False)
    return LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def fault_of_matcher(matcher: Any) -> str:
    """Returns why a matcher is in error, in one line; empty: it is not."""
    if not matcher.is_error():
        return ""
    text = str(matcher.get_error()).partition("<backtrace>")[0].replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        return EMPTY
    first, *others = text.replace("panic: assertion failed:", "a bound of llguidance does not hold:").split("\n")
    return " ".join([first, *(line for line in others if line.startswith("error: "))])


def try_matcher(matcher: Any, ends: frozenset[int]) -> str:
    """Returns why no text can follow a matcher, or why it takes too long, along seeded random texts; or ""."""
    drawn = random.Random(0)
    for _ in range(_NUM_WALKS):
        copy, spent_s = matcher.deep_copy(), list[float]()
        while len(spent_s) < _NUM_STEPS and sum(spent_s) < _WALK_S:
            before_s = time.process_time()
            allowed: bytes = copy.compute_logit_bias()
            copy.compute_ff_tokens()
            spent_s.append(time.process_time() - before_s)
            if fault := fault_of_matcher(copy):
                return fault
            if spent_s[-1] > MAX_STEP_S:
                return f"a token that takes {spent_s[-1]:.1f} s"
            token = _draw(allowed, drawn, ends)
            if token < 0 and not allowed.count(_ALLOWED):
                return EMPTY
            if token < 0:
                break
            copy.consume_token(token)
        if _grows(spent_s):
            return f"an ambiguous grammar: each token takes longer than the one before, {len(spent_s)} take {_WALK_S} s"
    return ""


def _grows(spent_s: Sequence[float]) -> bool:
    num = len(spent_s) // 4
    return num > 1 and sum(spent_s) >= _WALK_S and median(spent_s[-num:]) > _GROWTH * median(spent_s[:num])


def _draw(allowed: bytes, drawn: random.Random, ends: frozenset[int]) -> int:
    start = drawn.randrange(len(allowed))
    for token in (allowed.find(_ALLOWED, start), allowed.find(_ALLOWED)):
        while token in ends:
            token = allowed.find(_ALLOWED, token + 1)
        if token >= 0:
            return token
    return -1
