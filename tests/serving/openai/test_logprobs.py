# SPDX-License-Identifier: Apache-2.0
"""Logprobs in OpenAI's shapes."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from speccompile.common.chat_template import ChatTemplate
from speccompile.core.specs import SCORED_NODES
from speccompile.runtime.logprobs import TokenLogprobs
from speccompile.runtime.verifier import SCORED_CHUNK
from speccompile.serving.openai.logprobs import TokenTexts
from tests.lab.servers import chat_server
from tests.serving.asgi_lab import post
from tests.serving.mock_service import ALPHABET, TARGET, make_engine, serving
from tests.serving.openai.test_chat import LETTERS

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "bc"}]


@pytest.fixture(scope="module")
def app():
    with chat_server(make_engine()[0], ChatTemplate(LETTERS)) as (app, _):
        yield app


def rows_of(prompt, text):
    """Returns the log-probabilities [tokens, vocab] of the model itself."""
    ids = [ALPHABET.index(letter) for letter in prompt + text]
    logits = np.array([TARGET.logits(np.array(ids[:at])) for at in range(len(prompt), len(ids))], dtype=np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("speculation", ["on", "off"])
def test_completion_logprobs_by_text(app, speculation):
    body = {"prompt": "bcd", "max_tokens": 12, "logprobs": 2, "speculation": speculation}
    [choice] = post(app, COMPLETION, body).json()["choices"]
    told, rows = choice["logprobs"], rows_of("abcd", choice["text"])
    assert told["tokens"] == list(choice["text"]) and told["text_offset"] == list(range(12))
    np.testing.assert_allclose(told["token_logprobs"], rows.max(axis=-1), atol=1e-5)
    for row, top in zip(rows, told["top_logprobs"], strict=True):
        assert top == pytest.approx({ALPHABET[i]: row[i] for i in np.argsort(-row)[:2]}, abs=1e-5)


def test_chat_logprobs_whole_and_streamed(app):
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


def test_processed_logprobs_mode(app):
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


def test_bytes_of_partial_characters():
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


def prompt_rows(prompt):
    """Returns the log-probabilities [tokens - 1, vocab] of the rows that a prompt's tokens follow."""
    return rows_of(prompt[0], prompt[1:]) if prompt[1:] else []


def check_prompt(told, prompt, num):
    """Compares what is told of the tokens of a prompt, which begins with a token of its own, with the model's rows."""
    assert told["tokens"][: len(prompt)] == list(prompt)
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    for at, row in enumerate(prompt_rows(prompt), 1):
        own = ALPHABET.index(prompt[at])
        assert told["token_logprobs"][at] == pytest.approx(row[own], abs=1e-5)
        top = {ALPHABET[i]: row[i] for i in (*np.argsort(-row)[:num], own)}
        assert told["top_logprobs"][at] == pytest.approx(top, abs=1e-5)


LONG = "bcdbcadbbacd" * 4


