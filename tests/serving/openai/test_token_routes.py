# SPDX-License-Identifier: Apache-2.0
"""Token ids and texts by vLLM's routes: those that the same prompt or chat is read with."""

import pytest

import speccompile
from speccompile.serving.openai.tools import ChatFormats
from tests.lab.servers import chat_server
from tests.serving.asgi_lab import get, post
from tests.serving.mock_service import ALPHABET, LettersAfterA, make_engine
from tests.serving.openai.test_tools import TEMPLATE


class Named(LettersAfterA):
    def id_to_token(self, token: int) -> str:
        return f"<{ALPHABET[token]}>"


@pytest.fixture(scope="module")
def app():
    with chat_server(make_engine(tokenizer=Named())[0], TEMPLATE) as (app, server):
        server._formats = ChatFormats(None, None)
        yield app


def test_a_prompt_has_the_tokens_that_it_is_read_with(app):
    assert post(app, "/tokenize", {"model": "mock", "prompt": "bcd"}).json() == {
        "count": 4,
        "max_model_len": 64,
        "tokens": [0, 1, 2, 3],
        "token_strs": None,
    }
    usage = post(app, "/v1/completions", {"prompt": "bcd", "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == 4
    named = post(app, "/tokenize", {"prompt": "bc", "add_special_tokens": False, "return_token_strs": True}).json()
    assert (named["tokens"], named["token_strs"]) == ([1, 2], ["<b>", "<c>"])


def test_a_chat_has_the_tokens_of_its_template(app):
    chat = {"messages": [{"role": "user", "content": "bcd"}]}
    found = post(app, "/tokenize", {**chat, "return_token_strs": True}).json()
    usage = post(app, "/v1/chat/completions", {**chat, "max_tokens": 1}).json()["usage"]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == usage["prompt_tokens"]


def test_tokens_become_their_text(app):
    assert post(app, "/detokenize", {"tokens": [1, 2, 3]}).json() == {"prompt": "bcd"}
    assert post(app, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_the_version_is_that_of_the_package(app):
    assert get(app, "/version").json() == {"version": speccompile.__version__}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {"content": "b"}, 400, "`prompt` is missing"),
        ("/tokenize", {"prompt": ["b"]}, 400, "prompt"),
        ("/tokenize", b"{", 400, "JSON"),
        ("/tokenize", [], 400, ""),
        ("/tokenize", {"messages": "b"}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "b"}], "return_token_strs": 3}, 400, "return_token"),
        ("/tokenize", {"model": "other", "prompt": "b"}, 404, "`other` is not served here"),
        ("/detokenize", {"tokens": [1, 10**6]}, 400, "1000000"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "b"}, 400, "tokens"),
    ],
)
def test_invalid_token_requests_are_refused(app, path, body, status, message):
    reply = post(app, path, body)
    assert reply.status == status and message in reply.json()["error"]["message"], reply.body
