# SPDX-License-Identifier: Apache-2.0
"""The cost model: seconds of a step of each graph of a plan, from sizes alone.

A step of n nodes in b sequences with c cache rows each has r = b n rows of activations and takes

    dense products + experts + attention + recurrent states + logits + launches:

- dense products: all linear weights, with r rows (`Machine.product_s`).
- experts: of E experts each row reads k, so of r rows E (1 - (1 - k/E)^r) distinct ones are expected (the coupon
  collector with k coupons a draw), each with r k / distinct rows.
- attention: K and V of a sequence are weights of its own, c + n times the columns, for n nodes of each query head.
- recurrent states: those of a sequence, which n nodes update.
- logits: written by the head and read by the verification, float32.
- launches: our operators in the fused graph, and those of ONNX Runtime beside them: counted in graphs of this package.

All that a step reads decides from what level of memory it comes. Prompts are steps of `PREFILL_CHUNK` nodes. A draft of
K tokens takes ceil(K / d) runs of a graph that gives d tokens a run. Outside of the engines a step takes `LOOP_S`, with
drafts `Method.host_ms` more, and `RUN_S` a run of a draft, times `Machine.host`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.backends.base import Backend
from speccompile.bundle.choices import stored_dtype
from speccompile.bundle.graphs import open_source
from speccompile.checkpoints.checkpoint import read_text_config
from speccompile.core import registry
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import PREFILL_CHUNK, STORED, GraphJob, WeightCounts
from speccompile.graph_kinds.int8_caches import INT8
from speccompile.planner.machine import BITS, CACHES, INT8_CACHES, OTHER_BITS, OTHERS, STATES, Machine
from speccompile.recipe import BuildPlan
from speccompile.recipe.predict import count_weights, own_cache_bytes, predict_counts

OPS_PER_LAYER, OPS_BESIDE = 6, 12  # of ours, and those of the runtime beside all layers
RUNTIME_OPS = {"states": 32, "experts": 15}  # of ONNX Runtime's, in a layer with these
LOOP_S, RUN_S = 0.02e-3, 0.035e-3  # docs/lab/2026-11-30-planner.md
_PRECISIONS = {"none": "float32", "bf16": "bf16", "fp8": "int8", "int8": "int8", "int4": "int4"}
_PRECISIONS |= {STORED: "int4"}  # most have about 4 bits
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts")


@dataclass(frozen=True)
class GraphCosts:
    """What a step of a graph reads and multiplies."""

    name: str
    precision: str  # of its weights, a key of `machine.BITS`
    counts: WeightCounts
    num_experts: int  # E; 0: none
    num_chosen: int  # k, of each row
    cache_columns: int  # of K and V, all layers
    group: int  # query heads that read one K and V head
    num_layers: int
    vocab_size: int
    state_values: int  # of the recurrent states of one sequence
    num_drafts: int  # d; 0: one, or none of a target
    weights_bytes: int
    slot_bytes: int  # caches and states of one sequence
    num_int8: int = 0  # weights of `counts.num_linear` that have 8 bits beside others of 4: those of a target's LM head
    num_state_layers: int = 0  # of `num_layers`, recurrent ones
    caches: str = CACHES  # `CACHES` or `INT8_CACHES`
    host_s: float = 1e-4  # of a target: what drafting takes of a step besides engines, see the module

    def step_s(self, machine: Machine, nodes: int, batch: int = 1, context: int = 0) -> float:
        """Returns the seconds of a step; see the module."""
        rows, held = nodes * batch, (context + nodes) * self.cache_columns
        kept = batch * (held * OTHER_BITS[self.caches][0] / 8 + self.state_values * 4)
        num = self.counts.num_linear - self.num_int8
        step_bytes = (num * BITS[self.precision] + self.num_int8 * BITS["int8"]) / 8 + kept
        seconds = machine.product_s(self.precision, num - self.counts.num_experts, rows, step_bytes)
        seconds += machine.product_s("int8", self.num_int8, rows, step_bytes)
        if self.num_experts:
            distinct = distinct_experts(self.num_experts, self.num_chosen, rows)
            num_read = self.counts.num_experts * distinct / self.num_experts
            seconds += machine.product_s(self.precision, num_read, rows * self.num_chosen / distinct, step_bytes)
        seconds += machine.product_s(self.caches, batch * held, nodes * self.group, step_bytes)
        seconds += machine.product_s(STATES, batch * self.state_values, nodes, step_bytes)
        seconds += machine.bytes_s(2 * 4 * self.vocab_size * rows)
        num_others, per_layer = OPS_BESIDE, RUNTIME_OPS if machine.measured else {}
        num_others += per_layer.get("states", 0) * self.num_state_layers
        num_others += per_layer.get("experts", 0) * self.num_layers * bool(self.num_experts)
        seconds += machine.product_s(OTHERS, num_others, rows, step_bytes)
        return seconds + OPS_PER_LAYER * self.num_layers * machine.launch_s

    def prompt_s(self, machine: Machine, num_tokens: int) -> float:
        """Returns the seconds in which a prompt of one sequence is read."""
        starts = range(0, num_tokens, PREFILL_CHUNK)
        return sum(self.step_s(machine, min(PREFILL_CHUNK, num_tokens - at), 1, at) for at in starts)

    def drafts_s(self, machine: Machine, num: int, batch: int, context: int) -> float:
        """Returns the seconds in which `num` tokens are drafted for each sequence."""
        return self.num_runs(num) * self.step_s(machine, 1, batch, context)

    def num_runs(self, num: int) -> int:
        return math.ceil(num / max(self.num_drafts, 1))


Graphs = Mapping[str, GraphCosts]  # of a method, by name; the target is the first


def distinct_experts(num: int, num_chosen: int, rows: float) -> float:
    """Returns how many of `num` experts are expected to be read by `rows` rows, each of which chooses `num_chosen`."""
    return num * (1.0 - math.pow(1.0 - num_chosen / num, rows))


def graphs_of_plan(plan: BuildPlan) -> dict[str, GraphCosts]:
    """Returns the costs of all graphs of a plan by their names; the target is the first."""
    backend: Backend = registry.backend(plan.engine.backend, plan.engine.device)
    found: dict[str, GraphCosts] = {}
    target: ModelDims | None = None
    for job in plan.jobs:
        source = open_source(plan, job, target, weights="random")
        if job.is_optional and not source.is_needed:
            continue
        counts, config, form = source.counts(), {}, _form(plan, job, source.folder, backend)
        precision, kept = _PRECISIONS.get(form, "int8"), form if form in backend.quantizations else job.quantization
        dims = source.dims if isinstance(source.dims, ModelDims) else None
        recurrent = [] if dims is None else [one.recurrent for one in dims.per_layer if one.recurrent is not None]
        if counts is None:
            config = read_text_config(source.folder)
            counts = count_weights(config, source.dims)
        slot_bytes = own_cache_bytes(source.spec(), 1, source.max_rows, plan.dtype)
        is_int8 = dims is not None and target is None and plan.engine.kv_cache == INT8
        if dims is not None and is_int8:
            slot_bytes = source.max_rows * dims.cache_row_bytes_in(plan.engine.kv_cache)
        slot_bytes += 0 if dims is None else 2 * dims.state_bytes(plan.engine.max_draft_nodes + 1)
        found[job.name] = GraphCosts(
            name=job.name,
            precision=precision,
            num_int8=counts.num_head if precision == "int4" and target is None and plan.weights != "random" else 0,
            counts=counts,
            num_experts=_first(config, ("num_local_experts", "num_experts", "n_routed_experts"), 0)
            if counts.num_experts
            else 0,
            num_chosen=_first(config, _CHOSEN, 1),
            cache_columns=0 if dims is None else dims.cache_row_bytes // 4,
            group=1 if dims is None else max(dims.num_heads // max(dims.num_kv_heads, 1), 1),
            num_layers=1 if dims is None else dims.num_layers,
            num_state_layers=len(recurrent),
            vocab_size=(target or source.dims).vocab_size,
            state_values=sum(one.num_value_heads * one.key_dim * one.value_dim for one in recurrent),
            caches=INT8_CACHES if is_int8 else CACHES,
            num_drafts=source.spec().num_drafts,
            host_s=registry.method(plan.method).host_ms(plan.speculator) / 1e3,
            weights_bytes=predict_counts(counts, kept, 0, backend, plan.dtype).weights_bytes,
            slot_bytes=slot_bytes,
        )
        target = target or source.dims
    return found


def _first(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    return int(next((config[key] for key in keys if config.get(key)), default))


def _form(plan: BuildPlan, job: GraphJob, folder: Path, backend: Backend) -> str:
    # Returns a job's quantisation; floats count as bf16 where engines of 16 bits or kernels that keep them read such.
    kept = "bf16" in backend.quantizations and plan.weights == "checkpoint" and (folder / "config.json").is_file()
    is_bf16 = plan.dtype != "float32" or (kept and stored_dtype(folder) == "bfloat16")
    return "bf16" if job.quantization == "none" and is_bf16 else job.quantization
