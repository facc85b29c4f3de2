# SPDX-License-Identifier: Apache-2.0
"""Logprobs in OpenAI's shapes."""

import numpy as np
import pytest

from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.serving.openai.app import OpenAIServer, ServerOptions, make_app
from speccompile.serving.openai.chat import ChatTemplate
from speccompile.serving.openai.logprobs import TokenTexts
from tests.serving.asgi_lab import post
from tests.serving.mock_service import ALPHABET, TARGET, serving
from tests.serving.openai.test_chat import LETTERS

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "bc"}]


@pytest.fixture(scope="module")
def app():
    with serving() as (_, service, _):
        server = OpenAIServer(service, ServerOptions(model_name="mock"))
        server.template = ChatTemplate(LETTERS)
        yield make_app(server)


def rows_of(prompt, text):
    """Returns the log-probabilities [tokens, vocab] of the model itself."""
    ids = [ALPHABET.index(letter) for letter in prompt + text]
    logits = np.array([TARGET.logits(np.array(ids[:at])) for at in range(len(prompt), len(ids))], dtype=np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("speculation", ["on", "off"])
def test_a_completion_tells_them_by_text(app, speculation):
    body = {"prompt": "bcd", "max_tokens": 12, "logprobs": 2, "speculation": speculation}
    [choice] = post(app, COMPLETION, body).json()["choices"]
    told, rows = choice["logprobs"], rows_of("abcd", choice["text"])
    assert told["tokens"] == list(choice["text"]) and told["text_offset"] == list(range(12))
    np.testing.assert_allclose(told["token_logprobs"], rows.max(axis=-1), atol=1e-5)
    for row, top in zip(rows, told["top_logprobs"], strict=True):
        assert top == pytest.approx({ALPHABET[i]: row[i] for i in np.argsort(-row)[:2]}, abs=1e-5)


def test_a_chat_tells_them_with_bytes_and_a_stream_in_parts(app):
    body = {"messages": MESSAGES, "max_tokens": 10, "logprobs": True, "top_logprobs": 3, "temperature": 1.0, "seed": 1}
    [choice] = post(app, CHAT, body).json()["choices"]
    entries, text = choice["logprobs"]["content"], choice["message"]["content"]
    rows = rows_of("ubcx", text)
    assert [entry["token"] for entry in entries] == list(text) and entries[0]["bytes"] == list(text[0].encode())
    chosen = [row[ALPHABET.index(letter)] for row, letter in zip(rows, text, strict=True)]
    np.testing.assert_allclose([entry["logprob"] for entry in entries], chosen, atol=1e-5)
    assert {len(entry["top_logprobs"]) for entry in entries} == {3}
    *events, _ = post(app, CHAT, {**body, "stream": True}).events()
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for part in parts if part for entry in part["content"]] == entries
    plain = post(app, CHAT, {"messages": MESSAGES, "max_tokens": 3, "logprobs": True}).json()["choices"][0]
    assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[]] * 3


def test_offsets_go_on_through_a_stream(app):
    body = {"prompt": "bcd", "max_tokens": 9, "logprobs": 0, "stream": True, "n": 2, "temperature": 0.9, "seed": 2}
    *events, _ = post(app, COMPLETION, body).events()
    for index in range(2):
        parts = [c["logprobs"] for e in events for c in e["choices"] if c["index"] == index and c["logprobs"]]
        assert [offset for part in parts for offset in part["text_offset"]] == list(range(9))


def test_what_is_drawn_from_is_told_where_it_is_asked_for(app):
    body = {"prompt": "b", "max_tokens": 3, "logprobs": 1, "top_k": 1, "temperature": 1.0}
    raw = post(app, COMPLETION, body).json()["choices"][0]["logprobs"]["token_logprobs"]
    drawn = post(app, COMPLETION, {**body, "logprobs_mode": "processed_logprobs"}).json()["choices"][0]["logprobs"]
    assert drawn["token_logprobs"] == [0.0] * 3 and max(raw) < -1e-3


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (COMPLETION, {"logprobs": 21}, "logprobs"),
        (COMPLETION, {"logprobs": True}, "logprobs"),
        (COMPLETION, {"logprobs_mode": "raw_logits"}, "logprobs_mode"),
    ],
)
def test_other_values_are_refused(app, path, fields, param):
    start = {"messages": MESSAGES} if path == CHAT else {"prompt": "b"}
    reply = post(app, path, {**start, **fields})
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


class Pieces:
    """A vocabulary with bytes of two kinds and SentencePiece's space."""

    names = ("\u00c3\u00a9", "<0xC3>", "\u2581the", "the", "\u00e2\u0124")
    texts = ("\u00e9", "\ufffd", " the", "the", "\ufffd")

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.texts[token] for token in ids).removeprefix(" ")

    def id_to_token(self, token):
        return self.names[token]


def test_bytes_are_those_of_the_token_where_it_is_no_character():
    texts = TokenTexts(Pieces())
    assert [texts.bytes_of(token) for token in range(5)] == [
        [0xC3, 0xA9],
        [0xC3],
        list(b" the"),
        list(b"the"),
        [0xE2, 0x82],
    ]
    assert TokenTexts(None).chat([TokenLogprobs(3, -np.inf)])["content"] == [
        {"token": "token_id:3", "logprob": -9999.0, "bytes": list(b"token_id:3"), "top_logprobs": []}
    ]
