# SPDX-License-Identifier: Apache-2.0
"""The plugins as TensorRT's quickly deployable form with ahead-of-time kernels: the plan carries their PTX.

Full TensorRT only (TensorRT-RTX has no `tensorrt.plugin`), for nodes without a function body, in a network made with
`NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS`. Such a plan is loaded without Python and without a library.
One kernel per plugin, whose arguments are the inputs, extra scalars and the outputs: SpecVerify is its one-launch form
(a block per slot, no d2t).

Not run: this form was written against the API of TensorRT 11.4 and tested without its libraries.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from speccompile.backends.tensorrt.kernels import compile_kernels
from speccompile.backends.tensorrt.launches import (
    CHUNK,
    DTYPES,
    RESOLVE_THREADS,
    ROLLBACK_THREADS,
    rollback_vector_bytes,
    single_launch,
)
from speccompile.backends.tensorrt.plugin_names import KV_ROLLBACK, NUM_CACHES, SPEC_VERIFY
from speccompile.errors import BuildError

NAMESPACE = "speccompile"  # the nodes' domain: this form requires a namespace
MAX_AOT_CACHES = 240  # each is two kernel arguments, of 4096 bytes in all
_VERIFY_INPUTS = ("logits", "tokens", "parents", "draft_probs", "uniforms", "temperature", "top_k", "top_p")
_VECTORS = {16: "uint4", 4: "unsigned int", 2: "unsigned short"}


def register_aot_plugins(trt: ModuleType, capability: tuple[int, int], num_caches: int) -> None:
    """Register both ops with `tensorrt.plugin`, once per process.

    Args:
        capability: (major, minor) of the oldest GPU that the plan is for; PTX also runs on later ones.
        num_caches: of the KVRollback node; this form fixes it at registration.

    Raises:
        BuildError: more caches than a kernel has arguments for.
    """
    if not 1 <= num_caches <= MAX_AOT_CACHES:
        todo = "Use the Python or C++ plugin, which take any number."
        raise BuildError(f"plugin {KV_ROLLBACK}", f"{num_caches} caches", f"1 to {MAX_AOT_CACHES}", todo)
    qdp = plugin_module(trt)
    for name, describe, implement in (
        (SPEC_VERIFY, verify_descriptor(trt), verify_implementation(trt, capability)),
        (KV_ROLLBACK, rollback_descriptor(trt, num_caches), rollback_implementation(trt, capability, num_caches)),
    ):
        qdp.register(f"{NAMESPACE}::{name}")(describe)
        qdp.aot_impl(f"{NAMESPACE}::{name}")(implement)


def plugin_module(trt: ModuleType) -> Any:
    return importlib.import_module(f"{trt.__name__}.plugin")


def _signed(function: Any, inputs: Sequence[tuple[str, Any]], result: Any) -> Any:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in inputs]
    function.__signature__ = inspect.Signature(parameters, return_annotation=result)
    return function


def _implementation(trt: ModuleType, names: Sequence[str], num_outputs: int, function: Any) -> Any:
    qdp = plugin_module(trt)
    desc = qdp.TensorDesc
    outputs = tuple[(desc,) * num_outputs]  # type: ignore[misc, valid-type]
    result = tuple[str, bytes, qdp.KernelLaunchParams, qdp.SymIntExprs]  # type: ignore[name-defined]
    return _signed(function, [*((n, desc) for n in names), ("outputs", outputs), ("tactic", int)], result)


def _expressions(trt: ModuleType, values: Sequence[Any]) -> Any:
    qdp = plugin_module(trt)
    expressions = qdp.SymIntExprs(len(values))
    for i, value in enumerate(values):
        expressions[i] = qdp.SymInt32(value)
    return expressions


def _dtype(trt: ModuleType, desc: Any) -> int:
    names = {trt.float32: "float32", trt.float16: "float16", trt.bfloat16: "bfloat16"}
    return DTYPES.index(names[desc.dtype])


def verify_descriptor(trt: ModuleType) -> Any:
    """Returns what `tensorrt.plugin.register` wraps for SpecVerify: eight inputs, the verdict."""
    desc = plugin_module(trt).TensorDesc

    def describe(*inputs: Any) -> Any:
        path, num_accepted, next_token = inputs[1].like(), inputs[6].like(), inputs[6].like()
        return path, num_accepted, next_token

    return _signed(describe, [(name, desc) for name in _VERIFY_INPUTS], tuple[(desc,) * 3])  # type: ignore[misc]


def verify_implementation(trt: ModuleType, capability: tuple[int, int]) -> Any:
    """Returns what `tensorrt.plugin.aot_impl` wraps for SpecVerify: (kernel, PTX, launch, extra arguments)."""

    def implement(*arguments: Any) -> Any:
        logits, draft_probs = arguments[0], arguments[3]
        batch, nodes, vocab = (logits.shape_expr[i] for i in range(3))
        qdp = plugin_module(trt)
        launch = qdp.KernelLaunchParams()
        launch.grid_x, launch.block_x = batch, RESOLVE_THREADS
        width = single_launch(1, 1, CHUNK).shared_bytes  # of one chunk
        launch.shared_mem = qdp.cdiv(vocab, CHUNK) * width
        sizes = _expressions(trt, (batch, nodes, vocab, draft_probs.shape_expr[2], _dtype(trt, logits)))
        return "spec_verify_single", compile_kernels(SPEC_VERIFY, capability, "ptx"), launch, sizes

    return _implementation(trt, _VERIFY_INPUTS, 3, implement)


def _rollback_inputs(num_caches: int) -> list[str]:
    return [*(f"cache_{i}" for i in range(num_caches)), "lengths", "path"]


def rollback_descriptor(trt: ModuleType, num_caches: int) -> Any:
    """Returns what `tensorrt.plugin.register` wraps for KVRollback: every output is its input, in place."""
    desc = plugin_module(trt).TensorDesc

    def describe(*inputs: Any, **attributes: Any) -> Any:
        return tuple(cache.aliased() for cache in inputs[:num_caches])

    inputs = [(name, desc) for name in _rollback_inputs(num_caches)]
    said = [(NUM_CACHES, int)] if num_caches > 1 else []
    return _signed(describe, [*inputs, *said], tuple[(desc,) * num_caches])  # type: ignore[misc]


def rollback_wrapper(num_caches: int, unit: int) -> str:
    """Returns CUDA source of a kernel with one argument per cache, as this form passes them."""
    caches = ", ".join(f"void* cache_{i}" for i in range(num_caches))
    outputs = ", ".join(f"void* output_{i}" for i in range(num_caches))
    cases = " ".join(f"case {i}: cache = cache_{i}; break;" for i in range(num_caches))
    return f"""
