# SPDX-License-Identifier: Apache-2.0
"""chat through a pipe and a pty: answers, commands, the conversation as its template writes it, ends."""

import io
import os
import pty
import sys
import threading
from types import SimpleNamespace

import pytest

from speccompile.cli import chat
from speccompile.cli.main import main
from speccompile.core.sampling_params import SamplingParams
from tests.lab.engines import Letters
from tests.runtime.test_spec_engine import make_engine, text

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Tokenizer(Letters):
    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens  # the template writes them
        return super().encode(text)


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """Returns the engine that the command loads, over a language model in numpy, with a template that joins texts."""
    made = make_engine(Tokenizer(), slots=1, max_seq=64)
    monkeypatch.setattr("speccompile.runtime.engine.load", lambda *_, **__: made)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    made.bundle = SimpleNamespace(tokenizer_path=tmp_path / "tokenizer.json", tokenizer_folder=tmp_path, path=tmp_path)
    return made


@pytest.fixture
def talk(engine, monkeypatch, capsys):
    def call(lines, *options):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = main(["chat", "bundle", "--max-new-tokens", "6", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_pipe_gets_the_answers_alone_and_the_conversation_goes_on(talk):
    code, out, err = talk("abc\n\ndab\n")
    first = text("abc", 6)
    assert (code, err) == (0, "")
    assert out == f"{first}\n{text('abc' + first + 'dab', 6)}\n"


def test_a_line_that_is_not_utf8_is_refused_and_the_conversation_goes_on(engine, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nabc\n"), "utf-8"))
    assert main(["chat", "bundle", "--max-new-tokens", "6"]) == 0
    out, err = capsys.readouterr()
    assert out == text("abc", 6) + "\n" and err == "error: a line that is not UTF-8; write it in UTF-8\n"


def test_commands(talk):
    code, out, err = talk("abc\n/reset\nabc\n/stats\n/nonsense\n/exit\nabc\n", "--system", "b")
    assert code == 0 and "no command /nonsense; known are /stats, /reset" in err
    answers = out.split("prompts")[0].splitlines()
    assert [line for line in answers if line.strip()] == [text("babc", 6)] * 2
    assert "mean acceptance length" in out and "\ndrafts on: not yet compared with plain decoding\n" in out
    assert "\ndrafts off: speculation is off\n" in talk("abc\n/stats\n", "--plain")[1]
    assert talk("/help\n")[1].startswith("/stats")


def test_plain_answers_are_the_same(talk):
    assert talk("abc\n", "--plain")[1] == talk("abc\n")[1]


def test_a_conversation_that_does_not_fit_is_an_error(talk):
    code, out, err = talk("abc\n" * 9)
    assert code == 8 and out and "max_seq_len" in err


def test_a_bundle_without_a_template_is_refused(engine, monkeypatch, capsys):
    engine.bundle = None
    assert main(["chat", "bundle"]) == 7
    assert "no chat template" in capsys.readouterr().err


def test_a_terminal_has_a_prompt_and_colours(engine, monkeypatch):
    own, other = pty.openpty()
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = bytearray()

    def read():
        while True:
            try:
                shown.extend(os.read(own, 1000))
            except OSError:
                return

    reader = threading.Thread(target=read, daemon=True)
    with open(other, "r+b", buffering=0, closefd=False) as tty:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.FileIO(other, "r", closefd=False)))
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(tty, write_through=True))
        reader.start()
        os.write(own, b"abc\n/exit\n")
        code = main(["chat", "bundle", "--max-new-tokens", "60"])  # the controller begins with plain steps
        sys.stdout.flush()
    os.close(other)
    reader.join(10)
    os.close(own)
    written = shown.decode()
    assert code == 0 and "> " in written and "\x1b[3" in written


def test_an_answer_is_as_long_as_the_bundle_says_and_512_tokens_at_least(engine, monkeypatch):
    asked = []
    monkeypatch.setattr(chat, "_converse", lambda one, console: asked.append(one.sampling.max_new_tokens))
    for own, options in ((2000, ()), (64, ()), (2000, ("--max-new-tokens", "6"))):
        engine.defaults = SamplingParams(max_new_tokens=own)
        assert main(["chat", "bundle", *options]) == 0
    assert asked == [2000, 512, 6]
