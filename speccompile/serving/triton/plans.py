# SPDX-License-Identifier: Apache-2.0
"""TensorRT plans as models of Triton's own `tensorrt` backend, for clients with a loop of their own."""

from __future__ import annotations

from pathlib import Path

from speccompile.bundle.bundle import Bundle
from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.errors import BundleError
from speccompile.serving.triton.config_text import ModelConfig
from speccompile.serving.triton.contract import TRITON_TYPES, Tensor

PLAN_NAME = "model.plan"  # what the `tensorrt` backend looks for in a version's folder


def plan_models(bundle: Bundle, prefix: str) -> list[tuple[ModelConfig, list[tuple[str, Path]]]]:
    """Returns a model for each plan: inputs and outputs of its GraphSpec, dim by dim.

    Raises:
        BundleError: there is no plan in the bundle.
    """
    names = [name for name in bundle.graphs if bundle.graph_path(name).suffix == ".plan"]
    if not names:
        todo = "Build it with --backend tensorrt, or choose another layout."
        raise BundleError(str(bundle.path), "no TensorRT plan", "plans for the layout `plans`", todo)
    return [
        (
            ModelConfig(
                f"{prefix}_{name}",
                tensors(bundle.graph_spec(name), is_input=True),
                tensors(bundle.graph_spec(name), is_input=False),
                backend="tensorrt",
                kind="KIND_GPU",
                comment=comment(bundle, name),
            ),
            [(PLAN_NAME, bundle.graph_path(name))],
        )
        for name in names
    ]


def tensors(spec: GraphSpec, is_input: bool) -> list[Tensor]:
    """Returns a graph's inputs or outputs as a config.pbtxt has them; dims that change are -1, the batch among them.

    Raises:
        BundleError: a dtype that Triton does not know.
    """
    return [_tensor(spec, tensor) for tensor in (spec.inputs if is_input else spec.outputs)]


def _tensor(spec: GraphSpec, tensor: TensorSpec) -> Tensor:
    if tensor.dtype not in TRITON_TYPES:
        known = ", ".join(TRITON_TYPES)
        raise BundleError(f"{spec.name}.{tensor.name}", f"dtype {tensor.dtype}", f"one of {known}", "Build it anew.")
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in tensor.dims)
    return Tensor(tensor.name, tensor.dtype, dims, is_optional=False)


def comment(bundle: Bundle, name: str) -> tuple[str, ...]:
    """Returns what callers of the plan need to know: plugins, caches, profiles."""
    record = bundle.graphs[name].get("tensorrt", {})
    spec = bundle.graph_spec(name)
    lines = [f"Plan of the graph {name}, built by {record.get('variant')} {record.get('version')}."]
    plugins = ", ".join(record.get("plugins") or ())
    if plugins:
        lines.append(f"Plugins: {plugins}. Start the server with")
        lines.append('--backend-config=tensorrt,plugins="libspeccompile_plugins.so" (make plugins builds it).')
    if spec.caches:
        lines.append("Each cache and its updates are one memory: bind the outputs to the address of their input.")
    for profile in record.get("profiles") or ():
        sizes = "; ".join(f"{dim} {', '.join(map(str, bounds))}" for dim, bounds in profile["sizes"].items())
        lines.append(f"Profile {profile['name']} (least, best, most): {sizes}.")
    return tuple(lines)
