# SPDX-License-Identifier: Apache-2.0
"""A plan as one HTML file without other files: roofline, break-even map, the machine's limits and all rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from statistics import fmean

from speccompile.planner.machine import BITS, Machine
from speccompile.planner.outlook import BREAK_EVEN_BATCHES, TITLES, Row

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM = 720, 360, 70, 30, 44  # of a drawing, and of its margins, pixels
_ROWS = tuple(2.0 ** (i / 4) for i in range(45))  # of the roofline: 1 to 2,048
_MANY = 4096.0  # rows of a product that the bandwidth does not bound
_CELL, _NAMES = 56, 190  # of the map, pixels
_CSS = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.15rem .6rem;text-align:left;border-bottom:1px solid #8884}
svg{max-width:100%;height:auto}
svg text{font-size:12px;fill:currentColor}
.grid{stroke:#888;stroke-opacity:.3}.peak{stroke:#888;stroke-dasharray:4 4}.roof{stroke:#0072b2;stroke-width:2}
.peak,.roof{fill:none}.step{fill:#d55e00}.plain{fill:#888}
"""


def page_of_plan(model: str, machine: Machine, basis: str, rows: Sequence[Row], best: Row) -> str:
    """Returns the page.

    Args:
        rows: of all batches; the drawings show those with the weights of `best`.
    """
    alike = [row for row in rows if row.precision == best.precision]
    sources = {row.method: row.acceptance for row in alike if row.acceptance}
    body = [
        f"<h1>Plan of {escape(model)}</h1>",
        f"<p>Predicted for {escape(basis)}.</p>",
        f"<p><b>Best:</b> {escape(best.sentence)}</p>",
        f"<h2>Roofline, {escape(best.precision)} weights</h2>",
        "<p>The target's steps: operations a second by operations a byte of weights. Left of the bend a step waits for "
        "memory, and drafts cost little; right of it every draft costs as much as a token. Steps lie below the line by "
        "attention, launches and what a published machine does not reach.</p>",
        _roofline(machine, alike, best),
        "<h2>Where drafts pay</h2>",
        "<p>Speed of plain decoding = 1, the middle of the range, by method and sequences at once.</p>",
        _map(alike),
        "<h2>The machine's limits</h2>",
        _limits(machine),
        "<h2>All rows</h2>",
        _table([title.replace("\n", " ") for title in TITLES], (row.cells for row in rows)),
        "<h2>Acceptance</h2>",
        _table(("method", "source"), sources.items()),
    ]
    head = f'<meta charset="utf-8"><title>Plan of {escape(model)}</title><style>{_CSS}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _table(titles: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _rate(machine: Machine, precision: str, rows: float, set_bytes: float) -> float:
    """Returns operations/s of products of so many rows."""
    return 2 * rows * 1e9 / machine.product_s(precision, 1e9, rows, set_bytes)


def _limits(machine: Machine) -> str:
    known = machine.measured or machine.rates
    large, lines = 1e9, []
    for precision in (name for name in BITS if name in known):
        most, one = (_rate(machine, precision, rows, large) for rows in (_MANY, 1.0))
        bandwidth = one / 2 * BITS[precision] / 8
        lines.append((precision, f"{most / 1e12:.3g}", f"{bandwidth / 1e9:.4g}", f"{most / one:.0f}"))
    facts = [
        ("memory", f"{machine.memory_bytes / 1e9:.0f} GB"),
        ("cores or SMs", f"{machine.num_units}"),
        ("a launch", f"{machine.launch_s * 1e6:.1f} us"),
    ]
    titles = ("weights", "10¹² operations/s", "GB/s of weights, one row", "rows from which products bound")
    return _table(("", ""), facts) + _table(titles, lines)


