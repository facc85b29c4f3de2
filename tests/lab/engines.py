# SPDX-License-Identifier: Apache-2.0
"""Offline engines over language models in numpy: plain decoding, lookups, a draft model or both of them."""

from typing import Any

from speccompile.core import registry
from speccompile.core.jobs import MethodContext
from speccompile.runtime.spec_engine import SpecEngine
from tests.mock_lm import MockEngine, MockLM

ALPHABET = "abcdefghijklmnopqrstuvwx"
SUFFIX = {"method": "suffix", "depth": 5}
DEFAULTS = {"ngram": {"min_match": 1, "max_match": 3}, "suffix": {"depth": 5}, "draft_model": {"model": "draft"}}


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return type("Encoding", (), {"ids": [ALPHABET.index(c) for c in text]})()

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(ALPHABET[i] for i in ids)


LETTERS = Letters()


def mock_proposer(name: str, draft: Any, context: MethodContext, **config: Any) -> Any:
    """Returns the proposer of a method; `draft` is the engine of those that draft with a model."""
    if name == "hybrid":
        config = {"drafters": (SUFFIX, {"method": "draft_model", "model": "draft", **config})}
    method = registry.method(name)
    made = method.Config(**{**DEFAULTS.get(name, {}), **config})
    return method.make_proposer(made, {"draft": draft} if method.graph_jobs(made) else {}, context)


def mock_engine(
    target: Any,
    draft: MockLM,
    name: str = "none",
    *,
    slots: int = 3,
    max_seq: int = 64,
    nodes: int = 8,
    headroom: int = 9,
    tokenizer: Any = LETTERS,
    eos: Any = (),
    chunk: int = 7,
    candidates: int = 4,
    rates: Any = (),
    **config: Any,
) -> SpecEngine:
    """Returns an engine of a method; `target` is a model or its engine."""
    context = MethodContext(slots, max_seq, nodes)
    if isinstance(target, MockLM):
        target = MockEngine(target, "target", slots, max_seq, headroom)
    drafts = MockEngine(draft, "draft", slots, max_seq, headroom, candidates)
    proposer = mock_proposer(name, drafts, context, **config)
    engines = {"draft": drafts} if name in ("draft_model", "hybrid") else {}
    return SpecEngine(target, engines, proposer, tokenizer, context, eos, chunk=chunk, rates=rates)
