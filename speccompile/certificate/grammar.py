# SPDX-License-Identifier: Apache-2.0
"""Sampled text under a tiny grammar against the target's distribution within it.

The grammar says which tokens of letters or digits come next, computed from their texts, without llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import cycle, islice
from typing import Any

import numpy as np

from speccompile.certificate.chi_square import ALPHA, POWER
from speccompile.certificate.decoding import Prompts, decode_with, drafts_nothing, gives_logits
from speccompile.certificate.results import Check, check_of, not_run
from speccompile.certificate.sampled import (
    NUM_SAMPLES,
    NUM_TOKENS,
    PLAIN,
    TEMPERATURE,
    Tell,
    Text,
    are_right,
    choose_prompt,
    counts_of_runs,
    fit_runs,
    make_runs,
    text_from_fits,
)
from speccompile.core.sampling import warp
from speccompile.core.sampling_params import SamplingParams, StructuredOutputs
from speccompile.core.tree import Bools, Floats
from speccompile.errors import RuntimeFault
from speccompile.runtime.spec_engine import SpecEngine

GRAMMAR = "grammar"
KINDS = ("[a-z]", "[0-9]", "[0-9]", "[A-Z]")  # of one character after another, again and again
REGEX = f"({''.join(KINDS)})*"
TOP_K, TOP_P = 3, 0.95
FREQUENCY_PENALTY = -1.0  # the second digit is likelier to be the first one again
PROMPT_TOKENS, NUM_TRIED = 1, 8  # of the prompt; texts that show whether the method drafts after it
LEAST_CHOICE = 2  # tokens of each kind that a vocabulary needs to have
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def plain_tokens(tokenizer: Any, vocab_size: int) -> dict[int, str]:
    """Returns the target's tokens of ASCII letters and digits, and their texts, byte-level ones included."""
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    has_bytes = "ByteFallback" in repr(tokenizer.decoder)
    found = {}
    for token, index in tokenizer.get_vocab().items():
        byte = _BYTE.fullmatch(token) if has_bytes else None
        text = token if byte is None else chr(int(byte[1], 16))
        if text.isascii() and text.isalnum() and index < vocab_size and index not in special:
            found[index] = text
    return found


class Allowed:
    """Which tokens may follow a text of the grammar; after one of `eos_token_ids` only they may."""

    def __init__(self, tokens: Mapping[int, str], eos_token_ids: Iterable[int], vocab_size: int) -> None:
        self.tokens, self.eos = tokens, sorted(token for token in eos_token_ids if token < vocab_size)
        self.ended = np.zeros(vocab_size, np.bool_)
        self.ended[self.eos] = True
        self.masks = [self._mask(at) for at in range(len(KINDS))]

    def _mask(self, at: int) -> Bools:
        mask = self.ended.copy() if at == 0 else np.zeros_like(self.ended)
        for token, text in self.tokens.items():
            kinds = islice(cycle(KINDS), at, None)
            mask[token] |= all(re.match(kind, char) for char, kind in zip(text, kinds, strict=False))
        return mask

    def after(self, text: Text) -> Bools:
        """Returns [vocab] bool, the tokens that may follow."""
        if any(token in self.eos for token in text):
            return self.ended
        return self.masks[sum(len(self.tokens[token]) for token in text) % len(KINDS)]

    def probs(self, text: Text, logits: Floats) -> Floats:
        """Returns the distribution of the next token, [vocab] float32: mask, penalty, temperature, top-k, top-p.

        Args:
            text: the tokens so far, prompt left out.
            logits: [vocab] float32, the target's own after them.
        """
        counts = np.bincount(np.array(text, np.int64), minlength=len(logits)).astype(np.float32)
        masked = np.where(self.after(text), logits - np.float32(FREQUENCY_PENALTY) * counts, np.float32(-np.inf))
        probs: Floats = warp(masked[None], [TEMPERATURE], [TOP_K], [TOP_P])[0]
        return probs


def check_grammar(
    engine: SpecEngine, prompts: Prompts, num_samples: int = NUM_SAMPLES, tell: Tell = lambda done, total: None
) -> Check:
    """Draws texts of the grammar with many seeds, plain and with drafts, and tests their first tokens by chi-square."""
    if not gives_logits(engine):
        return not_run(GRAMMAR, "the target keeps its logits to itself (engine.logits: false)")
    wanted = StructuredOutputs(regex=REGEX)
    try:
        engine.grammars.compile(wanted)
    except RuntimeFault as fault:
        return not_run(GRAMMAR, f"{fault.got}; expected {fault.expected}")
    size = engine.verifier.engine.spec.vocab_size
    allowed = Allowed(plain_tokens(engine.tokenizer, size), engine.eos_token_ids, size)
    if min(np.count_nonzero(mask & ~allowed.ended) for mask in allowed.masks) < LEAST_CHOICE:
        return not_run(GRAMMAR, "the tokenizer has no tokens of letters and digits alone")
    asked = [  # a text ends with the last token that is tested, so that it may be the one after a whole path of drafts
        SamplingParams(
            NUM_TOKENS,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            top_p=TOP_P,
            frequency_penalty=FREQUENCY_PENALTY,
            seed=seed,
            ignore_eos=True,
            structured_outputs=wanted,
        )
        for seed in range(num_samples)
    ]
    may_draft = engine.verifier.may_draft(GRAMMAR, asked[0])
    prompt, rows = choose_prompt(engine, prompts, PROMPT_TOKENS, allowed.probs)
    if may_draft and not drafts_nothing(engine):
        tried = decode_with(engine, engine.proposer, [prompt] * len(asked[:NUM_TRIED]), asked[:NUM_TRIED])
        if tried.num_drafts < NUM_TRIED:  # nothing in one token makes a drafter expect such a text
            prompt, rows = choose_prompt(engine, prompts, PROMPT_TOKENS, allowed.probs, repeats=True)
    runs = make_runs(engine, rows, NUM_TOKENS - 1)
    if not may_draft:  # the target compacts its caches in the step, by verdicts without the grammar
        runs = {PLAIN: runs[PLAIN]}
    fits, found = fit_runs(engine, prompt, rows, runs, asked, tell)
    facts = {
        "prompt": prompt,
        "regex": REGEX,
        "num_tokens": NUM_TOKENS,
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "top_p": TOP_P,
        "penalty": FREQUENCY_PENALTY,
        "may_draft": may_draft,
        "alpha": ALPHA,
        "power": POWER,
        "runs": found,
    }
    summary = text_from_fits(num_samples, fits, "the target's distribution within the grammar")
    if not may_draft:
        summary = f"{summary}; no drafts with grammars"
    return check_of(GRAMMAR, are_right(fits), summary, facts, counts_of_runs(found))
