# SPDX-License-Identifier: Apache-2.0
"""generate as a user meets it: what is shown when, options by their names, ends that were not asked for."""

import json
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from speccompile.backends.machine import num_usable_cores
from speccompile.cli import options
from speccompile.cli.main import main
from tests.lab.engines import Letters
from tests.runtime.test_spec_engine import make_engine, text

COLOURS = {"TERM": "xterm-256color", "FORCE_COLOR": "1", "NO_COLOR": None}


@pytest.fixture
def engine(monkeypatch):
    """Returns the engine that the command loads, over a language model in numpy; `loaded` has the arguments."""
    made = make_engine(slots=3, max_seq=40)
    made.loaded = []

    def load(path, **arguments):
        made.loaded.append(arguments)
        return made

    monkeypatch.setattr("speccompile.runtime.engine.load", load)
    return made


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("abc", "dab", "c", "bb", "ca")))
    return file


def generate(*arguments):
    return main(["generate", "bundle", *map(str, arguments)])


def test_a_file_is_decoded_in_all_slots_in_order_with_progress_and_the_place_of_the_results(
    engine, prompts, tmp_path, capsys, monkeypatch
):
    sizes = []
    real = engine.run
    monkeypatch.setattr(engine, "run", lambda *a, **k: sizes.append(k["batch_size"]) or real(*a, **k))
    assert generate("--prompts", prompts, "--max-new-tokens", 6) == 0
    out, err = capsys.readouterr()
    wanted = ("abc", "dab", "c", "bb", "ca")
    assert out == "".join(f"--- {i}\n{p}{text(p, 6)}\n" for i, p in enumerate(wanted))
    assert "generate: prompts 0/5" in err and "generate: prompts 5/5" in err
    assert sizes == [None]  # as many as the bundle has
    file = tmp_path / "o.json"
    assert generate("--prompts", prompts, "--max-new-tokens", 6, "--json", file, "--batch-size", 1) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(f"results: {file}\n") and sizes[1:] == [1]
    assert [row["text"] for row in json.loads(file.read_text())] == [text(p, 6) for p in wanted]


