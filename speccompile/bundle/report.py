# SPDX-License-Identifier: Apache-2.0
"""The last stage of a build: tokenizer, report, manifest; and the tables and texts that commands share with it."""

from __future__ import annotations

import datetime
import html
import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from speccompile.backends.distance import Distance
from speccompile.bundle.format import (
    MANIFEST,
    SCHEMA_VERSION,
    digest_from_manifest,
    digests_from_folder,
    versions_from_environment,
    write_json,
)
from speccompile.bundle.tokenizers import copy_tokenizer
from speccompile.checkpoints.checkpoint import special_tokens
from speccompile.checkpoints.vision import image_record
from speccompile.recipe.models import recipe_model
from speccompile.recipe.plan import BuildPlan
from speccompile.version import VERSION

_NUMBER = re.compile(r"-?[\d.,]+( (B|KiB|MiB|GiB|ms|s))?")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2433; max-width: 62rem; margin: 2.5rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin-top: 2.2rem } p.sub { color: #667085 }
table { border-collapse: collapse; margin: .6rem 0 } th { font-weight: 600; color: #475467 }
td, th { text-align: left; padding: .22rem .9rem .22rem 0; border-bottom: 1px solid #e4e7ec; vertical-align: top }
td { overflow-wrap: anywhere }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.bar { display: inline-block; height: .7em; background: #5b8def; border-radius: 2px } .cached { background: #c4cbd8 }
code { font: 13px ui-monospace, monospace; overflow-wrap: anywhere } summary { color: #667085; cursor: pointer }
@media (max-width: 48rem) { body { margin: 1rem auto } table, tr, td { display: block; max-width: 100% }
th { display: none } tr { border-bottom: 1px solid #98a2b3; padding: .4rem 0 } td, td.n { text-align: left; padding: 0 }
td { border: 0 } td[data-of]::before { content: attr(data-of) ": "; color: #667085 } td:empty { display: none } }
@media (prefers-color-scheme: dark) { body { background: #12151c; color: #dfe3ea } td, th { border-color: #2b3140 }
th, p.sub { color: #98a2b3 } .cached { background: #444c5c } }
"""


def html_from_manifest(manifest: Mapping[str, Any]) -> str:
    """Returns the page of a manifest (its `digest` and the report's own file record may still be missing)."""
    recipe, changed, rest = manifest["recipe"], list[tuple[str, str]](), list[tuple[str, str]]()
    for key, value in dotted_keys(recipe):
        (rest if is_default(recipe, key, value) else changed).append((key, text_from_value(value)))
    title = f"{str(recipe['target']['model']).rstrip('/').split('/')[-1]} · {recipe['speculator']['method']}"
    subtitle = f"speccompile {manifest['speccompile_version']}, {manifest['created_at']}"
    parts = [
        f"<h1>{text_of(title)}</h1><p class=sub>{text_of(subtitle)}</p>",
        table(("", ""), summary(manifest)),
        "<h2>Recipe</h2>",
        table(("key", "value"), changed),
        f"<details><summary>{len(rest)} keys with their defaults</summary>{table(('key', 'value'), rest)}</details>",
        "<h2>Stages</h2>",
        _stages(manifest["stages"]),
        "<h2>Files</h2>",
        _files(manifest["files"]),
    ]
    for name, graph in manifest["graphs"].items():
        parts.append(_graph(name, graph))
    if manifest.get("acceptance"):
        parts += ["<h2>Acceptance</h2>", table(("measure", "value"), manifest["acceptance"].items())]
    parts += ["<h2>Versions</h2>", table(("package", "version"), manifest["versions"].items())]
    return page_from_parts(title, parts)


def summary(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what a reader wants to know first: what was built, its size, and how fast the target is."""
    recipe, graphs = manifest["recipe"], manifest["graphs"]
    target: Mapping[str, Any] = next((graph for graph in graphs.values() if graph.get("role") == "target"), {})
    tuning, stages = target.get("tuning") or {}, manifest["stages"]
    rows = [
        ("target", str(recipe["target"]["model"])),
        ("method", str(recipe["speculator"]["method"])),
        ("backend and device", f"{recipe['engine']['backend']}, {recipe['engine']['device']}"),
        ("weights", f"{target.get('quantization', 'none')}, kernels {target.get('form', '')}{_kinds(target)}"),
        ("size", text_from_bytes(sum(record["size_bytes"] for record in manifest["files"].values()))),
        ("built in", f"{sum(stage['seconds'] for stage in stages):.3g} s"),
    ]
    if (step_ms := tuning.get("step_ms") or {}).get("1"):
        fast = f"{step_ms['1']:.3g} ms, {1e3 / step_ms['1']:.3g} tokens/s without drafts"
        rows.append(("a step of one token", f"{fast}, {tuning.get('threads')} threads"))
    return rows


def _kinds(graph: Mapping[str, Any]) -> str:
    if not (held := graph.get("weights")):
        return ""
    parts = [f"{size / 1e6:.1f} M of {kind}" for kind, size in held["grids"].items()]
    return ": " + "; ".join(parts + [f"{held['floats'] / 1e6:.1f} M floats"] * bool(held["floats"]))


def is_default(recipe: Mapping[str, Any], key: str, value: object) -> bool:
    """Returns whether a dotted key of a recipe has the value that it has where nobody writes it."""
    section, _, name = key.partition(".")
    model: Any = recipe_model(str(recipe["speculator"]["method"])).model_fields.get(section)
    field = getattr(getattr(model, "annotation", None), "model_fields", {}).get(name)
    if field is None or field.is_required():
        return False
    return bool(json.dumps(field.get_default(call_default_factory=True), default=str) == json.dumps(value, default=str))


def dotted_keys(recipe: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Returns ("section.key", value) of every key of a recipe, nested sections included."""
    rows: list[tuple[str, Any]] = []
    for key, value in recipe.items():
        rows += dotted_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return rows


def text_from_value(value: object) -> str:
    """Returns a value as in a recipe: null, true and lists as in JSON, texts without quotes where possible."""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        is_read_back = yaml.safe_load(value) == value
    except yaml.YAMLError:
        is_read_back = False
    return value if is_read_back else json.dumps(value, ensure_ascii=False)


def text_from_bytes(size: float) -> str:
    """Returns e.g. "1.5 KiB" for 1536."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _graph(name: str, graph: Mapping[str, Any]) -> str:
    parts = [f"<h2>Graph <code>{text_of(name)}</code></h2>"]
    if dims := graph.get("dims"):
        parts.append(f"<p>{text_of(_list(dims))}</p>")
    if histogram := graph.get("op_histogram"):
        ops = sorted({**histogram["before"], **histogram["after"]})
        rows = [(op, histogram["before"].get(op, 0), histogram["after"].get(op, 0)) for op in ops]
        total = ("all", sum(histogram["before"].values()), sum(histogram["after"].values()))
        parts.append(table(("operator", "before the passes", "after"), [*rows, total]))
    if passes := graph.get("passes"):
        columns = ("name", "num_rewrites", "num_nodes_before", "num_nodes_after", "time_ms")
        parts.append(table(columns, [[p[c] for c in columns] for p in passes]))
    if record := graph.get("tensorrt"):
        parts.append(_plan(record))
    tuning = graph.get("tuning") or {}
    tried = tuning.get("tried") or []
    if tried:
        nodes = sorted(tried[0]["step_ms"], key=int)
        head = ("threads", *(f"{n} nodes, ms" for n in nodes))
        parts.append(table(head, [[t["threads"], *(t["step_ms"][n] for n in nodes)] for t in tried]))
        parts.append(
            f"<p>Chosen: {text_of(tuning['threads'])} threads on {text_of(tuning.get('cpu', 'this machine'))}.</p>"
        )
    if measured := graph.get("forms_measured"):
        rows = [(form, *times.values()) for form, times in measured.items()]
        head = ("kernel form", *(f"{n} nodes, ms" for n in next(iter(measured.values()))))
        why = ", the fastest of those near float32, or the nearest" if graph.get("form_distances") else ""
        parts += [table(head, rows), f"<p>Chosen: {text_of(graph['form'])}{why}.</p>"]
    if distances := graph.get("form_distances"):
        summaries = [(form, Distance.from_json(row).summary()) for form, row in distances.items()]
        parts.append(table(("kernel form", "distance from float32"), summaries))
    if calibration := graph.get("calibration"):
        told = f"{calibration['num_linears']} linears over {calibration['num_tokens']} tokens"
        parts.append(f"<p>int4 weights were chosen to keep the outputs of {told}, {text_of(calibration['texts'])}.</p>")
    if checks := graph.get("checks"):
        parts.append(f"<p>Checks: {text_of(_list(checks))}</p>")
    return "".join(parts)


def _plan(record: Mapping[str, Any]) -> str:
    opened = ("profiles", "build", "plugin_layers", "plugin_abi")
    rows = [(k, ", ".join(map(str, v)) if isinstance(v, list) else v) for k, v in record.items() if k not in opened]
    for profile in record["profiles"]:
        sizes = ", ".join(f"{dim} {'/'.join(map(str, size))}" for dim, size in profile["sizes"].items())
        rows.append((f"profile {profile['name']}", sizes))
    stages = [(s["name"], s["seconds"], text_from_bytes(s["peak_rss_bytes"])) for s in record["build"]["stages"]]
    return table(("plan", ""), rows) + table(("builder", "seconds", "peak memory"), stages)


def _stages(stages: Sequence[Mapping[str, Any]]) -> str:
    longest = max((s["seconds"] for s in stages), default=0) or 1
    rows = []
    for stage in stages:
        width = 12 * stage["seconds"] / longest
        bar = f"<span class='bar{' cached' * stage['cached']}' style='width:{width:.2f}rem'></span>"
        memory = "from the cache" if stage["cached"] else text_from_bytes(stage["peak_rss_bytes"])
        memory = stage.get("skipped") or stage.get("note") or memory
        cells = (text_of(stage["name"]), f"{stage['seconds']:.3g} s", text_of(memory), bar)
        marks = ("", " class=n data-of=time", ' data-of="peak memory"', "")
        rows.append("<tr>" + "".join(f"<td{m}>{c}</td>" for m, c in zip(marks, cells, strict=True)) + "</tr>")
    return f"<table><tr><th>stage<th class=n>time<th>peak memory<th></tr>{''.join(rows)}</table>"


def _files(files: Mapping[str, Any]) -> str:
    rows = [(name, text_from_bytes(f["size_bytes"]), f["sha256"][:16]) for name, f in files.items()]
    total = text_from_bytes(sum(f["size_bytes"] for f in files.values()))
    return table(("file", "size", "sha256"), [*rows, ("all", total, "")])


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table with columns of numbers aligned right; on a phone a row is a list of titles and values."""
    cells = [[text_of(text_from_number(cell) if isinstance(cell, float) else cell) for cell in row] for row in rows]
    labels = [f' data-of="{text_of(title)}"' if title else "" for title in head]
    columns = ([row[i] for row in cells if i < len(row) and row[i]] for i in range(len(head)))
    marks = [" class=n" * (bool(column) and all(map(_NUMBER.fullmatch, column))) for column in columns]
    titles = "".join(f"<th{mark}>{text_of(title)}</th>" for mark, title in zip(marks, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{m}{of}>{cell}</td>" for m, of, cell in zip(marks, labels, row, strict=False)) + "</tr>"
        for row in cells
    )
    return f"<table><tr>{titles}</tr>{body}</table>"


def _list(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_plain(value)}" for key, value in facts.items())


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def text_from_number(value: float) -> str:
    """Returns a number with three digits, whole ones from 1000 on with all of theirs."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def text_of(value: object) -> str:
    """Returns a value as text of a page: strings as they are, others as JSON, escaped."""
    return html.escape(_plain(value))


def page_from_parts(title: str, parts: Iterable[str]) -> str:
    """Returns a page without scripts and without links to elsewhere."""
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    head += f"<title>{text_of(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


REPORT, RECIPE = "report.html", "recipe.yaml"


def write_bundle_files(
    folder: Path, plan: BuildPlan, target_source: Path, graphs: dict[str, Any], stages: Sequence[dict[str, Any]]
) -> None:
    """Writes everything of a bundle in `folder` that is not a graph; the manifest, with the others' digests, last."""
    recipe = json.loads(json.dumps(plan.recipe_from_plan()))
    (folder / RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
    tokenizer = copy_tokenizer(target_source, folder / "tokenizer")
    eos_token_ids, bos_token_id = special_tokens(target_source)
    manifest: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "speccompile_version": VERSION,
        "git_sha": git_sha(),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "recipe": recipe,
        "versions": versions_from_environment(),
        "graphs": graphs,
        "files": digests_from_folder(folder),
        "tokenizer": tokenizer,
        "eos_token_ids": eos_token_ids,
        "bos_token_id": bos_token_id,
        "stages": list(stages),
    }
    if plan.vision is not None:
        manifest["images"] = image_record(target_source, plan.weights)
    (folder / REPORT).write_text(html_from_manifest(manifest), encoding="utf-8")
    manifest["files"].update({k: v for k, v in digests_from_folder(folder).items() if k == REPORT})
    # Through JSON once, so that the digest is over what a reader loads (tuples become lists).
    manifest = json.loads(json.dumps(manifest))
    manifest["digest"] = digest_from_manifest(manifest)
    write_json(folder / MANIFEST, manifest)


def git_sha() -> str | None:
    """Returns the commit of speccompile's source tree, with a "+" when it has changes; None outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        sha = _git(root, "rev-parse", "HEAD")
        return sha + ("+" if _git(root, "status", "--porcelain", "--", "speccompile") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
