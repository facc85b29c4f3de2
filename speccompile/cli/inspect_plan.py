# SPDX-License-Identifier: Apache-2.0
"""What `speccompile inspect` says of a TensorRT plan, which is parsed, never deserialised: that could run its code."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from speccompile.errors import BundleError

PLAN_SUFFIX = ".plan"
_MAX_KERNELS = 12


def facts_from_plan_file(path: Path) -> tuple[dict[str, Any], BundleError | None]:
    """Facts about a plan, alone or in a bundle.

    Returns:
        The facts, and what is wrong with the bundle's digests of the plan and its record, or None.

    Raises:
        BundleError: the file is no plan, or was cut short.
    """
    plan, fault = plan_facts(path)
    tensors = plan["from_bytes"]["tensors"]
    graph = {
        "inputs": [_value(t) for t in tensors if not t["is_output"]],
        "outputs": [_value(t) for t in tensors if t["is_output"]],
        "op_histogram": {},
        "plan": plan,
    }
    facts = {"kind": "plan", "path": str(path), "size_bytes": path.stat().st_size, "graphs": {path.stem: graph}}
    return facts, fault


def plan_facts(path: Path) -> tuple[dict[str, Any], BundleError | None]:
    """{"from_bytes": what was recognised in the file, "recorded": the record of its build or None, "digests"}.

    The record is believed only where the manifest of the bundle around it has its digest and the plan's.

    Raises:
        BundleError: see `plan_file.read_plan`.
    """
    from speccompile.backends.tensorrt.plan_file import read_plan
    from speccompile.backends.tensorrt.records import read_record, record_file
    from speccompile.runtime.bundle import MANIFEST, check_files, read_json

    from_bytes = read_plan(path).json_from_facts()
    folder = next((f for f in path.resolve().parents if (f / MANIFEST).is_file()), None)
    if folder is None:
        return {"from_bytes": from_bytes, "recorded": None, "digests": "no manifest around it"}, None
    try:
        files = read_json(folder / MANIFEST).get("files", {})
        wanted = [f.resolve().relative_to(folder).as_posix() for f in (path, record_file(path))]
        missing = [name for name in wanted if name not in files]
        if missing:
            raise BundleError(str(folder / MANIFEST), f"no digest of {missing[0]}", "one", "Build the bundle again.")
        check_files(folder, {name: files[name] for name in wanted})
        recorded = read_record(path)
    except BundleError as fault:
        return {"from_bytes": from_bytes, "recorded": None, "digests": "do not hold"}, fault
    return {"from_bytes": from_bytes, "recorded": recorded, "digests": "hold"}, None


def _value(tensor: dict[str, Any]) -> dict[str, Any]:
    dims = ["?" if dim < 0 else dim for dim in tensor["dims"]]
    return {"name": tensor["name"], "dims": dims, "dtype": tensor["dtype"]}


def print_plan(console: Console, plan: dict[str, Any]) -> None:
    """What stands in the plan's bytes, then what was recorded when it was built."""
    from speccompile.bundling.report import text_from_bytes

    seen, recorded = plan["from_bytes"], plan["recorded"]
    sections = ", ".join(f"{name} {text_from_bytes(size)}" for name, size in seen["sections"].items())
    plugins = ", ".join(f"{_plugin_name(p)} in {p['num_layers']} layers" for p in seen["plugins"])
    kernels: Counter[str] = Counter()
    for counts in seen["kernels"]:
        kernels.update(counts)
    rows = [
        ("TensorRT", seen["version"]),
        ("sections", sections or "not recognised"),
        ("compiled for", ", ".join(seen["accelerators"]) or "not recognised"),
        ("profiles", str(seen["num_profiles"])),
        ("plugins", plugins or "none"),
        ("scratch", ", ".join(text_from_bytes(size) for size in seen["scratch_bytes"]) or "not recognised"),
        ("kernels", _short(kernels) or "not recognised"),
    ]
    _print_rows(console, "read from the plan's bytes", rows)
    if recorded is None:
        console.print(f"nothing recorded is shown: digests {plan['digests']}", style="dim")
        return
    rows = [("flavour", f"{recorded['flavour']} {recorded['version']}, {recorded['platform']}")]
    rows += [
        (
            f"profile {p['name']}",
            ", ".join(f"{dim} {low}/{best}/{high}" for dim, (low, best, high) in p["sizes"].items()),
        )
        for p in recorded["profiles"]
    ]
    stages = ", ".join(f"{s['name']} {s['seconds']:.2f} s" for s in recorded["build"]["stages"])
    rows += [
        ("GPUs", ", ".join(recorded["compute_capabilities"]) or "as the flavour chose"),
        ("flags", ", ".join(recorded["flags"]) or "none"),
        ("plugin ABI", str(recorded["plugin_abi"]) if recorded["plugins"] else "no plugins"),
        ("build", f"{stages}, peak memory {text_from_bytes(recorded['build']['peak_rss_bytes'])}"),
    ]
    _print_rows(console, "recorded at the build, digests hold", rows)


def _plugin_name(plugin: dict[str, Any]) -> str:
    namespace = f"{plugin['namespace']}::" if plugin["namespace"] else ""
    return f"{namespace}{plugin['name']} version {plugin['version']}"


def _short(kernels: Counter[str]) -> str:
    shown = ", ".join(f"{name} {count}" for name, count in kernels.most_common(_MAX_KERNELS))
    left = len(kernels) - _MAX_KERNELS
    return f"{sum(kernels.values())}: {shown}" + (f" and {left} more kinds" if left > 0 else "") if kernels else ""


def _print_rows(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    console.print(title, style="dim")
    table = Table("", "", box=None, show_header=False)
    for label, value in rows:
        table.add_row(Text(label), Text(value))
    console.print(table)
