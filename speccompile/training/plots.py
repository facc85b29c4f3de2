# SPDX-License-Identifier: Apache-2.0
"""The curves of a run: a PNG, and events for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SMOOTH = 0.98  # of the training curves; held-out figures are drawn as they are


def write_curves(rows: Sequence[dict[str, Any]], image: Path, events: Path, title: str) -> None:
    """Plots the rows of a run and replaces the events in the folder `events`."""
    points = _points(rows)
    _plot(points, image, title)
    for old in events.glob("events.out.tfevents.*"):
        old.unlink()
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(events)) as writer:
        for step, split, row in points:
            for position, value in enumerate(row["loss"], 1):
                writer.add_scalar(f"{split}/loss/{position}", value, step)
            for position, value in enumerate(row["agreement"], 1):
                writer.add_scalar(f"{split}/agreement/{position}", value, step)
            writer.add_scalar(f"{split}/acceptance_length", row["acceptance_length"], step)


def _points(rows: Sequence[dict[str, Any]]) -> list[tuple[int, str, dict[str, Any]]]:
    points: list[tuple[int, str, dict[str, Any]]] = []
    before, stage, last = 0, None, 0
    for row in rows:
        if row["stage"] != stage:
            before, stage = before + last, row["stage"]
        last = row["step"]
        points += [(before + last, split, row[split]) for split in ("train", "held_out") if split in row]
    return points


def _plot(points: Sequence[tuple[int, str, dict[str, Any]]], image: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    depth = len(points[0][2]["loss"]) if points else 0
    for index, (name, label) in enumerate((("loss", "loss"), ("agreement", "agreement with the target"))):
        for position in range(depth):
            colour = f"C{position % 10}"
            steps, values = _curve(points, "train", lambda row, p=position, n=name: row[n][p])
            axes[index].plot(steps, _smoothed(values), color=colour, alpha=0.5, linewidth=1)
            steps, values = _curve(points, "held_out", lambda row, p=position, n=name: row[n][p])
            axes[index].plot(steps, values, "o-", color=colour, markersize=3, label=f"position {position + 1}")
        axes[index].set(xlabel="step", ylabel=label)
    axes[0].legend(fontsize="small")
    for split, style in (("train", "-"), ("held_out", "o-")):
        steps, values = _curve(points, split, lambda row: row["acceptance_length"])
        values = _smoothed(values) if split == "train" else values
        axes[2].plot(steps, values, style, markersize=3, label=split.replace("_", "-"))
    axes[2].set(xlabel="step", ylabel="estimated acceptance length")
    axes[2].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(image, dpi=100, metadata={"Software": None})


def _curve(points: Sequence[tuple[int, str, dict[str, Any]]], split: str, value: Any) -> tuple[list[int], list[float]]:
    held = [(step, value(row)) for step, name, row in points if name == split]
    return [step for step, _ in held], [v for _, v in held]


def _smoothed(values: Sequence[float]) -> list[float]:
    smooth: list[float] = []
    for value in values:
        smooth.append(value if not smooth else _SMOOTH * smooth[-1] + (1 - _SMOOTH) * value)
    return smooth
