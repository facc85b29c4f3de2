# SPDX-License-Identifier: Apache-2.0
"""A real service over the language model in numpy: one letter a token, with engine steps that the test holds up."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from speccompile.runtime.service import Service, ServiceOptions
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.serving.openai.app import make_app
from speccompile.serving.openai.server import OpenAIServer, ServerOptions
from speccompile.serving.page.routes import page_routes
from tests.lab.engines import ALPHABET, Letters, mock_engine
from tests.mock_lm import MockEngine, MockLM

TARGET = MockLM(seed=21)


class LettersAfterA(Letters):
    """A tokenizer of one letter a token; `a` goes in front where special tokens are wanted."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        ids = [ALPHABET.index(c) for c in text if c in ALPHABET]
        return SimpleNamespace(ids=[0, *ids] if add_special_tokens else ids)


class GatedEngine(MockEngine):
    """A target whose steps wait for `gate`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate = threading.Event()
        self.gate.set()
        self.fault: BaseException | None = None

    def run(self, feeds, first_slot=0):
        assert self.gate.wait(20)
        if self.fault is not None:
            raise self.fault
        return super().run(feeds, first_slot)


def make_engine(slots: int = 3, max_seq: int = 64, eos=(), tokenizer=None) -> tuple[SpecEngine, GatedEngine]:
    gated = GatedEngine(TARGET, "target", slots, max_seq, headroom=9)
    sizes = {"slots": slots, "max_seq": max_seq, "eos": eos, "tokenizer": tokenizer or LettersAfterA()}
    engine = mock_engine(gated, TARGET.blurred(22, 0.7), "draft_model", num_draft_tokens=4, **sizes)
    for one in engine.engines:  # prompts that begin alike share caches: these are copied
        one.voids_moved = False
    return engine, gated


def text_of(prompt: str, num: int) -> str:
    """Returns the text that greedy decoding must give."""
    letters = LettersAfterA()
    return letters.decode(TARGET.greedy(letters.encode(prompt).ids, num))


@contextmanager
def serving(options: ServerOptions | None = None, service_options: ServiceOptions | None = None, **engine_options):
    """Yields (application, service, gated engine) of a started service."""
    engine, gated = make_engine(**engine_options)
    service = Service(engine, service_options)
    server = OpenAIServer(service, options or ServerOptions(model_name="mock"))
    service.start()
    try:
        yield make_app(server, [page_routes]), service, gated
    finally:
        gated.gate.set()
        service.close()
