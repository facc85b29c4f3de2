# SPDX-License-Identifier: Apache-2.0
"""Mutated bodies and paths through the application: an answer, or an error in OpenAI's shape; never a 5xx."""

import asyncio
import copy
import json
import random
from typing import Any

from tests.fuzz.mutate import cases, damage, describe, fuzz, mutate, odd_value, text_of
from tests.serving.asgi_lab import Reply, ask, get, post
from tests.serving.mock_service import serving
from tests.serving.mock_service import text_of as greedy_text

SAMPLING = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 7, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.1, "stop": ["xw"], "logit_bias": {"3": 1.5}, "stream": False,
    "ignore_eos": True, "user": "u",
}  # fmt: skip
COMPLETION = {"model": "mock", "prompt": "abc", "max_tokens": 4, "n": 2, "logprobs": None, "echo": False}
CHAT = {
    "model": "mock", "max_completion_tokens": 4, "n": 1,
    "messages": [{"role": "system", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}],
}  # fmt: skip
LEGAL: dict[str, tuple[Any, ...]] = {  # all that the API allows, up to the edges
    "temperature": (0, 1e-45, 1e-30, 0.5, 1, 2), "top_p": (1e-9, 0.1, 0.5, 1), "top_k": (0, 1, 5, 24, 1000, 2**31 - 1),
    "min_p": (0, 1e-9, 0.5, 1), "seed": (0, 1, 2**32, 2**63 - 1), "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0, 2), "repetition_penalty": (1e-3, 1, 100), "stop": ("x", ["xw", "a"], None),
    "logit_bias": ({}, {"0": -100}, {"3": 100, "5": -1}), "stream": (True, False), "n": (1, 2, 3),
    "ignore_eos": (True, False), "user": ("", "u" * 64),
}  # fmt: skip
LEGAL_COMPLETION = {
    **LEGAL, "prompt": ("a", "abc" * 6, [1, 2, 3], ["ab", "c"], [[1], [2, 3]]), "max_tokens": (1, 2, 9, 40),
}  # fmt: skip
LEGAL_CHAT = {**LEGAL, "max_completion_tokens": (1, 2, 9, 40)}
PATHS = ("/v1/completions", "/v1/chat/completions")


def make_case(rng: random.Random) -> tuple[str, str, bytes]:
    """Returns (method, path, body); most bodies have few keys, so that most of them get past the first check."""
    path = rng.choice((PATHS[0], PATHS[0], PATHS[0], PATHS[1]))
    body: dict[str, Any] = copy.deepcopy(COMPLETION if path == PATHS[0] else CHAT)
    for key in rng.sample(sorted(SAMPLING), rng.choice((0, 1, 2, 3))):
        body[key] = copy.deepcopy(SAMPLING[key])
    kind = rng.random()
    if kind < 0.1:
        return "POST", path, damage(rng, json.dumps(body).encode())
    if kind < 0.15:
        method = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"))
        odd = rng.choice(
            (*PATHS, "/v1/models", "/v1/models/x/y", "/v1/models/%00", "/metrics", "/health", "/", "//", "/x")
        )
        return method, odd, json.dumps(body).encode()
    if kind < 0.5:  # only legal values, in unusual combinations
        legal = LEGAL_COMPLETION if path == PATHS[0] else LEGAL_CHAT
        for key in rng.sample(sorted(legal), rng.randint(1, 6)):
            body[key] = rng.choice(legal[key])
        return "POST", path, text_of(body).encode()
    if kind < 0.75:  # one sampling field at a time: an extreme value after valid others
        key = rng.choice(sorted({*SAMPLING, "max_tokens", "n", "prompt", "messages"}))
        body[key] = odd_value(rng) if rng.random() < 0.5 else mutate(rng, {"x": {**body, **SAMPLING}.get(key)}).get("x")
        return "POST", path, text_of(body).encode()
    return "POST", path, text_of(mutate(rng, body)).encode()


def check_reply(method: str, reply: Reply) -> str:
    """Returns how a request ended; a fault is an assertion."""
    assert 200 <= reply.status < 500, (reply.status, reply.body[:500])
    if reply.status < 400:
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            events = reply.events()
            assert events[-1] == "[DONE]" and not any("error" in e for e in events[:-1]), events
        return "ok"
    if method != "HEAD":
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
        assert len(reply.body) < 20_000
    return str(reply.status)


def test_mutated_requests_are_answered_or_refused_and_harm_no_later_one():
    with serving() as (app, _, _):

        def attempt(case: tuple[str, str, bytes]) -> str:
            method, path, body = case
            return check_reply(method, asyncio.run(ask(app, method, path, body)))

        counts = fuzz("http", make_case, attempt)
        clean = post(app, "/v1/completions", {"model": "mock", "prompt": "abc", "max_tokens": 6})
        assert clean.json()["choices"][0]["text"] == greedy_text("abc", 6), describe("http", cases()[-1], None, "harm")
        assert get(app, "/health").status == 200
    assert set(counts) <= {"ok", "400", "401", "404", "405", "408", "413", "415", "422"}