def _roofline(machine: Machine, rows: Sequence[Row], best: Row) -> str:
    byte = BITS[best.precision] / 8
    lines = [("peak", machine)] + [("roof", machine.at(end)) for end in (0, 1)]
    curves = [
        (name, [(2 * n / byte, _rate(one, best.precision, n, best.step[1])) for n in _ROWS]) for name, one in lines
    ]
    steps = [(row, row.step[0] / row.step[1], row.step[0] / row.step[2]) for row in rows]
    xs = [x for _, curve in curves for x, _ in curve] + [x for _, x, _ in steps]
    ys = [y for _, curve in curves for _, y in curve] + [y for _, _, y in steps]
    (x0, x1), (y0, y1) = ((math.floor(math.log10(min(v))), math.ceil(math.log10(max(v)))) for v in (xs, ys))

    def at(x: float, y: float) -> tuple[float, float]:
        right, up = (math.log10(x) - x0) / (x1 - x0), (math.log10(y) - y0) / (y1 - y0)
        return LEFT + right * (WIDTH - LEFT - RIGHT), 10 + (1 - up) * (HEIGHT - BOTTOM - 10)

    parts = []
    for power in range(x0, x1 + 1):
        x, y = at(10.0**power, 10.0**y0)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(y0, y1 + 1):
        x, y = at(10.0**x0, 10.0**power)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{10.0 ** (power - 12):g}</text>')
    for name, curve in curves:
        points = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in curve)
        parts.append(f'<polyline class="{name}" points="{points}"/>')
    for row, x, y in steps:
        centre = 'class="{}" cx="{:.1f}" cy="{:.1f}"'.format("step" if row.num_drafts else "plain", *at(x, y))
        title = f"{row.method}, {row.num_drafts + 1} nodes, batch {row.batch}: {row.step[2] * 1e3:.2f} ms"
        parts.append(f'<circle {centre} r="4"><title>{escape(title)}</title></circle>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">operations a byte</text>')
    parts.append(
        f'<text x="{LEFT + 8}" y="24">10¹² operations/s; grey: plain decoding, orange: drafts, dashed: peak</text>'
    )
    return _svg(WIDTH, HEIGHT, "Roofline", parts)


def _map(rows: Sequence[Row]) -> str:
    methods = list(dict.fromkeys(row.method for row in rows if row.num_drafts))
    found = {(row.method, row.batch): row for row in rows}
    parts = [f'<text x="{_NAMES + _CELL * (i + 0.5):.0f}" y="14" text-anchor="middle">{batch}</text>'
             for i, batch in enumerate(BREAK_EVEN_BATCHES)]  # fmt: skip
    for line, method in enumerate(methods, 1):
        y = 24 * line
        parts.append(f'<text x="{_NAMES - 8}" y="{y + 14}" text-anchor="end">{escape(method)}</text>')
        for i, batch in enumerate(BREAK_EVEN_BATCHES):
            row, x = found.get((method, batch)), _NAMES + _CELL * i
            ratio = None if row is None else fmean(row.of_plain)
            fill, text, title = 'fill="none"', "-", "does not fit into the memory"
            if row is not None and ratio is not None:
                share = min(abs(math.log2(ratio)), 1.0) * 0.8
                fill = f'fill="{"#0072b2" if ratio > 1 else "#d55e00"}" fill-opacity="{share:.2f}"'
                text, title = f"{ratio:.2f}", " ".join(row.cells[4:6])
            parts.append(f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="22" {fill} class="grid">'
                         f"<title>{escape(f'{method}, batch {batch}: {title}')}</title></rect>")  # fmt: skip
            parts.append(f'<text x="{x + _CELL / 2 - 1:.0f}" y="{y + 15}" text-anchor="middle">{text}</text>')
    return _svg(_NAMES + _CELL * len(BREAK_EVEN_BATCHES), 24 * (len(methods) + 1) + 4, "Where drafts pay", parts)


def _svg(width: int, height: int, name: str, parts: Iterable[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg {size} role="img" aria-label="{name}">' + "".join(parts) + "</svg>"
