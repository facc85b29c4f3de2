# SPDX-License-Identifier: Apache-2.0
"""What `speccompile serve` refuses before it loads a model: keys that are none, times that are none."""

import pytest
from typer.testing import CliRunner

from speccompile.cli.main import app
from speccompile.errors import BundleError, RuntimeFault
from speccompile.serving.openai.limits import VARIABLE, check_keys, keys_from_environment
from speccompile.serving.openai.server import ServerOptions


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