def test_one_prompt_into_a_pipe_comes_step_by_step(engine, monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    real, may_go_on, first = engine.verifier.score, threading.Event(), []

    def score(*arguments, **more):
        if len(first) == 1:
            assert may_go_on.wait(10)
        first.append(1)
        return real(*arguments, **more)

    monkeypatch.setattr(engine.verifier, "score", score)

    def decode():
        try:
            generate("-p", "abc", "--max-new-tokens", 20)
        finally:
            sys.stdout.close()

    runner = threading.Thread(target=decode)
    runner.start()
    head = b""
    while len(head) < 4 and (chunk := os.read(read, 100)):
        head += chunk  # the prompt and a first step, while the second waits
    assert head.startswith(b"abc") and len(head) < 23
    may_go_on.set()
    rest = b""
    while chunk := os.read(read, 100):
        rest += chunk
    runner.join()
    os.close(read)
    assert (head + rest).decode() == f"abc{text('abc', 20)}\n"


class Plain(Letters):
    """A tokenizer that notes whether special tokens are put around each text."""

    def __init__(self):
        self.special = []

    def encode(self, text, add_special_tokens=True):
        self.special.append(add_special_tokens)
        return super().encode(text)


TEMPLATE = """{%- for m in messages -%}
{%- if m.role == "king" -%}{{- raise_exception("no role " + m.role) -}}{%- endif -%}
b{{- m.content -}}
{%- endfor -%}{{- think -}}"""


@pytest.fixture
def chat_engine(engine, tmp_path):
    """Returns the engine with a template that writes b before each message."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    engine.bundle = SimpleNamespace(
        tokenizer_path=tmp_path / "tokenizer.json", tokenizer_folder=tmp_path, path=tmp_path
    )
    engine.tokenizer = Plain()
    return engine


@pytest.mark.parametrize(
    ("arguments", "out", "special"),
    [
        (("abc",), text("babc", 6), False),
        (("--prompt", "abc"), text("babc", 6), False),
        (("abc", "--raw"), "abc" + text("abc", 6), True),
        (("-p", "abc", "--raw"), "abc" + text("abc", 6), True),
    ],
)
def test_a_text_is_a_users_message_where_there_is_a_template(chat_engine, capsys, arguments, out, special):
    assert generate(*arguments, "--max-new-tokens", 6) == 0
    assert capsys.readouterr() == (out + "\n", "") and chat_engine.tokenizer.special[0] is special


NOTE = "no chat template: the text is continued as it is\n"


@pytest.mark.parametrize(("more", "note"), [((), NOTE), (("--raw",), "")])
def test_without_a_template_a_text_is_continued_and_one_line_says_so(engine, capsys, more, note):
    assert generate("abc", "--max-new-tokens", 6, *more) == 0
    assert capsys.readouterr() == (f"abc{text('abc', 6)}\n", note)


def test_a_file_may_have_conversations_beside_texts(chat_engine, tmp_path, capsys):
    rows = (
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "c"}]},
        {"prompt": "abc"},
        {"messages": [{"role": "user", "content": "c"}], "chat_template_kwargs": {"think": "d"}, "max_new_tokens": 3},
    )
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert generate("--prompts", file, "--max-new-tokens", 6) == 0
    answers = (text("babc", 6), "abc" + text("abc", 6), text("bcd", 3))
    assert capsys.readouterr().out == "".join(f"--- {i}\n{answer}\n" for i, answer in enumerate(answers))
    assert generate("--prompts", file, "--max-new-tokens", 6, "--json", "-") == 0
    assert [row["text"] for row in json.loads(capsys.readouterr().out)] == [answers[0], text("abc", 6), answers[2]]


def test_conversations_that_cannot_be_rendered_are_errors(chat_engine, tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    file.write_text('\n{"messages": [{"role": "king", "content": "c"}]}\n')
    assert generate("--prompts", file) == 8
    err = capsys.readouterr().err
    assert f"{file}:2 (messages)" in err and "no role king" in err and "Correct the messages" in err
    (tmp_path / "chat_template.jinja").unlink()
    assert generate("--prompts", file) == 7
    err = capsys.readouterr().err
    assert f"{file}:2 (messages)" in err and "no chat template" in err and "chat_template.jinja" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give one of TEXT, --prompt and --prompts"),
        (("a", "--prompt", "a"), "give one of TEXT, --prompt and --prompts"),
        (("--prompts", "x", "--raw"), "give --raw with one text; in a file `prompt` is a text as it is"),
        (("--prompts", "x", "--image", "y"), "give --image with one text; lines of a file have `images`"),
    ],
)
def test_what_is_asked_for_once_is_asked_for_in_one_way(engine, capsys, monkeypatch, arguments, words):
    monkeypatch.setenv("COLUMNS", "200")
    assert generate(*arguments) == 2
    assert words in capsys.readouterr().err and not engine.loaded


def test_a_text_that_ends_with_the_cache_says_so(engine, prompts, capsys):
    assert generate("-p", "abc", "--max-new-tokens", 500) == 0
    assert "warning: the text ends where the cache ends: engine.max_seq_len is 40" in capsys.readouterr().err
    assert generate("--prompts", prompts, "--max-new-tokens", 500, "--json", "-") == 0
    assert "5 of 5 texts end where the cache ends" in capsys.readouterr().err
    assert generate("-p", "abc", "--max-new-tokens", 5) == 0
    assert "cache" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "option", "words"),
    [
        (("--top-p", "1.5"), "--top-p", "got 1.5; expected above 0, at most 1"),
        (("--min-p", "-1"), "--min-p", "got -1.0; expected 0 (off) to 1"),
        (("--presence-penalty", "3"), "--presence-penalty", "expected -2 to 2"),
        (("--temperature", "-1"), "--temperature", "greater than or equal to 0"),
        (("--threads", "2000"), "--threads", "less than or equal to 1024"),
        (("--batch-size", "4"), "--batch-size", "got 4; expected at most 3"),
    ],
)
def test_wrong_options_are_wrong_usage_by_their_own_names(engine, capsys, monkeypatch, arguments, option, words):
    monkeypatch.setenv("COLUMNS", "200")
    assert generate("-p", "abc", *arguments) == 2
    err = capsys.readouterr().err
    assert option in err and words in err
    assert bool(engine.loaded) == (option == "--batch-size"), "refused before anything is loaded"


def test_threads_beyond_the_cores_are_cut_with_a_warning(engine, capsys):
    cores = num_usable_cores()
    assert generate("-p", "abc", "--max-new-tokens", 2, "--threads", cores + 1) == 0
    assert f"warning: --threads {cores + 1}: this machine has {cores} cores" in capsys.readouterr().err
    assert generate("-p", "abc", "--max-new-tokens", 2, "--threads", cores) == 0
    assert "warning" not in capsys.readouterr().err
    assert [arguments["threads"] for arguments in engine.loaded] == [cores, cores]
    assert options.usable_threads(None) is None


@pytest.mark.parametrize(
    ("variables", "is_shown"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"FORCE_COLOR": None}, False)],
    ids=["colours", "NO_COLOR", "dumb", "pipe"],
)
def test_the_legend_comes_with_colours_alone(engine, capsys, monkeypatch, variables, is_shown):
    for name, value in {**COLOURS, **variables}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert generate("-p", "abc", "--max-new-tokens", 5) == 0
    assert ("accepted" in capsys.readouterr().out) == is_shown


def test_explain_says_of_each_step_what_was_drafted_and_prints_the_text_last(engine, prompts, capsys):
    assert generate("abc", "--max-new-tokens", 12, "--explain") == 0
    out, err = capsys.readouterr()
    assert out == f"abc{text('abc', 12)}\n"
    heads = [line for line in err.splitlines() if line.startswith("step ")]
    assert heads[0].startswith("step 1: ") and heads[0].endswith("; with the prompt")
    drafted = [line for line in heads if " draft tokens, " in line]
    assert drafted and all(line.endswith(" accepted; their number is fixed") for line in drafted)
    assert sum("* > " in line for line in err.splitlines()) and sum("  then " in line for line in err.splitlines())
    assert generate("abc", "--max-new-tokens", 4, "--explain", "--plain") == 0
    out, err = capsys.readouterr()
    assert out == f"abc{text('abc', 4)}\n" and err.count("; drafts off: --plain\n") == 3
    assert generate("--prompts", prompts, "--explain") == 2
    assert "give --explain with one prompt" in capsys.readouterr().err
