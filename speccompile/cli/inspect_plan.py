# SPDX-License-Identifier: Apache-2.0
"""What `speccompile inspect` shows of a TensorRT plan: the record of its build. Reading its bytes could run code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speccompile.errors import BundleError

PLAN_SUFFIX = ".plan"


def facts_from_plan_file(path: Path) -> tuple[dict[str, Any], BundleError | None]:
    """Returns the facts about a plan, and what is wrong with the digests of plan and record, or None.

    Raises:
        BundleError: there is no record beside the plan, or it is damaged or of another plan.
    """
    plan, fault = plan_facts(path)
    recorded = plan["recorded"] or {}
    sides = {side: recorded.get(side, []) for side in ("inputs", "outputs")}
    graph = {**sides, "op_histogram": {}, "plan": plan}
    facts = {"kind": "plan", "path": str(path), "size_bytes": path.stat().st_size, "graphs": {path.stem: graph}}
    return facts, fault


def plan_facts(path: Path) -> tuple[dict[str, Any], BundleError | None]:
    """Returns {"recorded": the record of its build, "digests": whether a manifest vouches for both}, and what is wrong.

    Inside a bundle the record is shown only where the manifest has its digest and the plan's; else it is None.
    """
    from speccompile.backends.tensorrt.records import read_record, record_file
    from speccompile.bundle.format import MANIFEST, check_files, read_json

    folder = next((f for f in path.resolve().parents if (f / MANIFEST).is_file()), None)
    if folder is None:
        return {"recorded": _record_beside(path), "digests": "not compared, as there is no manifest"}, None
    try:
        files = read_json(folder / MANIFEST).get("files", {})
        wanted = [f.resolve().relative_to(folder).as_posix() for f in (path, record_file(path))]
        missing = [name for name in wanted if name not in files]
        if missing:
            raise BundleError(str(folder / MANIFEST), f"no digest of {missing[0]}", "one", "Build the bundle again.")
        check_files(folder, {name: files[name] for name in wanted})
        return {"recorded": read_record(path), "digests": "hold"}, None
    except BundleError as fault:
        return {"recorded": None, "digests": "do not hold"}, fault


def _record_beside(path: Path) -> dict[str, Any]:
    from speccompile.backends.tensorrt.records import read_record, record_file

    if not record_file(path).is_file():
        expected = f"{record_file(path).name} beside it, the record of its build"
        todo = "Name the plan where it was built, in its bundle: the bytes of a plan alone are not read."
        raise BundleError(str(path), "a plan alone", expected, todo)
    record, size = read_record(path), path.stat().st_size
    if record.get("plan_bytes") != size:
        got, expected = f"{size} bytes", f"{record.get('plan_bytes')} bytes, as in the record beside it"
        raise BundleError(str(path), got, expected, "Name the plan where it was built.")
    return record


def print_plan(console: Console, plan: dict[str, Any]) -> None:
    """Prints what was recorded when the plan was built."""
    from speccompile.bundle.report import text_from_bytes

    recorded = plan["recorded"]
    if recorded is None:
        console.print(f"nothing recorded is shown: digests {plan['digests']}", style="dim")
        return
    layers = recorded.get("plugin_layers", {})
    rows = [("variant", f"{recorded['variant']} {recorded['version']}, {recorded['platform']}")]
    rows += [
        (
            f"profile {p['name']}",
            ", ".join(f"{dim} {low}/{best}/{high}" for dim, (low, best, high) in p["sizes"].items()),
        )
        for p in recorded["profiles"]
    ]
    stages = ", ".join(f"{s['name']} {s['seconds']:.2f} s" for s in recorded["build"]["stages"])
    rows += [
        ("GPUs", ", ".join(recorded["compute_capabilities"]) or "as the variant chose"),
        ("flags", ", ".join(recorded["flags"]) or "none"),
        ("plugins", ", ".join(f"{name} in {count} layers" for name, count in layers.items()) or "none"),
        ("plugin ABI", str(recorded["plugin_abi"]) if recorded["plugins"] else "no plugins"),
        ("weights", f"{text_from_bytes(recorded['lowered_weights_bytes'])} in the lowered graph"),
        ("build", f"{stages}, peak memory {text_from_bytes(recorded['build']['peak_rss_bytes'])}"),
    ]
    console.print(f"recorded at the build, digests {plan['digests']}", style="dim")
    table = Table("", "", box=None, show_header=False)
    for label, value in rows:
        table.add_row(Text(label), Text(value))
    console.print(table)
