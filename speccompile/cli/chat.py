# SPDX-License-Identifier: Apache-2.0
"""speccompile chat: a conversation with a bundle or a model, by its chat template."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from speccompile.cli.generate import STYLES, print_stats
from speccompile.cli.options import (
    MAX_THREADS,
    SOURCE_HELP,
    check_sampling,
    check_template,
    load_source,
    usable_threads,
    with_model_options,
    with_sampling_options,
)
from speccompile.cli.output import print_error
from speccompile.common.chat_prompts import find_template
from speccompile.common.json_reader import is_unicode
from speccompile.errors import RuntimeFault

if TYPE_CHECKING:
    from speccompile.core.sampling_params import SamplingParams
    from speccompile.runtime.requests import StepOutput
    from speccompile.runtime.service import Service

COMMANDS = {
    "/stats": "counts and times of the answers so far",
    "/reset": "forget the conversation",
    "/help": "these commands",
    "/exit": "end, as Ctrl-D does",
}
_MAX_TOKENS = 512  # of an answer, where neither the option nor the bundle says more


@with_model_options
@with_sampling_options
def chat_command(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=SOURCE_HELP)],
    *,
    sampling: dict[str, Any],
    model: Any,
    system: Annotated[str | None, typer.Option(help="The system message that a conversation begins with.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without drafts.")] = False,
    method: Annotated[str | None, typer.Option(help="Another speculation method than the recipe's.")] = None,
    backend: Annotated[str | None, typer.Option(help="Another backend than the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=MAX_THREADS, help="Threads of the target's engine.")] = None,
) -> None:
    """Talk to a bundle or a model: a line is a message, and the conversation goes on until /exit or Ctrl-D.

    On a terminal accepted drafts are green, recovered tokens yellow, bonus tokens cyan. /stats prints counts and times,
    /reset forgets the conversation. In a pipe each line of stdin is a message, and stdout has the answers alone.
    """
    check_sampling(sampling)
    from speccompile.runtime.service import Service, ServiceOptions

    check_template(source, model)
    engine, _ = load_source(source, model, method=method, backend=backend, threads=usable_threads(threads))
    folder = None if engine.bundle is None else engine.bundle.tokenizer_folder
    find_template(folder, "speccompile chat" if folder is None else str(folder))
    given = {"max_new_tokens": max(_MAX_TOKENS, engine.defaults.max_new_tokens), **sampling}
    service = Service(engine, ServiceOptions(speculation="off" if plain else "auto"))
    service.start()
    try:
        _converse(Chat(service, replace(engine.defaults, **given), system), Console(soft_wrap=True))
    finally:
        service.close()


@dataclass
class Chat:
    """A conversation."""

    service: Service  # decodes; rows of the conversation so far are kept in its caches
    sampling: SamplingParams
    system: str | None = None  # the first message's text; None: there is none
    messages: list[dict[str, str]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)

    def ask(self, text: str) -> Generator[StepOutput, None, None]:
        """Yields the steps of the answer to a message; both are in the conversation once it is read to its end.

        Raises:
            RuntimeFault: the conversation does not fit the cache, or the engine failed.
        """
        from speccompile.runtime.requests import Request

        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*self.messages, {"role": "user", "content": text}]
        self.prompt = self.service.engine.chat_prompt([*first, *messages])
        steps: SimpleQueue[StepOutput] = SimpleQueue()
        handle = self.service.submit(Request(self.prompt, self.sampling), steps.put)
        parts: list[str] = []
        step = None
        try:
            while step is None or step.finish_reason is None:
                step = steps.get()
                parts.append(step.text)
                yield step
        finally:
            self.service.cancel(handle)  # an answer that has ended takes no notice
        if step.error is not None:
            raise RuntimeFault("chat", step.error, "an answer", "Begin again with /reset.")
        self.stats.append(step.stats or {})
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]

    def reset(self) -> None:
        self.messages, self.stats = [], []


def _converse(chat: Chat, console: Console) -> None:
    """Reads messages and commands until the input ends or /exit."""
    is_live = console.is_terminal and sys.stdin.isatty()
    if is_live:
        console.print(Text(f"Write a message, or one of {', '.join(COMMANDS)}.", style="dim"))
    for line in _lines(console, is_live):
        message = line.strip()
        if message == "/exit":
            return
        if message == "/reset":
            chat.reset()
        elif message == "/stats":
            print_stats(console, chat.stats, chat.service.draft_report().sentence)
        elif message == "/help":
            for name, meaning in COMMANDS.items():
                console.print(Text.assemble((f"{name:<8}", "bold"), meaning))
        elif message.startswith("/") and message.partition(" ")[0].isascii() and message[1:2].isalpha():
            typer.echo(f"error: no command {message.partition(' ')[0]}; known are {', '.join(COMMANDS)}", err=True)
        elif message:
            _answer(chat, message, console, is_live)


def _lines(console: Console, is_live: bool) -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for line in _read_lines(console, is_live):
        if is_unicode(line):
            yield line
        else:
            typer.echo("error: a line that is not UTF-8; write it in UTF-8", err=True)


def _read_lines(console: Console, is_live: bool) -> Iterator[str]:
    while True:
        try:
            if is_live:
                yield console.input(Text("> ", style="bold"))
                continue
            line = sys.stdin.readline()
        except EOFError:
            console.print()
            return
        if not line:
            return
        yield line


def _answer(chat: Chat, message: str, console: Console, is_live: bool) -> None:
    """Prints an answer as it comes; Ctrl-C ends it, and the message is forgotten."""
    sink = None
    steps = chat.ask(message)
    try:
        for step in steps:
            if is_live and sink is None:
                sink = chat.service.engine.text_sink(chat.sampling, chat.prompt)
            if sink is None:
                print(step.text, end="", flush=True)
                continue
            for token, kind in zip(step.tokens, step.kinds, strict=True):
                console.print(Text(sink.push((token,))[0], style=STYLES[kind]), end="")
            if step.finish_reason is not None:
                console.print(Text(sink.finish()), end="")
        print(flush=True)
    except KeyboardInterrupt:
        steps.close()
        if not is_live:
            raise
        console.print(Text(" (stopped)", style="dim"))
    except RuntimeFault as fault:
        if not is_live:
            raise
        print_error(fault)
