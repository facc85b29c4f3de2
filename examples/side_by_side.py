# SPDX-License-Identifier: Apache-2.0
"""Two decodings of one prompt beside each other, at the pace of their own steps.

Both were decoded before, one after the other: drawing, or the other one, would take the processor from what is shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from speccompile import SamplingParams, SpecEngine

FRAMES_PER_S = 25
ACCEPTED = "bold green"  # the style of drafts that were accepted
NUM_LINES = 9  # of a text that are shown: its last ones


@dataclass(frozen=True)
class Recording:
    """A text, and when each of its steps came.

    Args:
        times: seconds after the first step, one a step.
        parts: (text, style) of the tokens of each step.
        num_tokens: of each step.
    """

    times: list[float]
    parts: list[list[tuple[str, str]]]
    num_tokens: list[int]

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first step, which holds the prompt."""
        return sum(self.num_tokens[1:]) / max(self.times[-1], 1e-9)

    def text_at(self, seconds: float) -> Text:
        """Returns what had come by then, drafts that were accepted in their colour."""
        come = sum(at <= seconds for at in self.times)
        return Text.assemble(*(part for step in self.parts[:come] for part in step))


def record(engine: SpecEngine, prompt: list[int], max_new_tokens: int, speculative: bool) -> Recording:
    """Decodes a prompt greedily and notes when its steps come."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    stream = engine.stream(prompt, params, speculative=speculative)
    sink = engine.text_sink(params, stream.prompt)
    assert sink is not None  # a model with a chat template has a tokenizer
    times, steps = [], []
    for step in stream:
        times.append(time.perf_counter())
        steps.append(step)
    parts = []
    for step in steps:
        texts = [sink.push((token,))[0] for token in step.tokens]
        styles = [ACCEPTED if kind == "accepted" else "" for kind in step.kinds]
        parts.append(list(zip(texts, styles, strict=True)))
    return Recording([at - times[0] for at in times], parts, [len(step.tokens) for step in steps])


def frame(title: str, question: str, pair: Sequence[tuple[str, Recording]], seconds: float, width: int) -> Table:
    """Returns both texts as they stood after some seconds."""
    grid = Table.grid(expand=True)
    for _ in pair:
        grid.add_column(ratio=1)
    shown = " ".join(question.split())
    head = Text.assemble((title, "bold"), "  ", (shown, "dim"))
    head.truncate(width - 2, overflow="ellipsis")
    grid.title, grid.title_justify, grid.title_style = head, "left", ""
    grid.add_row(*(_panel(name, recording, seconds, width // len(pair) - 4) for name, recording in pair))
    return grid


def _panel(name: str, recording: Recording, seconds: float, width: int) -> RenderableType:
    lines = recording.text_at(seconds).wrap(Console(width=width), width)[-NUM_LINES:]
    lines.extend([Text("")] * (NUM_LINES - len(lines)))
    has_ended = seconds >= recording.times[-1]
    speed = f"{recording.tokens_per_s:.0f} tokens/s" if has_ended else f"{seconds:.1f} s"
    return Panel(Text("\n").join(lines), title=name, subtitle=speed, box=box.ROUNDED, border_style="dim")


def show(console: Console, title: str, question: str, pair: Sequence[tuple[str, Recording]]) -> None:
    """Shows both texts growing on a terminal; elsewhere how they ended."""
    length = max(recording.times[-1] for _, recording in pair)
    last = frame(title, question, pair, length, console.width)
    if not console.is_terminal:
        console.print(last)
        return
    begin = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        while (seconds := time.monotonic() - begin) < length:
            live.update(frame(title, question, pair, seconds, console.width), refresh=True)
            time.sleep(1 / FRAMES_PER_S)
        live.update(last, refresh=True)
