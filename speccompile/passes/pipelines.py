# SPDX-License-Identifier: Apache-2.0
"""The tables: which passes run for which backend, in which order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from speccompile.core.jobs import STORED
from speccompile.core.specs import ADAPTER, GraphSpec, compacted_cache_name
from speccompile.errors import RecipeError
from speccompile.passes.attach_adapters import merge_adapters
from speccompile.passes.attach_grids import Grids, attach_expert_grids, attach_grids_pass, attach_stored
from speccompile.passes.attach_tail import attach_tail
from speccompile.passes.base import Pass, pass_of
from speccompile.passes.cleanup import remove_dead, share_common_subexpressions
from speccompile.passes.dense_experts import dense_experts_pass
from speccompile.passes.flat_linears import flat_linears
from speccompile.passes.fold_scale import fold_scale
from speccompile.passes.fuse_cross_attention import fuse_cross_attention
from speccompile.passes.fuse_growing_attention import fuse_growing_attention
from speccompile.passes.fuse_latent_attention import fuse_latent_attention
from speccompile.passes.fuse_low_rank import fuse_low_rank
from speccompile.passes.fuse_norm_linears import fuse_norm_linears
from speccompile.passes.fuse_qkv_attention import fuse_qkv_attention
from speccompile.passes.gather_blocks import gather_blocks
from speccompile.passes.half_precision import half_precision_pass
from speccompile.passes.inline_bodies import inline_bodies
from speccompile.passes.int8_caches import int8_caches_pass
from speccompile.passes.lint_tensorrt import check_io, lint_pass
from speccompile.passes.lower_attention import lower_attention
from speccompile.passes.lower_attention_tensorrt import LOWER_ATTENTION_TENSORRT, make_caches_static
from speccompile.passes.lower_cross_attention import lower_cross_attention, lower_cross_attention_tensorrt
from speccompile.passes.merge_heads import merge_heads
from speccompile.passes.merge_linears import merge_linears
from speccompile.passes.mix_rows import mix_rows
from speccompile.passes.pack_embedding import pack_embedding_pass
from speccompile.passes.pack_experts import pack_experts_pass
from speccompile.passes.pack_linears import Weights, pack_linears_pass
from speccompile.passes.quantize_blocks import quantize_blocks_pass
from speccompile.passes.quantize_int8 import quantize_int8
from speccompile.passes.quantize_qdq import quantize_qdq_pass, quantize_stored
from speccompile.passes.rollback import attach_compaction
from speccompile.passes.shapes_on_device import shapes_on_device
from speccompile.passes.spread_late import spread_late
from speccompile.passes.stored_rows import StoredRows
from speccompile.passes.tie_weights import tie_embedding, tie_weights


def _packed_passes(weights: Weights) -> tuple[Pass, ...]:
    return (pack_linears_pass(weights), pack_embedding_pass(weights), fuse_norm_linears)


def _block_passes(bits: int | None) -> tuple[Pass, ...]:
    return (quantize_blocks_pass(bits), gather_blocks)


# The form that our CPU kernels compute, where there is a library of them.
PACKED = "packed"
# Kernel forms of each weight quantisation on ONNX Runtime's CPU; it is chosen by time and distance
# to float32, both measured at build time.
ORT_QUANTIZATION: dict[str, dict[str, tuple[Pass, ...]]] = {
    "none": {"fp32": (), PACKED: _packed_passes("float")},
    "bf16": {PACKED: _packed_passes("bf16")},
    "int8": {"rowq8": (quantize_int8, gather_blocks), "blocks32": _block_passes(8), PACKED: _packed_passes("int8")},
    "int4": {"blocks32": _block_passes(4), PACKED: _packed_passes("int4")},
    STORED: {"blocks": _block_passes(None), PACKED: _packed_passes("stored")},
}
# Experts have one form, whatever that of the linears is: without our kernels its bodies run.
_ORT_EXPERTS = {
    "none": pack_experts_pass("float"),
    "bf16": pack_experts_pass("bf16"),
    "int8": pack_experts_pass("int8"),
    "int4": pack_experts_pass("int4"),
    STORED: pack_experts_pass("stored"),
}

# The passes on CUDA after bodies are attached: without them nodes on the CPU and copies prevent CUDA graphs.
ORT_CUDA_FINISH = (inline_bodies, shapes_on_device, remove_dead)


def onnxruntime_table(
    spec: GraphSpec,
    quantization: str,
    form: str,
    grids: Grids | StoredRows | None = None,
    *,
    packs_experts: bool | None = None,
    int8_caches: bool = False,
) -> tuple[Pass, ...]:
    """Returns the passes from a neutral decoder to ONNX Runtime.

    Args:
        spec: the graph's inputs and outputs afterwards, with float caches.
        quantization: none, bf16, int8, int4 or stored.
        form: a kernel form of it, a key of `ORT_QUANTIZATION[quantization]`.
        grids: for int4: the weights of all linears, None: they are rounded, without minimums and the LM head too; for
            stored: the checkpoint's.
        packs_experts: experts have packed weights; None: where quantised, or with our kernels: without these, each body
            of unquantised experts would unpack what it gathers.
    """
    forms = ORT_QUANTIZATION.get(quantization)
    if forms is None or form not in forms:
        known = "; ".join(f"{q}: {', '.join(f)}" for q, f in ORT_QUANTIZATION.items())
        raise RecipeError("quantization", f"{quantization}/{form}", known, "Choose one of these.")
    # Our kernels take attention as it is, from the merged product of Q, K and V where there is one.
    has_kernels, has_adapters = form == PACKED, any(t.name == ADAPTER for t in spec.inputs)
    is_packed = (has_kernels or quantization != "none") if packs_experts is None else packs_experts
    attached: tuple[Pass, ...] = ()
    experts: tuple[Pass, ...] = (_ORT_EXPERTS[quantization],) if is_packed else ()
    if isinstance(grids, StoredRows):
        attached = (pass_of(attach_stored, grids),)
        experts = (pass_of(attach_expert_grids, grids), *experts) if is_packed else ()
    elif grids is not None and quantization == "int4":
        attached = (attach_grids_pass(grids),)
    return (
        attach_tail(spec),
        *((spread_late,) if spec.gives_probs else ()),
        *(() if has_kernels else (lower_attention,)),
        *((fuse_cross_attention,) if has_kernels and spec.borrowed else ()),
        *((lower_cross_attention,) if spec.borrowed else ()),
        mix_rows,
        *experts,
        flat_linears,
        tie_embedding,  # a head that is merged with another linear is no table any more
        merge_linears,
        *((merge_adapters,) if has_adapters else ()),
        *((fuse_latent_attention, fuse_qkv_attention, fuse_growing_attention) if has_kernels else ()),
        merge_heads,
        *attached,
        *forms[form],
        *((fuse_low_rank,) if has_adapters and has_kernels else ()),
        *((int8_caches_pass(spec),) if int8_caches else ()),
        share_common_subexpressions,
        remove_dead,
    )


def reference_table(spec: GraphSpec, *, int8_caches: bool = False) -> tuple[Pass, ...]:
    """Returns the passes from a neutral decoder to the reference evaluator: nothing is lowered."""
    return (
        attach_tail(spec),
        *((int8_caches_pass(spec),) if int8_caches else ()),
        share_common_subexpressions,
        remove_dead,
    )


def tensorrt_table(
    spec: GraphSpec,
    quantization: str,
    *,
    dtype: str,
    plugins: Collection[str] = (),
    attention: Pass | None = None,
    rows: StoredRows | None = None,
) -> tuple[Pass, ...]:
    """Returns the passes from a neutral decoder to TensorRT's ONNX: first weights, then tail, types and attention.

    Args:
        spec: a `tensorrt_spec`: the graph's inputs and outputs afterwards.
        quantization: none, int8, int4, fp8 or stored.
        dtype: float32, float16 or bfloat16, as in `spec`.
        plugins: op types whose plugins the parser will find; any other of our ops needs its function body.
        attention: what lowers CachedAttention; None: `LOWER_ATTENTION_TENSORRT`.

    Raises:
        RecipeError: no such quantisation, or not with this dtype.
    """
    compacted = {compacted_cache_name(c) for c in spec.caches}
    compacts = any(t.name in compacted for t in spec.outputs)
    inner = replace(spec, outputs=tuple(t for t in spec.outputs if t.name not in compacted))
    experts = dense_experts_pass("none" if quantization == STORED else quantization, dtype)
    linears: tuple[Pass, ...] = (fold_scale, experts)
    if rows is not None:  # a scale that is folded into Q's weights would change them
        # Merged weights of half precision are in a plan twice (TensorRT-RTX 1.7.1).
        merged = () if rows.has_minimums else (merge_linears,)
        linears = (experts, *merged, pass_of(attach_stored, rows), pass_of(quantize_stored, dtype, rows), fold_scale)
    elif quantization not in ("none", STORED):
        linears += (merge_linears, quantize_qdq_pass(quantization, dtype))
    return (
        *linears,
        tie_weights,
        attach_tail(inner),
        pass_of(make_caches_static, inner),
        *(() if dtype == "float32" else (half_precision_pass(inner, dtype),)),
        attention or LOWER_ATTENTION_TENSORRT,
        *((lower_cross_attention_tensorrt,) if spec.borrowed else ()),
        *((pass_of(attach_compaction, spec),) if compacts else ()),
        share_common_subexpressions,
        remove_dead,
        pass_of(check_io, spec),
        lint_pass(plugins),
    )
