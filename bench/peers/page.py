#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the table and the plot of docs/benchmarks.md from what compare.py and quality.py keep in bench/results.

python bench/peers/page.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE, PLOT = ROOT / "docs/benchmarks.md", ROOT / "docs/assets/benchmarks.svg"
RESULT, QUALITY = ROOT / "bench/results/smollm2.json", ROOT / "bench/results/smollm2-quality.json"
BEGIN, END = "<!-- begin: written by bench/peers/page.py -->", "<!-- end: written by bench/peers/page.py -->"
NAMES = {"speccompile": "speccompile", "llama.cpp": "llama.cpp", "openvino": "OpenVINO GenAI",
         "ort-genai": "ONNX Runtime GenAI", "transformers": "transformers"}  # fmt: skip
QUALITIES = ("KL", "same top token", "perplexity")
BUSY = "**The machine was not idle: figures of a quiet machine will replace these.**"
FORMS = {"stored": "the file itself"}
MODES = {"ngram": "lookup", "draft_model": "draft model"}
Row = Mapping[str, Any]


def read_results(result: Path = RESULT, quality: Path = QUALITY) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what was measured: speeds, and distances by engine and precision."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in (result, quality)]
    return found[0], found[1]


def engines_of(result: Mapping[str, Any]) -> list[tuple[Row, Row]]:
    """Returns (plain, fastest mode) of each engine and precision, in the order of the rows."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for run in result["runs"]:
        for row in run["rows"]:
            rows.setdefault((row["engine"], row["precision"]), []).append(row)
    made = []
    for group in rows.values():
        plain = next(row for row in group if row["mode"] == "plain")
        made.append((plain, max(group, key=lambda row: float(row["tokens_per_s"]))))
    return made


def is_busy(run: Mapping[str, Any]) -> bool:
    """Returns whether other work ran beside a measurement: `bench` warns where its threads waited for a CPU."""
    return bool(run["warnings"])


def block(result: Mapping[str, Any], quality: Mapping[str, Any]) -> str:
    """Returns the generated part of the page."""
    kinds = list(result["runs"][0]["rows"][0]["by_kind"])
    titles = ("engine", "weights", "plain", "best mode", *kinds, "first token, ms", *QUALITIES)
    lines = [titles, ("---",) * len(titles)]
    for plain, best in engines_of(result):
        mode = "" if best is plain else f", {MODES.get(best['mode'], best['mode'])}"
        speeds = [f"{best['by_kind'][kind]:.0f}" for kind in kinds]
        names = (NAMES.get(plain["engine"], plain["engine"]), FORMS.get(plain["form"], plain["form"]))
        own = (_speed(plain), _speed(best) + mode, *speeds, f"{plain['first_token_ms']:.0f}")
        lines.append((*names, *own, *_distance(quality["rows"].get(f"{plain['engine']} {plain['precision']}"))))
    text = [
        BEGIN,
        *([BUSY, ""] if any(map(is_busy, result["runs"])) else []),
        *(f"| {' | '.join(line)} |" for line in lines),
        "",
        *_notes(result, quality),
        "",
        f"![Tokens/s of every engine, plain and in its best mode](assets/{PLOT.name})",
        END,
    ]
    return "\n".join(text)


def _speed(row: Row) -> str:
    spread = row["tokens_per_s_spread"]
    return f"{row['tokens_per_s']:.0f}" + ("" if spread is None else f" ±{spread:.0f}")


def _distance(row: Row | None) -> tuple[str, str, str]:
    if row is None:
        return ("not run",) * 3
    change, error = 100 * row["perplexity_change"], 100 * row["perplexity_error"]
    return f"{row['kl']:.1e}", f"{row['top1']:.1%}", f"{change:+.1f} ±{error:.1f} %"


def _notes(result: Mapping[str, Any], quality: Mapping[str, Any]) -> list[str]:
    run = result["runs"][0]
    env = run["environment"]
    packages = {**env["versions"], **{name: v for found in run["versions"].values() for name, v in found.items()}}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if name != "numpy")
    notes = [
        f"{result['model']}; {result['date']}, {env['cpu']}, {env['threads']} threads, greedy, batch 1, "
        f"{env['num_prompts']} prompts of {env['max_new_tokens']} new tokens, medians of {env['repeats']} interleaved "
        "rounds with half of their 95 % confidence intervals.",
        f"Versions: {versions}.",
        f"Distances are over {quality['num_positions']} positions of answers to such prompts, against float32 "
        "arithmetic on the file's own weights."
        if quality["rows"]
        else "Distances were not measured yet.",
    ]
    for plain, _ in engines_of(result):
        if plain["engine"] == "llama.cpp" and (share := plain.get("outside_engine_share")) is not None:
            lost = 1e3 * share / plain["tokens_per_s"]
            notes.append(
                f"llama.cpp ({plain['form']}) runs through llama-cpp-python: {lost:.2f} ms of a plain token are the "
                f"binding's and its sampler's, outside of `llama_decode`; without them it would make "
                f"{plain['tokens_per_s'] / (1 - share):.0f} tokens/s."
            )
    left_out = {name: " ".join(why.split()) for one in result["runs"] for name, why in one["left_out"].items()}
    notes += [f"Left out: {name}: {why}." for name, why in left_out.items()]
    return [line for note in notes for line in (note, "")][:-1]


def draw(result: Mapping[str, Any], file: Path = PLOT) -> None:
    """Writes bars of tokens/s as an SVG file: each engine, plain and in its best mode, by kind of text."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "speccompile", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt

    pairs = engines_of(result)
    names = [f"{NAMES.get(plain['engine'], plain['engine'])}\n{plain['form']}" for plain, _ in pairs]
    kinds = list(pairs[0][0]["by_kind"])
    figure, panels = plt.subplots(1, 1 + len(kinds), figsize=(11, 0.55 * len(pairs) + 1.2), sharey=True)
    for panel, kind in zip(panels, ["all", *kinds], strict=True):
        for at, (label, color) in enumerate((("plain", "0.7"), ("best mode", "C0"))):
            rows = [pair[at] for pair in pairs]
            speeds = [row["tokens_per_s"] if kind == "all" else row["by_kind"][kind] for row in rows]
            heights = [index + 0.2 - 0.4 * at for index in range(len(pairs) - 1, -1, -1)]
            panel.barh(heights, speeds, 0.38, color=color, label=label)
        panel.set_title(kind, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(pairs) - 1, -1, -1), names)
    panels[0].set_xlabel("decode tokens/s")
    panels[-1].legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def write_page(text: str, page: Path = PAGE) -> None:
    """Puts the generated part between its marks."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + text + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    result, quality = read_results()
    write_page(block(result, quality))
    draw(result)
    print(PAGE, PLOT)


if __name__ == "__main__":
    main()
