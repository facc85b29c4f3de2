# SPDX-License-Identifier: Apache-2.0
"""How commands end: by a signal, or with an output that cannot be written."""

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from speccompile.cli.main import app, main
from tests.pipeline import fakes

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
# A build that waits in the compiler until a signal comes.
BUILD = """
import sys, time
from tests.pipeline import fakes
fakes.install_for_good()
def wait(*args, **options):
    print("compiling", flush=True)
    time.sleep(60)
fakes.FakeBackend.compile = wait
from speccompile.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("number", "message"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_stopped_build_removes_what_it_wrote_and_says_one_line(tmp_path, number, message):
    recipe = fakes.write_recipe(tmp_path / "in")
    environment = {**os.environ, "SPECCOMPILE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", BUILD, "build", str(recipe), "-o", str(tmp_path / "out" / "made")]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts its background jobs with Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "compiling\n"
        assert [p for p in tmp_path.rglob(".*") if ".building-" in p.name]
        child.send_signal(number)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert errors.splitlines()[-1] == message and "Traceback" not in errors
    assert [p.name for top in ("out", "cache") for p in (tmp_path / top).rglob("*") if ".building-" in p.name] == []
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "code", "message"), [(KeyboardInterrupt(), 130, "interrupted"), (SystemExit(3), 3, "")]
)
def test_any_command_says_that_it_was_interrupted(monkeypatch, capsys, fault, code, message):
    def stop():
        raise fault

    monkeypatch.setattr("speccompile.recipe.models.text_from_schema", stop)
    assert main(["schema"]) == code
    assert capsys.readouterr().err.strip() == message


def test_the_handler_of_sigterm_is_gone_after_a_command():
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--version"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["schema"], ["--version"], ["inspect", "--help"]], ids=lambda a: a[0])
def test_a_full_stdout_is_one_error_without_a_traceback(arguments, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "speccompile", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert "standard output" in done.stderr and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_other_faults_of_the_system_are_not_taken_for_stdout(monkeypatch, capsys):
    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speccompile.recipe.models.text_from_schema", fail)
    with pytest.raises(OSError, match="No space"):
        main(["schema"])


@pytest.mark.parametrize("command", sorted(command.name or "" for command in app.registered_commands))
def test_help_fills_the_line_and_shows_no_type_beside_a_flag(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert "<bool>" not in page
    prose = re.split(r"^\w.*:$", page, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    words = [(line.rstrip(), after.split()) for line, after in itertools.pairwise(prose)]
    # A line ends because the next word does not fit.
    broken = [line for line, after in words if line and after and len(line) + 1 + len(after[0]) < 95]
    assert [line for line in broken if not line.startswith("Usage:")] == []


@pytest.mark.parametrize("columns", ["80", "40"])
@pytest.mark.parametrize("command", ["", *sorted(command.name or "" for command in app.registered_commands)])
def test_help_has_whole_names_and_every_option_once(monkeypatch, capsys, command, columns):
    group = typer.main.get_command(app)
    params = (group.commands[command] if command else group).params
    monkeypatch.setenv("COLUMNS", columns)
    assert main([*([command] if command else []), "--help"]) == 0
    lines = re.split(r"^(?=\w.*:$)", capsys.readouterr().out, maxsplit=1, flags=re.MULTILINE)[1].splitlines()
    for names in ([*p.opts, *p.secondary_opts] for p in params if p.param_type_name == "option"):
        in_order = sorted(map(re.escape, names), key=lambda name: name.count("-") > 1)  # short ones first
        begin = re.compile(rf"  {'(, | / )'.join(in_order)}(\s|$)")
        assert len([line for line in lines if begin.match(line)]) == 1, names
    assert "…" not in "".join(lines)
    headings = [line for line in lines if re.fullmatch(r"\w[\w ]*:", line)]
    assert len(headings) == len(set(headings)) and "Options:" in headings


@pytest.mark.parametrize(
    ("arguments", "shown", "absent"),
    [
        (["serve", "--help=parser"], "Answers:\n  --tool-call-parser", "--host"),
        (["serve", "model", "--help=parser"], "Answers:\n  --tool-call-parser", "--host"),
        (["serve", "--help=OPENAI"], None, None),
        (["generate", "--help=temperature"], "Sampling:\n  --temperature", "--prompts"),
        (["--help=timeout"], "triton:\n  --timeout-s", "--host"),
        (["--help=xyzzy"], None, None),
    ],
)
def test_help_of_a_word_shows_the_options_that_have_it(capsys, arguments, shown, absent):
    code = main(arguments)
    out, err = capsys.readouterr()
    if shown is None:
        assert code == 2 and out == "" and arguments[-1] in err and "no option has this word" in " ".join(err.split())
    else:
        assert code == 0 and shown in out and absent not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "b", "--prompt"],
        ["generate", "b", "--prompt", "a", "--stop"],
        ["chat", "b", "--system"],
        ["build", "m", "--set"],
        ["serve"],
    ],
)
def test_text_that_is_not_utf8_is_refused(capsys, arguments):
    assert main([*arguments, os.fsdecode(b"caf\xe9")]) == 2
    err = " ".join(capsys.readouterr().err.replace("│", "").split())
    option = arguments[-1] if arguments[-1].startswith("--") else "MODEL"
    assert option in err and "bytes that are not UTF-8 (b'caf\\xe9'); expected text. Write it in UTF-8" in err
