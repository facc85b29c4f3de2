#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every method on one target: chain against tree, both against plain decoding in the same run.

    python bench/methods.py --prompts PROMPTS [--target FOLDER] [--rows prophet:auto,...] [--json OUT]

Builds recipes/pycode-<name>.yaml once a row with the settings of that row (under --work, kept between runs), runs
`speccompile bench` on each, and prints a Markdown table. Plain and speculative rounds are interleaved within a row, and
the ratio is the quotient of their medians; `+-` is half of its 95 % confidence interval. Rows follow one another, so
compare ratios, not tokens/s, between rows. Texts are compared with transformers' in float32. Costs that were recorded
on a busy machine mislead what is `auto`: --build-only builds, and --retune measures the costs anew before each row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from speccompile.backends.base import LoadJob
from speccompile.backends.onnxruntime.tune import measure_graph
from speccompile.benchmark.tables import equal_texts
from speccompile.bundle.bundle import read_bundle
from speccompile.bundle.format import digest_from_manifest, weights_beside

ROOT = Path(__file__).resolve().parents[1]
CHAIN, AUTO = {"speculator.tree": "chain"}, {"speculator.tree": "auto"}


def forms_of(length: int | None) -> dict[str, dict[str, Any]]:
    """Settings by form: as long as it pays (chain, tree), and always of one shape (fixed, wide).

    Args:
        length: drafts of a fixed chain, depth of a fixed tree whose root has three children; None: no fixed forms.
    """
    forms = {"chain": CHAIN, "tree": AUTO}
    if length is None:
        return forms
    wide = {"speculator.tree": "{widths: [" + ", ".join(["3"] + ["1"] * (length - 1)) + "]}"}
    return {**forms, "fixed": CHAIN | {"speculator.num_draft_tokens": length}, "wide": wide}


LENGTHS: dict[str, int | None] = {
    "draft": 4,
    "mlp": 4,
    "eagle3": 5,
    "eagle31": 5,
    "dflash2": 5,
    "glide": 5,
    "prophet": 5,
    "early-exit": None,
}
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    **{name: forms_of(length) for name, length in LENGTHS.items()},
    "ngram": {"chain": {}},
    "suffix": {"chain": CHAIN, "tree": AUTO},
    "several": {"chain": {}},
}
# A chain of all its heads is as long as it can be.
ROWS["medusa"] = {"chain": CHAIN, "tree": AUTO, "wide": forms_of(4)["wide"]}
# Its module lies in the files of a target of its own: named alone, with `--target` where that is padded.
INSIDE = {"hybrid-mtp": ROOT / "examples/models/pycode-hybrid"}
ROWS["hybrid-mtp"] = {"chain": {}}
RECIPES = {"draft": "pycode"}  # the others are pycode-<name>
HEAD = ("method", "drafts", "acceptance length", "plain tokens/s", "tokens/s", "ratio to plain", "texts")


def build(name: str, form: str, settings: dict[str, Any], target: Path, work: Path, extra: list[str]) -> Path:
    """Builds the row's bundle where it is not there yet; returns its folder."""
    bundle = work / f"{target.name}-{name}-{form}"
    if not (bundle / "manifest.json").is_file():
        recipe = ROOT / "recipes" / f"{RECIPES.get(name, f'pycode-{name}')}.yaml"
        sets = {"target.model": str(target), **settings}
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        words += [word for item in extra for word in ("--set", item)]
        call("build", str(recipe), "-o", str(bundle), *words)
    return bundle


def call(*words: str) -> None:
    """Run speccompile; its output is shown only where it fails."""
    done = subprocess.run([sys.executable, "-m", "speccompile", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"speccompile {' '.join(words)}\n{done.stderr}{done.stdout}")


def retune(bundle: Path, known: dict[str, dict[str, Any]] | None) -> None:
    """Write other step costs into a bundle's manifest.

    Args:
        bundle: its folder.
        known: costs by the graph's digest; what is missing is measured, equal graphs once. None: no costs, so that
            nothing is left out because it would not pay.
    """
    opened = read_bundle(bundle)
    for name, record in opened.graphs.items():
        if "tuning" in record and known is None:
            record["tuning"].pop("step_ms", None)
        elif "tuning" in record and known is not None:
            path, graphs = opened.graph_path(name), [g for g, r in opened.graphs.items() if "tuning" in r]
            others = weights_beside(path, map(opened.graph_path, graphs))
            digest = hashlib.sha256(path.read_bytes()).hexdigest() + f" {others}"
            if digest not in known:
                known[digest] = measure_graph(LoadJob(path, opened.graph_spec(name), others_bytes=others))
            record["tuning"] = known[digest]
    opened.manifest["digest"] = digest_from_manifest(opened.manifest)
    (bundle / "manifest.json").write_text(json.dumps(opened.manifest, indent=1) + "\n")


def measure(bundle: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the report of one run of `speccompile bench`."""
    out = bundle.with_suffix(".bench.json")
    numbers = {"--limit": args.limit, "--max-new-tokens": args.max_new_tokens, "--repeats": args.repeats}
    words = [word for key, value in numbers.items() for word in (key, str(value))]
    words += ["--threads", str(args.threads)] if args.threads else []
    modes = ("--modes", "plain,speculative")
    call("bench", str(bundle), "--prompts", str(args.prompts), *modes, *words, "--json", str(out))
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def row_from_report(name: str, form: str, report: dict[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a row, see `HEAD`."""
    plain, spec = report["modes"]["plain"], report["modes"]["speculative"]
    speeds = (f"{plain['tokens_per_s']:.1f}", f"{spec['tokens_per_s']:.1f}")
    ratio = f"{spec['of_plain']:.3f}"
    if spec["of_plain_spread"] is not None:
        ratio += f" +-{spec['of_plain_spread']:.3f}"
    return (name, form, f"{spec['mean_acceptance_length']:.2f}", *speeds, ratio, equal_texts(spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="of all rows; pycode-16m by default, and the hybrid for its module")
    parser.add_argument("--rows", help="name or name:form, comma-separated; all of pycode-16m by default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every build")
    parser.add_argument("--work", type=Path, default=ROOT / "bundles/methods")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--retune", action="store_true")
    parser.add_argument("--forget-costs", action="store_true", help="draft always, for acceptance alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = set(args.rows.split(",")) if args.rows else {*ROWS} - {*INSIDE}
    known = {*ROWS, *(f"{name}:{form}" for name, forms in ROWS.items() for form in forms)}
    if unknown := sorted(wanted - known):
        parser.error(f"--rows: got {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
    reports: dict[str, Any] = {}
    costs: dict[str, dict[str, Any]] = {}
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    for name, forms in ROWS.items():
        for form, settings in forms.items():
            if not wanted & {name, f"{name}:{form}"}:
                continue
            target = args.target or INSIDE.get(name, ROOT / "examples/models/pycode-16m")
            bundle = build(name, form, settings, target.resolve(), args.work, args.set)
            if args.build_only:
                continue
            if args.retune or args.forget_costs:
                retune(bundle, None if args.forget_costs else costs)
            reports[f"{name}:{form}"] = report = measure(bundle, args)
            print("| " + " | ".join(row_from_report(name, form, report)) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
