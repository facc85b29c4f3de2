# SPDX-License-Identifier: Apache-2.0
"""The contract of a backend with its defaults (docs/how_to/add_backend.md), and the checks that all engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from speccompile.backends.feeds import sizes_from_feeds
from speccompile.backends.states import SlotStates
from speccompile.core import specs
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import BuildSizes, CompileOptions, WeightCounts
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec
from speccompile.errors import RuntimeFault

RollbackT = TypeVar("RollbackT")  # with which an engine compacts its caches
CONFIDENCES = (specs.CANDIDATE_PROBS, specs.CONFIDENCES)  # outputs of drafts


@dataclass(frozen=True)
class CompileJob:
    """A neutral graph to compile."""

    model: Any  # an `onnx_ir.Model`; left unchanged, except with `options.consumes_model`
    spec: GraphSpec  # inputs and outputs of the neutral graph, tail included
    dest: Path  # the folder that gets the backend's `graph_file`
    quantization: str = "none"
    form: str | None = None  # a kernel form of that quantisation; None: the backend chooses
    options: CompileOptions | None = None  # dtype, sizes and the recipe's fields; None: the backend's defaults
    progress: Callable[[str], None] | None = None  # called with names of passes and stages, and "PHASE STEP/STEPS"


@dataclass(frozen=True)
class LoadJob:
    """A compiled graph to measure or to open.

    Args:
        tuning: the record of `Backend.tune`, or other settings of the backend's engine.
        owners: loaded engines of this backend by graph name, whose caches `spec.borrowed` names.
    """

    path: Path
    spec: GraphSpec
    max_slots: int = 1
    max_rows: int = 0  # cache rows of a slot; 0 without caches
    tuning: Mapping[str, Any] = field(default_factory=dict)
    rollback: Path | None = None  # the graph of `compile_rollback`; None: the engine decodes chains only
    device: str = "cuda"  # read by backends of GPUs alone; an ordinal may follow, as in "cuda:1"
    owners: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None  # the number to measure with; None: measure which is best
    others_bytes: int = 0  # weights of the graphs that alternate with it, which evict its own from the caches


class Backend(ABC):
    """Neutral graphs in, compiled files and engines out. Constructing one imports no library of the backend.

    Attributes:
        Config: its fields of the recipe, the section `engine.NAME`: a frozen dataclass whose fields are declared with
            `common.parameters.parameter`, of the standard library alone; None: it has none.
        dtypes: of activations and caches; the first one is what `auto` means, unless `choose_dtype` decides.
        draft_quantizations: of a draft whose section says `auto`, by the target's quantization; none where not listed.
        graph_file: the file of a compiled graph that `load` opens; graphs may share weights where it is ONNX.
        graph_sources: modules, as "backends/writing", that can change a compiled graph: part of the cache's key.
        slides_caches: whether its engines have `slide_slot`, so that the caches of windows need no rows before these.
        runs_code_on_load: whether opening a compiled graph may run code in it, so that digests are always compared.
        device_variants: import strings "module:Class" of the backends that work on other devices, by device.
    """

    name: str  # in recipes and manifests
    Config: type[Any] | None = None
    devices: tuple[str, ...] = ("cpu",)  # values of `engine.device`; the first one is what `auto` means
    dtypes: tuple[str, ...] = ("float32",)
    quantizations: tuple[str, ...] = ("none",)  # those that `compile` supports
    kv_caches: tuple[str, ...] = ("auto",)  # values of `engine.kv_cache`
    draft_quantizations: Mapping[str, str] = MappingProxyType({})
    calibrates: tuple[str, ...] = ()  # quantisations with which a target's weights are chosen over calibration text
    graph_file: str = "graph.onnx"
    graph_sources: tuple[str, ...] = ()
    keeps_logits: bool = False  # whether the target's logits are an output where the recipe does not say
    state_copies: int = 2  # how many times its engines hold the recurrent states of a slot, a snapshot among them
    state_trees: bool = False  # whether its engines score trees on targets with recurrent states
    slides_caches: bool = False
    runs_code_on_load: bool = False
    device_variants: Mapping[str, str] = MappingProxyType({})

    def choose_dtype(self, stored: str | None, model_type: str, options: Any) -> str:
        """Returns the dtype that `auto` means for a checkpoint whose config names `stored`; the first of `dtypes`."""
        del stored, model_type, options
        return self.dtypes[0]

    def is_ready(self) -> bool:
        """Returns whether `prepare` has nothing to make; True by default."""
        return True

    def prepare(self, *, wait: bool = True) -> None:
        """Makes what a machine needs once to build with it, as kernels for its CPU; without `wait` only begins."""
        del wait

    def check(self, spec: GraphSpec, options: CompileOptions, quantization: str) -> None:
        """Refuses what cannot be compiled, before anything is exported; `spec` is of the neutral graph, tail included.

        Raises:
            BuildError: a library is missing, or sizes or fields do not fit the graph.
        """
        del spec, options, quantization

    def depends_on(self, options: CompileOptions) -> dict[str, Any]:
        """Returns what a compiled graph depends on besides its sources: versions, the machine, options; see its key."""
        del options
        return {}

    def predict(self, counts: WeightCounts, quantization: str, dtype: str) -> BuildSizes:
        """Predicts sizes in bytes and the memory of a build; by default those of float32 graphs of ONNX."""
        del dtype
        return predict_float32(counts, quantization)

    @abstractmethod
    def compile(self, job: CompileJob) -> dict[str, Any]:
        """Runs the backend's table of passes on a copy of the model and writes `graph_file`.

        Returns:
            {"form", "forms_measured": {form: milliseconds}, "passes", "op_histogram"}, JSON-ready; `spec` where the
            compiled graph's differs, `peak_rss_bytes` where other processes took memory.
        """

    @abstractmethod
    def compile_rollback(self, dims: ModelDims, dest: Path, options: CompileOptions | None = None) -> GraphSpec:
        """Writes the graph that compacts the caches of a model to `dest/graph_file`; returns its spec."""

    def why_unchecked(self, file: Path | None = None) -> str | None:
        """Returns why a compiled graph, or None: any, cannot run on this machine; None (by default): it can."""
        del file
        return None

    def tune(self, job: LoadJob) -> dict[str, Any]:
        """Measures a compiled graph; by default nothing.

        Returns:
            The record for the manifest and `load`: `threads`, `step_ms` {"nodes": milliseconds}; or empty.
        """
        del job
        return {}

    def adapt_tuning(self, job: LoadJob) -> dict[str, Any]:
        """Returns the tuning record for this machine; by default the job's own."""
        return dict(job.tuning)

    @abstractmethod
    def load(self, job: LoadJob) -> Engine:
        """Opens a compiled graph and allocates its caches.

        Raises BundleError: the file does not fit the spec or machine.
        """


