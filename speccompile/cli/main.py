# SPDX-License-Identifier: Apache-2.0
"""Entry point of the command line: its pages of help, its commands, and how they end.

Importing it is light: a command imports what it needs when it runs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import cleandoc
from types import FrameType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import speccompile
from speccompile.cli.bench import bench_command
from speccompile.cli.build import build_command
from speccompile.cli.cache import cache_command
from speccompile.cli.chat import chat_command
from speccompile.cli.convert import convert_command
from speccompile.cli.doctor import doctor_command
from speccompile.cli.generate import generate_command
from speccompile.cli.inspect import inspect_command
from speccompile.cli.options import with_log_level
from speccompile.cli.output import print_error, show_logs
from speccompile.cli.plan import plan_command
from speccompile.cli.profile import profile_command
from speccompile.cli.replay import replay_command
from speccompile.cli.schema import schema_command
from speccompile.cli.serve import serve_command
from speccompile.cli.train import train_command
from speccompile.cli.triton import triton_command
from speccompile.cli.vectors import vectors_command
from speccompile.cli.verify import verify_command
from speccompile.common.json_reader import is_unicode
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import SpecCompileError

WIDTH = 120  # of a page at most
_WORD = "speccompile.help"  # where a context keeps the word of --help=WORD
# Options by the groups of a page, in their order; those of no group come first.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model and engine": (
        *("backend", "weights", "overrides", "quantization", "lora", "num_layers", "max_seq_len", "max_batch_size"),
        *("threads", "generation_config"),
    ),
    "Speculation": (
        *("method", "speculation", "plain", "speculative_config", "spec_method", "spec_model", "spec_tokens"),
        *("assistant_tokens", "allow_synthetic_acceptance"),
    ),
    "Sampling": tuple(SamplingParams.__dataclass_fields__),
    "Answers": ("tool_call_parser", "reasoning_parser", "per_request_spec_decode_metrics", "vllm_metrics"),
    "Limits": (
        *("max_queue", "timeout_s", "max_request_bytes", "max_connections", "header_timeout_s", "body_timeout_s"),
        *("keep_alive_s", "write_timeout_s", "drain_s"),
    ),
}
_OTHERS = "Options"


def joined_paragraphs(text: str) -> str:
    """Returns a help text with each paragraph on one line, so that it is wrapped where the terminal ends."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _first_sentence(text: str) -> str:
    return text.partition("\n")[0].partition(". ")[0].rstrip(".")


def _without_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""  # else typer shows <bool>, as if a value followed
    return params


