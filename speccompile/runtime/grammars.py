# SPDX-License-Identifier: Apache-2.0
"""Grammars over a vocabulary, by llguidance: which tokens may follow the text so far, and the drafts after it.

Nothing falls back to "no mask": what cannot be compiled is refused when the request is submitted, and a grammar that
fails later ends its sequence with an error.
"""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from speccompile.common.extras import install_command
from speccompile.core.sampling_params import WHERE, StructuredOutputs
from speccompile.core.tree import Bools
from speccompile.errors import RuntimeFault
from speccompile.runtime.constraint_checker import Checked, Compiled, ConstraintChecker, shutting_down
from speccompile.runtime.constraint_forms import refuse
from speccompile.runtime.constraint_limits import fault_of_matcher, make_matcher, make_vocabulary
from speccompile.runtime.grammar_endings import Ending, EndingRule, TokenKinds

GRAMMAR = "grammar"  # where a grammar fails
MAX_KEPT_BYTES = 64 << 20  # of compiled grammars
NUM_BUILDERS = 2
_MAX_MASK_S = 0.5  # other texts wait meanwhile
_TAIL = 8  # tokens at a prompt's end that may open or close its reasoning
_PACKAGE = "llguidance"


class GrammarFault(RuntimeFault):
    """A grammar that was accepted cannot say what may follow."""

    def __init__(self, got: str) -> None:
        super().__init__(GRAMMAR, got[:200], "tokens that may follow", "Simplify the schema or the grammar.")


