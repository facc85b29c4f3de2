# SPDX-License-Identifier: Apache-2.0
"""The record of a plan, written beside it when it is built and compared when it is loaded."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccompile.backends.tensorrt.profiles import Profile
from speccompile.backends.tensorrt.variants import VARIANTS, Capabilities
from speccompile.common.json_reader import read_json_object
from speccompile.errors import BundleError

_REBUILD = "Build the bundle again here, or install what it was built with."


def record_file(plan: Path) -> Path:
    return plan.with_suffix(".json")


def machine_name() -> str:
    """Returns the operating system and the processor's architecture: linux-x86_64."""
    return f"{platform.system().lower()}-{platform.machine()}"


def make_record(
    source: Path, settings: Mapping[str, Any], profiles: Sequence[Profile], built: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the record of a plan that was just built.

    Returns:
        {"variant", "version", "platform", "compute_capabilities", "plugins", "plugin_abi", "plugin_layers": {op: layers
        of the network}, "flags", "cleared_flags", "workspace_gib", "optimization_level", "profiles", "plan_bytes",
        "lowered_weights_bytes": in `source`, "build": {"stages", "peak_rss_bytes", "parent_rss_bytes",
        "lowering_peak_bytes"}}.
    """
    return {
        "variant": built["variant"],
        "version": built["version"],
        "platform": machine_name(),
        "compute_capabilities": list(settings["compute_capabilities"]) or _own_capability(VARIANTS[built["variant"]]),
        "plugins": list(settings["plugins"]),
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


def _own_capability(can: Capabilities) -> list[str]:
    from speccompile.backends.tensorrt.import_helper import find_compute_capabilities

    # Such a variant builds for the GPU at hand.
    pairs = find_compute_capabilities()[:1] if can.needs_gpu_to_build else ()
    return ["{}.{}".format(*pair) for pair in pairs]


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
    return sorted({op for record in records for op in record["plugins"]})


def write_record(plan: Path, record: Mapping[str, Any]) -> None:
    record_file(plan).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(plan: Path) -> dict[str, Any]:
    """Returns the record beside a plan."""
    path = record_file(plan)
    record = read_json_object(path, BundleError, "Build the bundle again.", "the record of the plan")
    if not {"variant", "version", "plugins", "profiles"} <= set(record):
        raise BundleError(str(path), "something else", "the record of the plan", "Build the bundle again.")
    return record


def find_other_gpu(record: Mapping[str, Any], ordinal: int = 0) -> tuple[str, str] | None:
    """Returns the capability of a GPU that a plan was not built for, and those that it was; None: the plan runs."""
    from speccompile.backends.tensorrt.import_helper import find_compute_capabilities

    here = ["{}.{}".format(*pair) for pair in find_compute_capabilities()][ordinal : ordinal + 1]
    every = ["{}.{}".format(*pair) for pair in VARIANTS[record["variant"]].target_capabilities]
    named = [str(text) for text in record.get("compute_capabilities") or every]
    return (here[0], ", ".join(named)) if here and named and here[0] not in named else None


def check_record(plan: Path, record: Mapping[str, Any], max_slots: int, ordinal: int = 0) -> None:
    """Compares a plan's record with what is installed and with the requested sizes. Nothing is deserialised.

    Raises:
        BundleError: other variant, version or plugin ABI, a GPU it was not built for, too few slots, or another size.
    """
    from speccompile.backends.tensorrt.import_helper import load_tensorrt

    variant = load_tensorrt(str(record["variant"]))
    if variant.version != record["version"]:
        got, expected = f"{variant.name} {variant.version}", f"{record['version']}, which built the plan"
        raise BundleError(str(plan), got, expected, _REBUILD)
    if record.get("platform") != machine_name():
        raise BundleError(str(plan), f"a plan for {record.get('platform')}", machine_name(), _REBUILD)
    abi = plugin_abi_of(bool(record["plugins"]))
    if abi != record.get("plugin_abi"):
        raise BundleError(str(plan), f"plugins {abi}", f"{record.get('plugin_abi')}, as in the plan", _REBUILD)
    if (other := find_other_gpu(record, ordinal)) is not None:
        able = variant.can.target_capabilities
        todo = "Name it in engine.tensorrt.compute_capabilities and build again."
        if variant.can.needs_gpu_to_build:
            todo = "Build the bundle again on this GPU."
        elif able and other[0] not in ["{}.{}".format(*pair) for pair in able]:
            todo = f"Build with engine.variant: tensorrt on this GPU, as {variant.name} does not support it."
        raise BundleError(str(plan), f"a GPU of compute capability {other[0]}", f"one of {other[1]}", todo)
    slots = max(int(p["sizes"]["batch"][2]) for p in record["profiles"])
    if slots < max_slots:
        todo = "Build with this engine.max_batch_size."
        raise BundleError(str(plan), f"profiles of at most {slots} slots", f"{max_slots}", todo)
    size = plan.stat().st_size
    if size != record.get("plan_bytes"):
        raise BundleError(str(plan), f"{size} bytes", f"{record.get('plan_bytes')} bytes", "Build the bundle again.")
