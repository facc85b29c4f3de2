# SPDX-License-Identifier: Apache-2.0
"""From a lowered ONNX file to a TensorRT network and its builder configuration. Runs in the child process."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speccompile.backends.tensorrt.import_helper import text_from_lines
from speccompile.backends.tensorrt.variants import DTYPE_NAMES, Variant
from speccompile.common.code_cache import write_file
from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.errors import BuildError

GIB = 1 << 30


def parse_network(variant: Variant, builder: Any, path: Path, plugins: Sequence[str]) -> tuple[Any, Any]:
    """Parses a lowered graph; its weights are mapped from the file, not read.

    Args:
        plugins: ops that become plugins even where they have a body; empty: bodies are used.

    Returns:
        The network, and the parser, which owns the weights and must outlive the build.

    Raises:
        BuildError: an operator or attribute that TensorRT does not support, or a missing plugin.
    """
    trt, network = variant.trt, builder.create_network(0)
    network.name = path.stem
    parser = trt.OnnxParser(network, variant.logger)
    if plugins:
        parser.set_flag(trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
    if not parser.parse_from_file(str(path)):
        raise _parse_error(path, variant, parser)
    num_plugins = sum(count_plugins(variant, network).values())
    if num_plugins < len(plugins):
        got = f"{num_plugins} plugin layers: {', '.join(plugins)} became something else"
        todo = "Report it, or build with engine.plugins: none."
        raise BuildError(f"parsing {path.name}", got, f"{len(plugins)}", todo)
    return network, parser


def count_plugins(variant: Variant, network: Any) -> dict[str, int]:
    """Returns how many layers of a network each plugin has, by the plugin's name."""
    trt, counts = variant.trt, Counter[str]()
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if layer.type == trt.LayerType.PLUGIN_V3:
            layer.__class__ = trt.IPluginV3Layer  # the binding returns the base class
            core = layer.plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
            counts[str(core.plugin_name)] += 1
    return dict(counts)


def _parse_error(path: Path, variant: Variant, parser: Any) -> BuildError:
    if parser.num_errors == 0:
        got = text_from_lines(variant.logger.lines) or "no reason given"
        return BuildError(f"parsing {path.name}", got, "a graph that TensorRT's parser takes", "See the message.")
    fault = parser.get_error(0)
    node, op = fault.node_name() or f"number {fault.node()}", fault.node_operator()
    where = f"parsing {path.name}, node {node} ({op})" if op else f"parsing {path.name}"
    if "Plugin not found" in fault.desc():
        expected = "a registered plugin of that name, or a body in the graph"
        return BuildError(where, f"no plugin {op}", expected, "Build with engine.plugins: none.")
    expected = f"an operator that {variant.name} {variant.version} takes"
    todo = (
        "Report it with the model's config.json; engine.tensorrt.keep_onnx keeps the graph of a build that ends well."
    )
    return BuildError(where, fault.desc(), expected, todo)


def check_network(variant: Variant, network: Any, spec: GraphSpec) -> None:
    """Compare the network's inputs and outputs with the spec. Raises BuildError: names, dtypes or dims differ."""
    sides = (
        ("input", network.num_inputs, network.get_input, spec.inputs),
        ("output", network.num_outputs, network.get_output, spec.outputs),
    )
    for side, count, tensor_at, wanted in sides:
        found = {t.name: t for t in (tensor_at(i) for i in range(count))}
        if set(found) != {t.name for t in wanted}:
            differing = sorted(set(found) ^ {t.name for t in wanted})
            got = f"{side}s {', '.join(differing)} on one side only"
            raise BuildError(f"network {spec.name}", got, "those of the spec", "Report it with the recipe.")
        for tensor in wanted:
            _check_tensor(spec, side, tensor, found[tensor.name])


def _check_tensor(spec: GraphSpec, side: str, wanted: TensorSpec, found: Any) -> None:
    dtype = DTYPE_NAMES.get(found.dtype.name, found.dtype.name)
    shape = tuple(found.shape)
    # The parser may infer a static size where the spec has a dynamic dim (an output of one element), not the reverse.
    same = len(shape) == len(wanted.dims) and all(
        size == dim or (isinstance(dim, str) and side == "output") or (isinstance(dim, str) and size == -1)
        for size, dim in zip(shape, wanted.dims, strict=True)
    )
    if dtype != wanted.dtype or not same:
        where = f"network {spec.name}, {side} {wanted.name}"
        expected = f"{wanted.dtype}{list(wanted.dims)}"
        raise BuildError(where, f"{dtype}{list(shape)}", expected, "Report it with the recipe.")


def configure(variant: Variant, builder: Any, settings: Mapping[str, Any]) -> Any:
    """Returns a builder configuration from what `settings.settings_from_options` made."""
    trt, config = variant.trt, builder.create_builder_config()
    for name in settings["flags"]:
        config.set_flag(getattr(trt.BuilderFlag, name))
    for name in settings["cleared_flags"]:
        config.clear_flag(getattr(trt.BuilderFlag, name))
    capabilities = settings["compute_capabilities"]
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for index, text in enumerate(capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{text.replace('.', '')}"), index)
    if settings["workspace_gib"] != "auto":
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(settings["workspace_gib"] * GIB))
    if settings["optimization_level"] != "auto":
        config.builder_optimization_level = settings["optimization_level"]
    if settings["plugins"]:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    for index, shapes in enumerate(settings["profiles"]):
        _add_profile(variant, builder, config, index, shapes)
    return config


def _add_profile(variant: Variant, builder: Any, config: Any, index: int, shapes: Mapping[str, Any]) -> None:
    profile, todo = builder.create_optimization_profile(), "Correct engine.tensorrt.prefill and decode."
    for name, (low, best, high) in shapes.items():
        try:
            profile.set_shape(name, tuple(low), tuple(best), tuple(high))
        except ValueError as fault:
            got = f"{low}, {best}, {high}: {fault}"
            raise BuildError(f"profile {index}, input {name}", got, "shapes that TensorRT takes", todo) from fault
    if config.add_optimization_profile(profile) < 0:
        got = text_from_lines(variant.logger.lines) or "refused without a reason"
        raise BuildError(f"profile {index}", got, "a profile that TensorRT takes", todo)


def load_timing_cache(variant: Variant, config: Any, path: Path | None) -> Any:
    """Starts the builder with kernels measured before on this GPU; returns the cache, None where there can be none."""
    if path is None or not variant.can.supports_timing_cache:
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):  # damaged, or of another TensorRT
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def save_timing_cache(config: Any, path: Path) -> None:
    """Keep the builder's measurements, written atomically, where the builder has a cache and the disk has room."""
    cache = config.get_timing_cache()
    if cache is not None:
        with contextlib.suppress(OSError):  # a plan is worth more than its timings
            write_file(path, bytes(memoryview(cache.serialize())))
