# SPDX-License-Identifier: Apache-2.0
"""TensorRT plans as models of Triton's own `tensorrt` backend, for those who bring their own loop."""

from __future__ import annotations

from pathlib import Path

from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.errors import BundleError
from speccompile.runtime.bundle import Bundle
from speccompile.serving.triton.config_text import ModelConfig
from speccompile.serving.triton.contract import TRITON_TYPES, Tensor

PLAN_NAME = "model.plan"  # what the `tensorrt` backend looks for in a version's folder


def plan_models(bundle: Bundle, prefix: str) -> list[tuple[ModelConfig, list[tuple[str, Path]]]]:
    """A model for each plan: inputs and outputs of its GraphSpec, dim by dim.

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