@pytest.mark.parametrize("speculation", ["on", "off"])
@pytest.mark.parametrize("num", [0, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 9])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_tells_the_prompt_too(app, speculation, num, max_tokens, stream):
    """Whatever was kept of the same prompt before, and over several chunks of it; `max_tokens` 0 tells it alone."""
    prompts = [LONG, "b", "cab"]
    given = [[ALPHABET.index(c) for c in prompt] for prompt in prompts] if num else prompts
    body = {"prompt": given, "logprobs": num, "speculation": speculation}
    post(app, COMPLETION, {"prompt": LONG, "max_tokens": 5})  # its rows are kept
    free = post(app, COMPLETION, {**body, "max_tokens": max(max_tokens, 1)}).json()
    echo = {**body, "max_tokens": max_tokens, "echo": True, "n": 2}
    if stream:
        *events, _ = post(app, COMPLETION, {**echo, "stream": True}).events()
        choices = [merged([e["choices"][0] for e in events if e["choices"][0]["index"] == i]) for i in range(6)]
    else:
        answer = post(app, COMPLETION, echo).json()
        choices, own = answer["choices"], 6 * max_tokens
        assert answer["usage"]["completion_tokens"] == own
    for choice in choices:
        prompt = prompts[choice["index"] // 2]
        plain = free["choices"][choice["index"] // 2]
        text = plain["text"] if max_tokens else ""
        assert choice["text"] == prompt + text and choice["finish_reason"] == "length"
        told, given = choice["logprobs"], plain["logprobs"]
        whole = prompt if num else f"a{prompt}"  # the tokenizer puts `a` in front
        check_prompt(told, whole, num)
        assert told["tokens"] == list(whole + text)
        first = len(whole) - len(prompt)
        assert told["text_offset"] == [0] * first + list(range(len(prompt + text)))
        for name in ("token_logprobs", "top_logprobs"):
            assert told[name][len(whole) :] == (given[name] if max_tokens else [])


def merged(choices):
    """Returns the choice that the chunks of a stream make up."""
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    logprobs = {name: [value for part in told for value in part[name]] for name in told[0]}
    text = "".join(choice["text"] for choice in choices)
    return {**choices[-1], "text": text, "logprobs": logprobs}


def test_an_echo_without_logprobs_is_the_text(app):
    body = {"prompt": "bcd", "max_tokens": 3, "echo": True}
    [choice] = post(app, COMPLETION, body).json()["choices"]
    plain = post(app, COMPLETION, {**body, "echo": False}).json()["choices"][0]
    assert choice["text"] == f"bcd{plain['text']}" and choice["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_prompt_logprobs_are_told_as_vllm_does(app, path):
    said = {"messages": MESSAGES} if path == CHAT else {"prompt": "bc"}
    answer = post(app, path, {**said, "max_tokens": 2, "prompt_logprobs": 2}).json()
    told = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
    prompt = "ubcx" if path == CHAT else "abc"
    assert told[0] is None and len(told) == len(prompt)
    for entry, row, letter in zip(told[1:], prompt_rows(prompt), prompt[1:], strict=True):
        order, own = np.argsort(-row), ALPHABET.index(letter)
        ranks = {int(i): rank for rank, i in enumerate(order, 1)}
        assert entry.keys() == {str(i) for i in (*order[:2], own)}
        for token, facts in entry.items():
            assert facts["logprob"] == pytest.approx(row[int(token)], abs=1e-5)
            assert (facts["rank"], facts["decoded_token"]) == (ranks[int(token)], ALPHABET[int(token)])
    reply = post(app, path, {**said, "prompt_logprobs": 2, "stream": True})
    assert reply.status == 400 and reply.json()["error"]["param"] == "prompt_logprobs"


def test_prompt_logprobs_are_computed_in_chunks():
    with serving(max_seq=300) as (app, _, gated):
        gated.feeds_seen.clear()
        body = {"prompt": "bcd" * 80, "max_tokens": 1, "echo": True, "logprobs": 1}
        assert len(post(app, COMPLETION, body).json()["choices"][0]["logprobs"]["tokens"]) == 242
        scored = [shapes[SCORED_NODES][1] for shapes in gated.feeds_seen if SCORED_NODES in shapes]
        assert sum(scored) == 240 and max(scored) <= SCORED_CHUNK


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 0, "logprobs": 1}, "max_tokens"), ({"echo": 1}, "echo")],
)
def test_zero_max_tokens_needs_echo(app, fields, param):
    reply = post(app, COMPLETION, {"prompt": "b", **fields})
    assert reply.status == 400 and reply.json()["error"]["param"] == param


def test_tokens_begin_where_their_texts_do():
    """Bytes of a character, a space that a decoder drops, and a token that is none of the text."""

    names = ["<s>", "\u2581The", "\u2581", "<0xC3>", "<0xA9>", "cole"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    texts = TokenTexts(tokenizer)
    assert texts.offsets([0, 1, 2, 3, 4, 5], "The \u00e9cole") == [0, 0, 3, 4, 4, 5]
    told = [TokenLogprobs(token, -1.0) for token in (1, 2, 3, 4, 5)]  # " The \u00e9cole" after a prompt
    assert texts.completion(told, 7)["text_offset"] == [7, 11, 12, 12, 13]