namespace speccompile {{
struct AotSizes {{ const i64* lengths; const i64* path; int depth, kv_heads, max_seq, row_vectors; }};
}}
extern "C" __global__ void __launch_bounds__({ROLLBACK_THREADS}) kv_rollback_aot(
    {caches}, const long long* lengths, const long long* path, int depth, int kv_heads, int max_seq, int row_vectors,
    {outputs}) {{
    const speccompile::AotSizes sizes = {{lengths, path, depth, kv_heads, max_seq, row_vectors}};
    void* cache = nullptr;
    switch (blockIdx.z) {{ {cases} }}
    speccompile::move_rows<{_VECTORS[unit]}>(cache, sizes);
}}
"""


def rollback_implementation(trt: ModuleType, capability: tuple[int, int], num_caches: int) -> Any:
    """Returns what `tensorrt.plugin.aot_impl` wraps for KVRollback: (kernel, PTX, launch, extra arguments)."""

    def implement(*arguments: Any) -> Any:
        cache, path = arguments[0], arguments[num_caches + 1]
        kv_heads, max_seq, head_dim = (cache.shape_expr[i].constant_value() for i in (1, 2, 3))
        dtype = DTYPES[_dtype(trt, cache)]
        unit = rollback_vector_bytes(head_dim, dtype, ())  # TensorRT's addresses are multiples of 16
        vectors = head_dim * (4 if dtype == "float32" else 2) // unit
        launch = plugin_module(trt).KernelLaunchParams()
        launch.block_x, launch.grid_x = ROLLBACK_THREADS, -(-kv_heads * vectors // ROLLBACK_THREADS)
        launch.grid_y, launch.grid_z = path.shape_expr[0], num_caches
        ptx = compile_kernels(KV_ROLLBACK, capability, "ptx", rollback_wrapper(num_caches, unit))
        return "kv_rollback_aot", ptx, launch, _expressions(trt, (path.shape_expr[1], kv_heads, max_seq, vectors))

    return _implementation(trt, _rollback_inputs(num_caches), num_caches, implement)