class GrammarMatcher:
    """A grammar at the end of one sequence's text.

    Args:
        eos_token_ids: tokens that end the text; they are allowed where the grammar may end, and then alone.
        markers: tokens that begin and end a reasoning before the grammar; None: there is none.
        prompt: the sequence's; a reasoning may begin, or have ended, at its end.
        rule: so that the text ends in time; None: it may be cut off.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        markers: tuple[int, int] | None = None,
        prompt: Sequence[int] = (),
        rule: EndingRule | None = None,
        ending: Sequence[int] = (),
    ) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._eos = sorted(token for token in eos_token_ids if token < vocab_size)
        self._markers, self._num_read = markers, len(prompt)
        self._fault: GrammarFault | None = None  # why nothing is known of what may follow
        # Of the tokens that were read: masks by path, the tokens that must follow, and a copy for drafts.
        self._masks: dict[tuple[int, ...], Bools | None] = {}
        self._forced: list[int] | None = None
        self._copy: Any = None
        self._rule, self._endings = rule, dict[tuple[int, ...], Ending]()
        self._ending = None if rule is None else rule.known(tuple(ending), len(prompt))
        # Whether the reasoning goes on; None: the next token decides whether there is one.
        self._is_thinking: bool | None = False
        self._has_ended = False
        if markers is not None:
            tail = list(prompt[-_TAIL:])
            last = max((at for at, token in enumerate(tail) if token in markers), default=None)
            self._is_thinking = None if last is None else tail[last] == markers[0]

    def read(self, tokens: Sequence[int]) -> None:
        """Follows the text; `tokens` are all of the sequence, prompt included. Raises GrammarFault: one is excluded."""
        if len(tokens) == self._num_read:
            return
        self._masks, self._forced, self._copy = {}, None, None
        inside, self._is_thinking, is_right = self._inside(tokens[self._num_read :])
        self._num_read = len(tokens)
        text, self._has_ended, ends = self._split(inside)
        self._endings = {}  # of paths after the text before
        num, self._ending = self._consume(text, len(tokens) - len(inside), self._matcher)
        self._endings = {}
        if not (is_right and ends) or num < len(text):
            self._fault = GrammarFault(f"a text that it does not allow, {len(tokens)} tokens long")
            raise self._fault

    def _consume(self, text: list[int], length: int, matcher: Any) -> tuple[int, Ending | None]:
        rule, ending = self._rule, self._ending
        if rule is None or ending is None:
            return (matcher.try_consume_tokens(text) if text else 0), None
        for at, token in enumerate(text):
            if not matcher.try_consume_tokens([token]):
                return at, ending
            key = tuple(text[: at + 1])
            if key not in self._endings:
                self._endings[key] = rule.after(ending, token, length + at + 1, matcher)
            ending = self._endings[key]
        return len(text), ending

    def _inside(self, tokens: Sequence[int]) -> tuple[list[int], bool | None, bool]:
        is_thinking, inside = self._is_thinking, list[int]()
        for token in tokens:
            if is_thinking is None and self._markers is not None and token == self._markers[0]:
                is_thinking = True
            elif is_thinking:
                if token in self._eos:
                    return inside, True, False
                is_thinking = self._markers is not None and token != self._markers[1]
            else:
                is_thinking = False
                inside.append(token)
        return inside, is_thinking, True

    def _split(self, inside: list[int]) -> tuple[list[int], bool, bool]:
        end = next((at for at, token in enumerate(inside) if token in self._eos), len(inside))
        text, rest = inside[:end], inside[end:]
        is_right = all(token in self._eos for token in rest) and not (self._has_ended and text)
        return text, self._has_ended or bool(rest), is_right

    def allowed(self, path: Sequence[int]) -> Bools | None:
        """Returns [vocab] bool, the tokens that may follow; None: the path itself is not allowed.

        Args:
            path: tokens after those that were read; the state stays as it was.

        Raises:
            GrammarFault: no token may follow, or the grammar is too complex.
        """
        if self._fault is not None:
            raise self._fault
        return self._mask_of_drafts(path) if path else self._mask(path, self._matcher)

    def draft_mask(self, path: Sequence[int]) -> Bools | None:
        """As `allowed`; None also where the grammar fails. It fails for drafts alone, not for the text."""
        if self._fault is None:
            with suppress(GrammarFault):
                return self._mask_of_drafts(path)
        return None

    def _mask_of_drafts(self, path: Sequence[int]) -> Bools | None:
        if self._copy is None:  # errors of llguidance stay
            self._copy = self._matcher.deep_copy()
        try:
            return self._mask(path, self._copy)
        except GrammarFault:
            self._copy = None
            raise

    def _mask(self, path: Sequence[int], matcher: Any) -> Bools | None:
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask_by(path, matcher)
        return self._masks[key]

    def _mask_by(self, path: Sequence[int], matcher: Any) -> Bools | None:
        length = self._num_read + len(path)
        inside, is_thinking, is_right = self._inside(path)
        text, has_ended, ends = self._split(inside)
        if not (is_right and ends):
            return None
        if is_thinking:
            mask = np.ones(self._vocab_size, dtype=np.bool_)
            mask[self._eos] = False
            if not self._may_think(length):
                mask[:] = False
                mask[self._markers[1] if self._markers else []] = True
            return mask
        num, ending = self._consume(text, length - len(inside), matcher)
        try:
            if num < len(text):
                return None
            if has_ended:
                if not matcher.is_accepting():
                    return None
                mask = np.zeros(self._vocab_size, dtype=np.bool_)
                mask[self._eos] = True
            else:
                start_s = time.thread_time()
                bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
                if (took_s := time.thread_time() - start_s) > _MAX_MASK_S:
                    raise GrammarFault(f"a token that takes {took_s:.1f} s to choose")
                mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
            if matcher.is_error():
                raise GrammarFault(fault_of_matcher(matcher))
            if self._rule is not None and ending is not None and not has_ended:
                ends_here = mask[self._eos]
                self._rule.restrict(mask, ending, length, matcher)
                mask[self._eos] = ends_here
        finally:
            if num:
                matcher.rollback(num)
        if is_thinking is None and self._markers is not None and self._may_think(length):
            mask[self._markers[0]] = True
        if not mask.any():
            raise GrammarFault("no token of the vocabulary that continues the text")
        return mask

    def _may_think(self, length: int) -> bool:
        rule, ending = self._rule, self._ending
        if rule is None or ending is None or ending.tokens is None:
            return True
        left = rule.num_tokens - length - 1 - len(ending.tokens)
        return left >= 1 or left < -1  # there is none in any case

    def forced(self) -> list[int]:
        """Returns the tokens that must follow, each the only one of its mask.

        Where the grammar allows one text, llguidance allows the one way in which the tokenizer writes it.
        """
        if self._is_thinking is not False or self._has_ended or self._fault is not None:
            return []
        if self._forced is None:
            tokens = self._matcher.compute_ff_tokens()
            self._forced = list(takewhile(lambda token: token < self._vocab_size, tokens))
        return self._forced


class Grammars:
    """Compiles the grammars of requests; those in use are kept. May be used on any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos_token_ids)
        self._vocabulary: Any = None  # llguidance's, made at the first use
        self._kinds: TokenKinds
        self._kept: OrderedDict[StructuredOutputs, Compiled] = OrderedDict()
        # By identity, for as long as a request has it: what was prepared and is not used yet, so that it is kept.
        self._coming = WeakValueDictionary[int, StructuredOutputs]()
        self._lock = threading.Lock()
        self._loading, self._num_closed = threading.Lock(), 0
        # Its threads know the tokenizer alone: an engine that nobody closes is collected, and the process ends.
        self._source = partial(_source, tokenizer, vocab_size, self._eos)
        self._checker = ConstraintChecker(self._source)
        weakref.finalize(self, self._checker.close)
        self._builders = ThreadPoolExecutor(NUM_BUILDERS, "speccompile-grammars")  # starts threads when they are needed

    def matcher(
        self, wanted: StructuredOutputs, prompt: Sequence[int], num_tokens: int | None = None
    ) -> GrammarMatcher:
        """Returns a matcher at the start of a text. Raises RuntimeFault: see `compile`.

        Args:
            num_tokens: most tokens of prompt and text, in which a text of JSON comes to its end; None: without limit.
        """
        compiled = self.compile(wanted)
        with self._lock:
            self._coming.pop(id(wanted), None)
        markers = None if wanted.reasoning is None else self._markers(wanted.reasoning)
        ending, rule = compiled.checked.ending, None
        if num_tokens is not None and ending is not None:
            has_room = len(prompt) + len(ending) < num_tokens  # for the token that ends it, or it seems cut off
            rule = EndingRule(self._kinds, compiled.checked.growth, num_tokens - has_room)
        matcher = compiled.matcher.deep_copy()
        return GrammarMatcher(matcher, self._vocab_size, self._eos, markers, prompt, rule, ending or ())

    def compile(self, wanted: StructuredOutputs) -> Compiled:
        """Returns a grammar at the start of a text.

        Raises:
            RuntimeFault: the grammar is wrong or beyond llguidance, or the bundle lacks what it needs, or the package.
            Busy: too many wait.
        """
        found = self._find(wanted)
        if found is None:
            self._load_vocabulary()
            found = self._build(wanted, self._checker.submit(wanted).result())
        return found

    async def prepare(self, wanted: StructuredOutputs) -> None:
        """Compiles a grammar for its next `matcher` while the event loop goes on; cancelling ends the work."""
        with self._lock:
            self._coming[id(wanted)] = wanted
        if self._find(wanted) is None:
            loop, num_closed = asyncio.get_running_loop(), self._num_closed
            await loop.run_in_executor(self._builders, self._load_vocabulary)
            if num_closed != self._num_closed:
                raise shutting_down()
            checked = await asyncio.wrap_future(self._checker.submit(wanted))
            await loop.run_in_executor(self._builders, self._build, wanted, checked)
        if wanted.reasoning is not None:
            self._markers(wanted.reasoning)

    @property
    def num_kept_bytes(self) -> int:
        """Estimated bytes of the grammars that are kept."""
        return sum(compiled.num_bytes for compiled in self._kept.values())

    def close(self) -> None:
        """Ends the process that tries grammars; what waits for it in `prepare` gets a `Busy`."""
        self._num_closed += 1
        self._checker.close()

    def _find(self, wanted: StructuredOutputs) -> Compiled | None:
        with self._lock:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
            return self._kept.get(wanted)

    def _build(self, wanted: StructuredOutputs, checked: Checked) -> Compiled:
        matcher = make_matcher(self._vocabulary, checked.grammar)
        if reason := fault_of_matcher(matcher):
            refuse(wanted, reason)
        compiled = Compiled(matcher, checked)
        with self._lock:
            self._kept[replace(wanted)] = compiled  # a copy: a key lives longer than its request
            in_use = {wanted, *self._coming.values()}
            for old in [old for old in self._kept if old not in in_use]:
                if self.num_kept_bytes <= MAX_KEPT_BYTES:
                    break
                del self._kept[old]
        return compiled

    def _load_vocabulary(self) -> None:
        with self._loading:
            if self._vocabulary is None:
                self._check_parts()
                try:
                    vocabulary = make_vocabulary(self._source())
                except ValueError as fault:
                    todo = (
                        "Give the checkpoint a tokenizer.json with a byte-level or byte-fallback decoder; build again."
                    )
                    got = f"a tokenizer without bytes: {str(fault).strip().partition(chr(10))[0][:200]}"
                    raise RuntimeFault(WHERE, got, "one that llguidance reads", todo) from fault
                self._kinds, self._vocabulary = TokenKinds(vocabulary, self._vocab_size), vocabulary

    def _check_parts(self) -> None:
        if importlib.util.find_spec(_PACKAGE) is None:
            todo = f"Install it: {install_command('structured')}."
            raise RuntimeFault(WHERE, f"no package {_PACKAGE}", "the package of the extra [structured]", todo)
        if self._tokenizer is None:
            todo = "Build it from a checkpoint that has a tokenizer.json."
            raise RuntimeFault(WHERE, "a bundle without a tokenizer", "the texts of tokens", todo)
        if not self._eos:
            todo = "Name one in the checkpoint's generation_config.json (eos_token_id), and build the bundle again."
            raise RuntimeFault(WHERE, "a bundle without an end-of-sequence token", "one, to end the text with", todo)

    def _markers(self, texts: tuple[str, str]) -> tuple[int, int]:
        found = tuple(self._tokenizer.token_to_id(text) for text in texts)
        if None in found:
            todo = "Choose the reasoning parser of this model, or none."
            raise RuntimeFault(WHERE, f"no token {' or '.join(texts)}", "markers of one token each", todo)
        return found[0], found[1]


def _source(tokenizer: Any, vocab_size: int, ends: list[int]) -> Mapping[str, Any]:
    if hasattr(tokenizer, "to_str"):
        num = max(vocab_size, tokenizer.get_vocab_size())
        return {"tokenizer": tokenizer.to_str(), "num": num, "eos": ends}
    return {"tokens": [list(token) for token in tokenizer.tokens], "num": None, "eos": ends}
