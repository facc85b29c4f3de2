# SPDX-License-Identifier: Apache-2.0
"""From a recipe's engine fields to the builder's settings; contradictions with the variant are refused."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speccompile.backends.tensorrt.config import config_from_options
from speccompile.backends.tensorrt.import_helper import find_gpus
from speccompile.backends.tensorrt.launches import MAX_NODES, MAX_VOCAB
from speccompile.backends.tensorrt.plugin_names import SPEC_VERIFY
from speccompile.backends.tensorrt.profiles import Profile
from speccompile.backends.tensorrt.variants import Capabilities, Variant
from speccompile.common.code_cache import find_code_file
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import GraphSpec
from speccompile.errors import BuildError

GIB = 1 << 30
_FIRST = {"fp8": (8, 9), "bfloat16": (8, 0)}  # the first architectures with kernels of a form


def settings_from_options(
    variant: Capabilities,
    spec: GraphSpec,
    options: CompileOptions,
    profiles: Sequence[Profile],
    plugins: Sequence[str],
    quantization: str = "none",
) -> dict[str, Any]:
    """Returns the settings with which the child configures TensorRT, JSON-ready; stored in the manifest unchanged.

    Raises:
        BuildError: the variant or a plugin does not support a field's value.
    """
    config = config_from_options(options)
    level = config.optimization_level
    if level != "auto" and not variant.supports_optimization_level:
        got, expected = f"{level} with variant {variant.name}", "auto, as this variant has no such levels"
        raise BuildError("engine.tensorrt.optimization_level", got, expected, "Leave it out.")
    if SPEC_VERIFY in plugins:
        _check_plugin("engine.max_draft_nodes", options.max_nodes - 1, MAX_NODES - 1)
        _check_plugin(f"the vocabulary of {spec.name}", spec.vocab_size, MAX_VOCAB)
    wanted = _capabilities(variant, [str(c) for c in config.compute_capabilities], (options.dtype, quantization))
    # TF32, which TensorRT uses by default, rounds the float32 products of recurrent states to 10 bits.
    return {
        "cleared_flags": ["TF32"] if spec.states else [],
        "flags": ["WEIGHT_STREAMING"] if config.weight_streaming else [],
        "compute_capabilities": wanted,
        "workspace_gib": config.workspace_gib,
        "optimization_level": level,
        "plugins": list(plugins),
        "profiles": [profile.shapes(spec) for profile in profiles],
    }


def _check_plugin(where: str, got: int, most: int) -> None:
    if got > most:
        todo = "Build with engine.plugins: none, whose bodies have no such limit."
        raise BuildError(where, str(got), f"at most {most} with the plugin {SPEC_VERIFY}", todo)


def _capabilities(variant: Capabilities, wanted: Sequence[str], forms: Sequence[str]) -> list[str]:
    where = "engine.tensorrt.compute_capabilities"
    if wanted and not variant.supports_compute_capabilities:
        got = f"{', '.join(wanted)} with variant {variant.name}"
        expected = "nothing: this variant builds for the GPU it builds on"
        raise BuildError(where, got, expected, "Leave it out, or build with engine.variant: tensorrt_rtx.")
    known = ["{}.{}".format(*pair) for pair in variant.target_capabilities]
    unknown = [text for text in wanted if text not in known]
    if unknown:
        expected = f"some of {', '.join(known)} with variant {variant.name}"
        raise BuildError(where, unknown[0], expected, "Leave out the others, or build with full TensorRT on that GPU.")
    for form in (form for form in forms if form in _FIRST):
        able = ["{}.{}".format(*pair) for pair in variant.target_capabilities if pair >= _FIRST[form]]
        if unable := [text for text in wanted if text not in able]:
            other = "quantise to int8" if form == "fp8" else "build with target.dtype: float16"
            todo = f"Leave out the older GPUs, or {other}."
            raise BuildError(where, f"{unable[0]} with {form}", f"some of {', '.join(able)}", todo)
        if form == "fp8":  # not all of the GPUs that TensorRT-RTX chooses have it
            wanted = wanted or able
    return list(wanted)


def timing_cache_file(variant: Variant, options: CompileOptions) -> Path | None:
    """Returns the file for kernels measured on this GPU; None where the variant or the recipe has none."""
    if not variant.can.supports_timing_cache or not config_from_options(options).timing_cache:
        return None
    mark = hashlib.sha256(f"{variant.name} {variant.version} {find_gpus()[:1]}".encode()).hexdigest()[:16]
    return find_code_file(f"tensorrt/{mark}.timings")


def memory_limit(options: CompileOptions) -> int | None:
    """Returns the bytes that the builder's process may use; None: the machine's memory."""
    gib = config_from_options(options).max_build_gib
    return None if gib == "auto" else int(gib * GIB)
