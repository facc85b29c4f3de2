#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare bundles of one target with the peers: report.json, table.md and plot.svg.

A run of `speccompile bench BUNDLE --peers ...` for each bundle, so each compares what has the bundle's precision:

    python bench/peers/compare.py bundles/fp32 bundles/int8 --out build/comparison -- --repeats 3 --threads 2

What stands after `--` is given to every run. The plot needs matplotlib (the extra `[bench]`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccompile.cli.bench_peers import markdown_from_rows

MODES = ("plain", "draft_model", "ngram")
Report = Mapping[str, Any]


def measure(bundle: str, peers: str, options: Sequence[str]) -> Report:
    """Returns the report of one run.

    Raises:
        SystemExit: the run failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [
            sys.executable,
            "-m",
            "speccompile",
            "bench",
            bundle,
            "--peers",
            peers,
            "--json",
            str(file),
            *options,
        ]
        code = subprocess.run(command, check=False).returncode
        if code:
            raise SystemExit(code)
        report: Report = json.loads(file.read_text(encoding="utf-8"))
        return report


def markdown_from_reports(reports: Sequence[Report]) -> str:
    """Returns what was measured, where, and with which versions, as Markdown."""
    parts = []
    for report in reports:
        env, peers = report["environment"], report["peers"]
        versions = [(name, *item) for name, found in peers["versions"].items() for item in found.items()]
        own = [("here", *item) for item in env["versions"].items()]
        parts.append(
            f"{env['bundle']} ({peers['precision']}), {env['cpu']}, {env['threads']} threads, {env['num_prompts']} "
            f"prompts, {env['max_new_tokens']} new tokens, medians of {env['repeats']} interleaved rounds with half of "
            f"their 95 % confidence intervals; {_texts(report['reference'])}; "
            f"{', '.join(f'{name} {version} ({where})' for where, name, version in own + versions)}.\n"
        )
        parts.append(markdown_from_rows(peers["rows"]))
        parts += [f"Left out: {name}: {' '.join(reason.split())}\n" for name, reason in peers["left_out"].items()]
    return "\n".join(parts)


def _texts(reference: Report) -> str:
    if (why := reference.get("not_run")) is not None:
        return f"texts not compared: {' '.join(why.split())}"
    return f"texts: equal to those of transformers {reference['versions']['transformers']} in float32"


def plot(reports: Sequence[Report], file: Path) -> None:
    """Writes bars of tokens/s as an SVG file: a panel for each report, a group for each mode."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "speccompile", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(reports), figsize=(4.5 * len(reports), 3.2), squeeze=False)
    for panel, report in zip(panels[0], reports, strict=True):
        precision = report["peers"]["precision"]
        rows = [row for row in report["peers"]["rows"] if row["precision"] == precision and row["mode"] in MODES]
        engines = list(dict.fromkeys(row["engine"] for row in rows))
        width = 0.8 / max(len(engines), 1)
        for at, engine in enumerate(engines):
            speeds = {row["mode"]: row["tokens_per_s"] for row in rows if row["engine"] == engine}
            bars = [MODES.index(mode) + (at - (len(engines) - 1) / 2) * width for mode in speeds]
            panel.bar(bars, list(speeds.values()), width * 0.9, label=engine)
        panel.set_xticks(range(len(MODES)), MODES)
        panel.set_title(precision)
        panel.set_ylabel("decode tokens/s")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][-1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every bundle and write the three files."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="bundles of one target, one for each precision")
    parser.add_argument("--peers", default="all")
    parser.add_argument("--prompts", default="examples/prompts.jsonl")
    parser.add_argument("--out", type=Path, default=Path("build/comparison"))
    options = parser.parse_args(given[:split])
    more = ["--prompts", options.prompts, *given[split + 1 :]]
    reports = [measure(bundle, options.peers, more) for bundle in options.bundles]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    (options.out / "table.md").write_text(markdown_from_reports(reports), encoding="utf-8")
    try:
        plot(reports, options.out / "plot.svg")
    except ImportError as error:
        print(f"no plot: {error}; install speccompile[bench]", file=sys.stderr)
    print(options.out)


if __name__ == "__main__":
    main()
