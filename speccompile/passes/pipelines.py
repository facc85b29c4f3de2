# SPDX-License-Identifier: Apache-2.0
"""The tables: which passes run for which backend, in which order."""

from __future__ import annotations

from speccompile.core.specs import GraphSpec
from speccompile.errors import RecipeError
from speccompile.passes.attach_tail import attach_tail
from speccompile.passes.base import Pass
from speccompile.passes.cleanup import REMOVE_DEAD, SHARE_COMMON
from speccompile.passes.lower_attention import LOWER_ATTENTION
from speccompile.passes.merge_heads import MERGE_HEADS
from speccompile.passes.merge_linears import MERGE_LINEARS
from speccompile.passes.quantize_blocks import quantize_blocks_pass
from speccompile.passes.quantize_int8 import QUANTIZE_INT8

# Kernel forms of each weight quantisation on ONNX Runtime's CPU; which is fastest is measured at build time.
ORT_QUANTIZATION: dict[str, dict[str, tuple[Pass, ...]]] = {
    "none": {"fp32": ()},
    "int8": {"rowq8": (QUANTIZE_INT8,), "blocks32": (quantize_blocks_pass(8),)},
    "int4": {"blocks32": (quantize_blocks_pass(4),)},
}


def onnxruntime_table(spec: GraphSpec, quantization: str, form: str) -> tuple[Pass, ...]:
    """The passes from a neutral decoder to ONNX Runtime.

    Args:
        spec: the graph's inputs and outputs afterwards.
        quantization: none, int8 or int4.
        form: a kernel form of it, a key of `ORT_QUANTIZATION[quantization]`.

    Raises:
        RecipeError: no such quantisation or form.
    """
    forms = ORT_QUANTIZATION.get(quantization)
    if forms is None or form not in forms:
        known = "; ".join(f"{q}: {', '.join(f)}" for q, f in ORT_QUANTIZATION.items())
        raise RecipeError("quantization", f"{quantization}/{form}", known, "Choose one of these.")
    return (
        attach_tail(spec),
        LOWER_ATTENTION,
        MERGE_LINEARS,
        MERGE_HEADS,
        *forms[form],
        SHARE_COMMON,
        REMOVE_DEAD,
    )


def reference_table(spec: GraphSpec) -> tuple[Pass, ...]:
    """The passes from a neutral decoder to the reference evaluator: nothing is lowered."""
    return (attach_tail(spec), SHARE_COMMON, REMOVE_DEAD)