def _records(params: Iterable[Any], ctx: Any, word: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    homes = {name: group for group, names in GROUPS.items() for name in names}
    for param in params:
        found = param.get_help_record(ctx)
        if found is not None and word.lower() in " ".join(found).lower():
            is_option = param.param_type_name == "option"
            yield homes.get(param.name, _OTHERS) if is_option else "Arguments", found


def _write(formatter: Any, records: Iterable[tuple[str, tuple[str, str]]], groups: Iterable[str]) -> bool:
    by_group: dict[str, list[tuple[str, str]]] = {group: [] for group in groups}
    for group, record in records:
        by_group[group].append(record)
    for group, rows in by_group.items():
        if rows:
            with formatter.section(group):
                formatter.write_dl(rows)
    return any(by_group.values())


def _take_word(ctx: Any, args: list[str]) -> list[str]:
    for index, argument in enumerate(args):
        if argument.startswith("--help=") and not (index and args[index - 1].startswith("-")):
            ctx.meta[_WORD] = argument.partition("=")[2]
            return [*args[:index], "--help", *args[index + 1 :]]
    return args


def _check_word(ctx: Any, was_found: bool) -> None:
    if not was_found:
        hint = f"--help={ctx.meta[_WORD]}"
        raise typer.BadParameter(f"no option has this word; all of them: {ctx.command_path} --help", param_hint=hint)


class TidyCommand(TyperCommand):
    """A command whose help is laid out by the terminal's width, and whose values are text."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        super().__init__(*args, help=None if help is None else joined_paragraphs(help), **options)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the arguments; text that is not UTF-8 is refused."""
        rest: list[str] = super().parse_args(ctx, _take_word(ctx, args))
        params: list[Any] = self.params
        for param in params:
            value = ctx.params.get(param.name)
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str) and not is_unicode(text):
                    got = f"got bytes that are not UTF-8 ({os.fsencode(text)[:40]!r})"
                    names = param.opts if param.param_type_name == "option" else [param.metavar or param.name]
                    raise typer.BadParameter(
                        f"{got}; expected text. Write it in UTF-8.", ctx, param_hint=" / ".join(names)
                    )
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the page; with `--help=WORD` the options that have the word."""
        params = self.get_params(ctx)
        groups = ("Arguments", _OTHERS, *GROUPS)
        if word := ctx.meta.get(_WORD):
            _check_word(ctx, _write(formatter, _records(params, ctx, word), groups))
            return
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        _write(formatter, _records(params, ctx), groups)
        formatter.write_paragraph()
        formatter.write_text(f"{ctx.command_path} --help=WORD shows the options that have a word.")


class TidyGroup(TyperGroup):
    """The program's own page."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, _take_word(ctx, args))
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the page; with `--help=WORD` the options of all commands that have the word."""
        commands = [self.commands[name] for name in self.list_commands(ctx)]
        if word := ctx.meta.get(_WORD):
            rows = [(c.name, found) for c in commands for _, found in _records(c.get_params(ctx), ctx, word)]
            names = [command.name or "" for command in commands]
            _check_word(ctx, _write(formatter, [(str(name), row) for name, row in rows], names))
            return
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        found = (("Commands", (str(command.name), _first_sentence(command.help or ""))) for command in commands)
        _write(formatter, itertools.chain(_records(self.get_params(ctx), ctx), found), (_OTHERS, "Commands"))
        formatter.write_paragraph()
        formatter.write_text(f"{ctx.command_path} [COMMAND] --help=WORD shows the options that have a word.")
        self.format_epilog(ctx, formatter)


# Shells report a process that a signal ended as 128 + the signal's number; the commands keep to it.
_MESSAGES = {128 + signal.SIGINT: "interrupted", 128 + signal.SIGTERM: "terminated"}


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit(143) for clean-up, in the main thread without a handler; a second one kills."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def print_ending(code: int) -> None:
    if code in _MESSAGES:
        typer.echo(("\n" if sys.stderr.isatty() else "") + _MESSAGES[code], err=True)


def is_stdout_broken() -> bool:
    """Returns whether standard output takes no more, e.g. on a full disk."""
    try:
        # What could not be written is still pending; an unbuffered stream has nothing pending, so write something.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def stdout_error(fault: OSError) -> SpecCompileError:
    """Returns the error for an output that cannot be written; what is still pending is dropped."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    todo = "Free space, or send the output elsewhere."
    return SpecCompileError("standard output", fault.strerror or str(fault), "room for what is printed", todo)


_EPILOG = (
    "Exit codes: 0 done, 1 no room on stdout or a fault of speccompile itself, 2 wrong usage or recipe, 3 checkpoint, "
    "4 export, 5 pass, 6 build, 7 bundle, 8 decoding, 9 certificate, 10 certificate with too few drafts, "
    "130 interrupted (Ctrl-C), 143 terminated (SIGTERM)."
)

app = typer.Typer(
    name="speccompile",
    cls=TidyGroup,
    help="Compile a model and a speculator into one bundle, and decode with it. "
    "The output distribution is the model's own.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"speccompile {speccompile.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    del version
    show_logs()


for _command in (
    *(build_command, verify_command, generate_command, chat_command, serve_command, replay_command, triton_command),
    *(bench_command, profile_command, plan_command, train_command, inspect_command, doctor_command, convert_command),
    *(cache_command, schema_command, vectors_command),
):
    app.command(_command.__name__.removesuffix("_command"), cls=TidyCommand)(with_log_level(_command))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, see `--help`. `arguments` are by default the process's."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except OSError as fault:
        if not is_stdout_broken():
            raise
        error = stdout_error(fault)
        print_error(error)
        return error.exit_code
    return code


def _run(arguments: Sequence[str] | None) -> int:
    try:
        with sigterm_unwinds():
            app(None if arguments is None else list(arguments))
    except SpecCompileError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print_ending(130)
        return 130
    except SystemExit as leave:  # as click ends every command
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        print_ending(code)
        return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
