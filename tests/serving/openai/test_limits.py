# SPDX-License-Identifier: Apache-2.0
"""Keys, sizes, types and origins, and what `speccompile serve` refuses before it loads a model."""

import pytest
from typer.testing import CliRunner

from speccompile.cli.main import app
from speccompile.errors import BundleError, RuntimeFault
from speccompile.serving.openai.server import VARIABLE, ServerOptions, check_keys, keys_from_environment
from tests.serving.asgi_lab import ask_now, get, post
from tests.serving.mock_service import serving

PATH, BODY = "/v1/completions", {"prompt": "b", "max_tokens": 2}


@pytest.fixture(scope="module")
def locked():
    keys, origins = ("secret", "schlüssel"), ("https://good.example",)
    with serving(ServerOptions("mock", keys, max_request_bytes=200, allowed_origins=origins)) as (app, _, _):
        yield app


@pytest.fixture(scope="module")
def bare():
    with serving() as (app, _, _):
        yield app


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/page/facts", "/openapi.json"])
@pytest.mark.parametrize(
    "given", [None, "Bearer", "Bearer ", "Bearer secre", "Bearer secret2", "Basic secret", "secret"]
)
def test_a_wrong_key_is_refused(locked, path, given):
    reply = get(locked, path, headers={"authorization": given})
    assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("given", ["Bearer secret", "bearer secret", "Bearer sch\u00fcssel"])
def test_any_of_the_keys_opens(locked, given):
    wire = given.encode().decode("latin-1") if not given.isascii() else given
    reply = get(locked, "/v1/models", headers={"authorization": wire})
    assert reply.status == (200 if given.isascii() else 401)  # "schüssel" is no "schlüssel"


@pytest.mark.parametrize(("given", "status"), [("secret", 200), ("secre", 401), ("", 401), ("Bearer secret", 401)])
def test_key_in_x_api_key_header(locked, given, status):
    assert get(locked, "/v1/models", headers={"x-api-key": given}).status == status
    assert get(locked, "/v1/models", headers={"x-api-key": given, "authorization": "Basic secret"}).status == status


def test_paths_that_reveal_nothing_are_open(locked):
    assert [get(locked, path).status for path in ("/health", "/ping", "/")] == [200] * 3
    assert ask_now(locked, "POST", "/ping").status == 200  # without a body, and so without its type


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize("length", [None, "1", "99999"])
def test_a_large_body_is_refused_however_it_comes(locked, parts, length):
    big = {"prompt": "b" * 300, "max_tokens": 2}
    headers = {"authorization": "Bearer secret", "content-length": length}
    reply = post(locked, PATH, big, headers=headers, parts=parts)
    assert reply.status == 413 and reply.json()["error"]["code"] == "request_too_large"


def test_a_body_in_parts_is_read_whole(locked):
    assert post(locked, PATH, BODY, headers={"authorization": "Bearer secret"}, parts=9).status == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_non_json_content_types_are_refused(bare, kind):
    assert post(bare, PATH, BODY, headers={"content-type": kind}).status == 415
    assert post(bare, PATH, BODY, headers={"content-type": "application/json; charset=utf-8"}).status == 200


def test_cors_needs_named_origins(bare, locked):
    asks = {"origin": "https://good.example", "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "content-type,authorization,x-api-key,x-stainless-os"
    answer = get(bare, "/v1/models", headers={"origin": "https://good.example"})
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert ask_now(bare, "OPTIONS", PATH, headers=asks).status == 405
    allowed = ask_now(locked, "OPTIONS", PATH, headers=asks)
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == "https://good.example"
    other = ask_now(locked, "OPTIONS", PATH, headers={**asks, "origin": "https://bad.example"})
    assert other.status == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("secret", ("secret",)),
        ("secret\n", ("secret",)),
        ("one,two", ("one", "two")),
        ("one two", ("one", "two")),
        (" one,\ttwo ,", ("one", "two")),
    ],
)
def test_the_environment_holds_keys_between_commas_and_spaces(text, keys):
    assert keys_from_environment({VARIABLE: text}) == keys


def test_without_the_variable_no_key_is_asked_for():
    assert keys_from_environment({}) == ()


@pytest.mark.parametrize("text", ["", "  ", "\n", ",", " , "])
def test_a_variable_without_a_key_is_refused(text):
    with pytest.raises(RuntimeFault, match=r"SPECCOMPILE_API_KEY: got no API key; expected keys .* unset"):
        keys_from_environment({VARIABLE: text})


@pytest.mark.parametrize("key", ["", " ", "\t\n"])
def test_a_blank_key_is_refused_however_the_server_is_made(key):
    with pytest.raises(RuntimeFault, match="got a blank API key; expected a key that is not empty"):
        ServerOptions(api_keys=("secret", key))


@pytest.mark.parametrize("key", ["one,two", "one two", " one", "one\n"])
def test_what_may_be_several_keys_is_not_taken_for_one(key):
    with pytest.raises(RuntimeFault, match=r"--api-key: got white space or a comma .* Give each key by itself"):
        check_keys([key], "--api-key")


@pytest.mark.parametrize(
    ("variable", "options", "where"),
    [
        (None, ["--api-key", ""], "--api-key"),
        (None, ["--api-key", "secret", "--api-key", " "], "--api-key"),
        ("secret", ["--api-key", ""], "--api-key"),
        ("", [], VARIABLE),
        ("  ", [], VARIABLE),
    ],
)
def test_serve_refuses_blank_keys(tmp_path, monkeypatch, variable, options, where):
    monkeypatch.delenv(VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    fault = CliRunner().invoke(app, ["serve", str(tmp_path / "none"), "--port", "0", *options]).exception
    assert isinstance(fault, RuntimeFault) and fault.where == where


@pytest.mark.parametrize(("variable", "options"), [("a,b", []), ("", ["--api-key", "secret"]), (None, [])])
def test_serve_accepts_valid_keys_or_none(tmp_path, monkeypatch, variable, options):
    monkeypatch.delenv(VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    fault = CliRunner().invoke(app, ["serve", str(tmp_path / "none"), "--port", "0", *options]).exception
    assert isinstance(fault, BundleError)


@pytest.mark.parametrize("option", ["--tool-call-parser", "--reasoning-parser"])
def test_unknown_parser_is_refused_before_the_build(tmp_path, option):
    fault = CliRunner().invoke(app, ["serve", str(tmp_path / "none"), "--port", "0", option, "hermse"]).exception
    assert isinstance(fault, RuntimeFault) and (fault.where, fault.got) == (option, "'hermse'")


@pytest.mark.parametrize(
    "option", ["--timeout-s", "--header-timeout-s", "--body-timeout-s", "--keep-alive-s", "--write-timeout-s"]
)
@pytest.mark.parametrize("value", ["-1", "nan"])
def test_invalid_seconds_name_the_option(tmp_path, option, value):
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "none"), option, value])
    message = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and f"'{option}'" in message and "is not a number of seconds above 0" in message
