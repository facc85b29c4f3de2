# SPDX-License-Identifier: Apache-2.0
"""The record of a plan, written beside it when it is built and compared when it is loaded."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccompile.backends.tensorrt.profiles import Profile
from speccompile.common.json_reader import read_json_object
from speccompile.errors import BundleError

_REBUILD = "Build the bundle again here, or install what it was built with."


def record_file(plan: Path) -> Path:
    """Returns the file of the record of a plan."""
    return plan.with_suffix(".json")


def make_record(
    source: Path,
    settings: Mapping[str, Any],
    profiles: Sequence[Profile],
    built: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the record of a plan that was just built.

    Args:
        source: the lowered ONNX it was built from.
        settings: of the builder.
        profiles: with their dims by name.
        built: the report of the builder's process.

    Returns:
        {"variant", "version", "platform", "compute_capabilities", "plugins", "plugin_form", "plugin_abi",
        "plugin_layers": {op: layers of the network}, "flags", "cleared_flags", "workspace_gib", "optimization_level",
        "profiles", "plan_bytes", "lowered_weights_bytes": in `source`,
        "build": {"stages", "peak_rss_bytes", "parent_rss_bytes", "lowering_peak_bytes"}}.
    """
    return {
        "variant": built["variant"],
        "version": built["version"],
        "platform": f"{platform.system().lower()}-{platform.machine()}",
        "compute_capabilities": list(settings["compute_capabilities"]),
        "plugins": list(settings["plugins"]),
        "plugin_form": settings["plugin_form"],
        "plugin_abi": plugin_abi_of(bool(settings["plugins"])),
        "plugin_layers": dict(built["plugin_layers"]),
        "flags": list(settings["flags"]),
        "cleared_flags": list(settings["cleared_flags"]),
        "workspace_gib": settings["workspace_gib"],
        "optimization_level": settings["optimization_level"],
        "profiles": [profile.json_from_profile() for profile in profiles],
        "plan_bytes": built["plan_bytes"],
        "lowered_weights_bytes": weights_bytes_of(source),
        "build": {k: built[k] for k in ("stages", "peak_rss_bytes", "parent_rss_bytes", "lowering_peak_bytes")},
    }


def weights_bytes_of(source: Path) -> int:
    """Returns the bytes of the weights of an ONNX file, except those in its subgraphs, without reading them."""
    import onnx_ir as ir

    tensors = [v.const_value for v in ir.load(source).graph.initializers.values()]
    return sum(t.nbytes for t in tensors if t is not None)


def plugin_abi_of(has_plugins: bool) -> dict[str, Any] | None:
    """Returns the plugin ABI of plans with plugins; None for plans without."""
    if not has_plugins:
        return None
    from speccompile.backends.tensorrt.plugins import plugin_abi

    return dict(plugin_abi())


def plugins_to_register(*records: Mapping[str, Any]) -> list[str]:
    """Returns the plugins of plans that must be registered before they are loaded."""
    return sorted({op for record in records if record.get("plugin_form") != "aot" for op in record["plugins"]})


def write_record(plan: Path, record: Mapping[str, Any]) -> None:
    """Write the record beside the plan."""
    record_file(plan).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(plan: Path) -> dict[str, Any]:
    """Returns the record beside a plan.

    Raises:
        BundleError: it is missing or damaged.
    """
    path = record_file(plan)
    record = read_json_object(path, BundleError, "Build the bundle again.", "the record of the plan")
    if not {"variant", "version", "plugins", "profiles"} <= set(record):
        raise BundleError(str(path), "something else", "the record of the plan", "Build the bundle again.")
    return record


def check_record(plan: Path, record: Mapping[str, Any], max_slots: int) -> None:
    """Compare a plan's record with what is installed and with the sizes asked for. Nothing is deserialised.

    Raises:
        BundleError: another variant or version, another plugin ABI, a GPU it was not built for, too few slots, or a
            plan of another size.
        BuildError: the variant is not installed.
    """
    from speccompile.backends.tensorrt.import_helper import find_compute_capabilities, load_tensorrt

    variant = load_tensorrt(str(record["variant"]))
    if variant.version != record["version"]:
        got, expected = f"{variant.name} {variant.version}", f"{record['version']}, which built the plan"
        raise BundleError(str(plan), got, expected, _REBUILD)
    machine = f"{platform.system().lower()}-{platform.machine()}"
    if record.get("platform") != machine:
        raise BundleError(str(plan), f"a plan for {record.get('platform')}", machine, _REBUILD)
    abi = plugin_abi_of(bool(record["plugins"]))
    if abi != record.get("plugin_abi"):
        raise BundleError(str(plan), f"plugins {abi}", f"{record.get('plugin_abi')}, as in the plan", _REBUILD)
    named, here = record.get("compute_capabilities", []), find_compute_capabilities()
    if named and here and not {f"{major}.{minor}" for major, minor in here} & set(named):
        got = f"a GPU of compute capability {here[0][0]}.{here[0][1]}"
        todo = "Name it in engine.tensorrt.compute_capabilities and build again."
        raise BundleError(str(plan), got, f"one of {', '.join(named)}", todo)
    slots = max(int(p["sizes"]["batch"][2]) for p in record["profiles"])
    if slots < max_slots:
        todo = "Build with this engine.max_batch_size."
        raise BundleError(str(plan), f"profiles of at most {slots} slots", f"{max_slots}", todo)
    size = plan.stat().st_size
    if size != record.get("plan_bytes"):
        raise BundleError(str(plan), f"{size} bytes", f"{record.get('plan_bytes')} bytes", "Build the bundle again.")