def finite_confidences(engine: Any, outputs: Mapping[str, Any], first_slot: int) -> Mapping[str, Any]:
    """Returns the outputs of a draft's step with confidence 0 where it gives NaN, so that estimates stay finite.

    The cache rows of such a slot are zeroed: they would spoil the drafts of later sequences in it. Texts do not depend
    on them.
    """
    for name in CONFIDENCES:
        values = outputs.get(name)
        if values is None or np.isfinite((values := np.asarray(values)).sum()):
            continue
        is_finite = np.isfinite(values)
        for row in np.flatnonzero(~is_finite.reshape(len(values), -1).all(axis=1)):
            engine.clear_slot(first_slot + int(row))
        outputs = {**outputs, name: np.where(is_finite, values, np.zeros_like(values))}
    return outputs


class EngineBase(ABC, Generic[RollbackT]):
    """Bounds of steps, and defaults for engines whose caches have one layout. See `core.protocols.Engine`.

    Args:
        owners: engines by graph name, one of which its states may follow: `GraphSpec.state_owner`.
    """

    compacts_in_step: bool = False
    max_scored: int | None = None
    rollback: RollbackT | None = None  # set by engines that were given one
    states: SlotStates[Any] | None = None  # the recurrent states of its slots, where the graph has any

    seconds: float = 0.0

    @property
    def graph_fault(self) -> str | None:
        return None

    def __init__(
        self,
        spec: GraphSpec,
        max_slots: int,
        max_rows: int,
        states: SlotStates[Any] | None = None,
        owners: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec, self.max_slots, self.max_rows = spec, max_slots, max_rows
        self.states = states
        self._gives_confidences = any(t.name in CONFIDENCES for t in spec.outputs)
        if states is not None and spec.state_owner in (owners or {}):
            states.owner = (owners or {})[spec.state_owner].states

    @property
    def view_rows(self) -> int:
        return 0

    def run(self, feeds: Mapping[str, Any], first_slot: int = 0) -> Mapping[str, np.ndarray]:
        start_s = perf_counter()
        outputs = self.run_graph(feeds, first_slot)
        if self._gives_confidences:
            outputs = finite_confidences(self, outputs, first_slot)
        self.seconds += perf_counter() - start_s
        return outputs

    @abstractmethod
    def run_graph(self, feeds: Mapping[str, Any], first_slot: int) -> Mapping[str, np.ndarray]:
        """Runs one step: `Engine.run` without its clock."""

    def check_step(self, feeds: Mapping[str, Any], first_slot: int) -> tuple[dict[str, int], int]:
        """Compares a step with the capacity of the caches; `first_slot` is the slot of batch row 0.

        Args:
            feeds: inputs by name, `lengths` [batch] among them where the graph writes caches.

        Returns:
            Sizes of the dynamic dims by name, and the cache rows that are in use after the step; 0 without caches.

        Raises:
            RuntimeFault: it needs more slots than `max_slots`, or more rows than `max_rows`.
        """
        sizes = sizes_from_feeds(self.spec, feeds)
        last, rows = first_slot + sizes["batch"], 0
        if last > self.max_slots:
            raise RuntimeFault(
                f"engine {self.spec.name}",
                f"slots {first_slot} to {last - 1}",
                f"slots below {self.max_slots}",
                "Build with a larger engine.max_batch_size.",
            )
        if self.spec.caches:
            lengths: list[int] = np.asarray(feeds[specs.LENGTHS]).tolist()  # a reduction would take longer, see Verdict
            rows = max(lengths) + sizes["nodes"] + self.spec.rows_written_ahead
        if rows > self.max_rows:
            raise RuntimeFault(
                f"engine {self.spec.name}",
                f"{rows} cache rows",
                f"at most {self.max_rows}",
                "Shorten the prompt or max_new_tokens, or build with a larger engine.max_seq_len.",
            )
        return sizes, rows

    def reset(self, rows: int = 1) -> None:
        """See `speccompile.core.protocols.Engine.reset`; by default as `shrink`."""
        if self.states is not None:
            self.states.reset()
        self.shrink(rows)

    def shrink(self, rows: int) -> None:
        """See `speccompile.core.protocols.Engine.shrink`; by default nothing: caches keep their layout."""
        del rows

    def slide_slot(self, slot: int, first: int, num: int) -> None:
        got = f"rows {first} to {first + num - 1} of slot {slot} to move to the front"
        todo = "Build the bundle again: its caches were laid out for another backend."
        raise RuntimeFault(f"engine {self.spec.name}", got, "caches that keep all rows of a sequence", todo)

    def read_caches(self, slot: int, rows: int) -> Mapping[str, Any] | None:
        """See `speccompile.core.protocols.Engine.read_caches`; by default None: they are not shown."""
        del slot, rows
        return None

    def compact(self, lengths: np.ndarray, path: np.ndarray) -> None:
        if self.rollback is None and self.spec.caches:
            raise RuntimeFault(
                f"engine {self.spec.name}",
                "a tree to roll back",
                "a rollback graph in the bundle",
                "Build the bundle again; this one was made for chains.",
            )
        start_s = perf_counter()
        if self.rollback is not None:
            self.compact_with(self.rollback, lengths, path)
        if self.states is not None:
            self.states.compact(lengths, path)
        self.seconds += perf_counter() - start_s

    @abstractmethod
    def compact_with(self, rollback: RollbackT, lengths: np.ndarray, path: np.ndarray) -> None:
        """Compacts the caches by the loaded rollback graph: lengths [batch] int64, path [batch, depth]."""


# Bytes of a weight, in the larger one of its kernel forms: a block of 32 has one float32 scale, or two float16 numbers.
_WEIGHT_BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1 + 4 / 32, "int4": 0.5 + 4 / 32, "stored": 1 + 4 / 32}
_WEIGHT_BYTES["auto"] = max(_WEIGHT_BYTES.values())  # not known before it is measured
# In the smaller one: weights that are those of bfloat16 are kept so, and scales are float16.
_LEAST_BYTES = {"none": 2.0, "bf16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32, "stored": 0.5 + 2 / 32}
_LEAST_BYTES["auto"] = _LEAST_BYTES["int8"]
# Experts have one form, whose scales are float16.
_EXPERT_BYTES = {"none": 4.0, "bf16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32, "stored": 4.0, "auto": 4.0}
_FLOAT_BYTES = 4
_TEXT_BYTES = 2**18  # operators and bodies beside the weights; the most that was seen: 230 kB, of 30 layers
# Beside torch's copy an export holds rewritten tensors (at most 0.3 of the weights) and the libraries themselves.
_EXPORT_FACTOR, _LIBRARY_BYTES = 2.3, 700 * 2**20


def predict_float32(
    counts: WeightCounts, quantization: str, *, packs_experts: bool = True, ties: bool = False
) -> BuildSizes:
    """Predicts a graph for ONNX Runtime or the reference evaluator.

    Args:
        quantization: none, bf16, int8, int4, stored or auto.
        packs_experts: experts are quantised as linears are; False: they stay float32.
        ties: an embedding that is tied to the LM head is stored once, as the head.
    """
    experts_bytes = counts.num_experts * (_EXPERT_BYTES[quantization] if packs_experts else _FLOAT_BYTES)
    linear_bytes = (counts.num_linear - counts.num_experts) * _WEIGHT_BYTES[quantization]
    num_own = 0 if counts.is_tied else min(counts.num_head, counts.num_plain)
    # An embedding that is not the head's has 8 bits beside quantised linears, else 2 bytes at least.
    num_other = max(counts.num_plain - counts.num_head, 0)
    num_floats = num_other if ties and counts.is_tied else counts.num_plain
    weights_bytes = int(linear_bytes + experts_bytes) + _FLOAT_BYTES * num_floats
    table_bytes = (_LEAST_BYTES["int8"] if quantization in ("int8", "int4") else 2) * num_own
    least_bytes = int(counts.num_linear * _LEAST_BYTES[quantization] + table_bytes) + _FLOAT_BYTES * num_other
    export_bytes = int(counts.num_params * _FLOAT_BYTES * _EXPORT_FACTOR) + _LIBRARY_BYTES
    least_bytes = min(least_bytes, weights_bytes)
    return BuildSizes(weights_bytes, weights_bytes + _TEXT_BYTES, export_bytes, least_file_bytes=least_bytes)
