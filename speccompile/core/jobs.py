# SPDX-License-Identifier: Apache-2.0
"""What a method asks the build for, what a backend compiles with, and what a method is given at load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from speccompile.core.dims import ModelDims

PREFILL_CHUNK = 128  # tokens of a prompt that are read at once
STORED = "stored"  # quantization of a job: that of its checkpoint's weights, which stay as they are
AS_TARGET = "as target"  # model or quantization of a job: those that the target has
DECODER = "speccompile.export.decoder_source:DecoderSource"


class LayersRule(Protocol):
    """A frozen dataclass that chooses layers of the target once their number is known."""

    def layers(self, num_layers: int, weights: str) -> tuple[int, ...]:
        """Returns the decoder layers of the target, from 0, whose residual streams are wanted."""
        ...


@dataclass(frozen=True)
class DraftBounds:
    """How much a method's `Config` lets it draft."""

    length: int = 0  # draft tokens of a chain whose length is fixed; 0: there is none
    nodes: int = 0  # draft tokens of a tree whose shape is fixed; 0: there is none
    has_tree: bool = False
    is_open: bool = False  # the number of drafts is left open, so that it may be 0 where plain decoding is faster


@dataclass(frozen=True)
class TargetOutputs:
    """What a method reads of the target besides verdicts."""

    hidden: bool = False  # what the LM head reads, after the final norm
    hidden_layers: tuple[int, ...] | LayersRule = ()  # residual streams after these decoder layers, or their rule


@dataclass(frozen=True)
class CandidateOptions:
    """Options of a draft that gives candidate tokens after every scored node.

    Args:
        max_parallel, is_parallel: most draft tokens of one run, if the checkpoint has a mask token; whether it must.
    """

    num_candidates: int
    gives_probs: bool  # the distribution after each as well, for drafts that are drawn
    max_parallel: int = field(default=1, compare=False, kw_only=True)
    is_parallel: bool = field(default=False, compare=False, kw_only=True)


@dataclass(frozen=True)
class DecoderOptions(TargetOutputs):
    """Options of a decoder; the defaults are those of a draft that drafts chains.

    Args:
        keep_logits, images: of the target: logits come out as well; rows of images are inputs beside tokens.
    """

    keep_logits: bool = False
    num_layers: int | None = None  # build with fewer layers; None: all
    candidates: CandidateOptions = CandidateOptions(1, gives_probs=True)  # of a draft: what it gives after every node
    images: bool = False


@dataclass(frozen=True)
class GraphJob:
    """A graph that a bundle needs.

    Args:
        model, quantization: checkpoint folder or hub id; `none`, `int8`, `int4` or `STORED`; or `AS_TARGET`.
        options: a frozen dataclass of the kind that the source reads; all of it is in the graph's cache key.
        config, lora: folder whose config.json replaces the model's where no weights are read; adapter to merge.
        adapters: (name, folder or hub id) of the LoRA adapters that a request may choose, in order.
    """

    name: str  # the graph's name in the bundle; `make_proposer` finds its engine under it
    model: str
    quantization: str = "none"
    source: str = DECODER  # import string of the `core.protocols.GraphSource` that makes it; a decoder by default
    options: Any = DecoderOptions()
    config: str | None = None
    lora: str | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    is_optional: bool = False  # it is built only where its source `is_needed`, which depends on the checkpoint
    min_gain: float = 0.0  # of a draft: the build leaves it out by `bundle.choices.why_left_out`; 0: never


@dataclass(frozen=True)
class SourceContext:
    """What a graph is made for."""

    weights: str
    max_seq_len: int
    max_draft_nodes: int  # draft tokens one step may score at most, per slot
    target: ModelDims | None = None  # sizes of the target; None for the target itself
    target_job: GraphJob | None = None  # the target's own job, for speculators that share tables with it


@dataclass(frozen=True)
class WeightCounts:
    """How many weights a graph will have."""

    num_params: int
    num_linear: int  # weights in linear layers, which a quantisation changes
    num_plain: int
    num_head: int = 0  # of `num_linear`, those of an LM head that a backend may treat in its own way
    is_tied: bool = False
    num_experts: int = 0


@dataclass(frozen=True)
class BuildSizes:
    """What a backend predicts of a graph."""

    weights_bytes: int
    file_bytes: int
    export_peak_bytes: int  # resident memory while it is exported and lowered
    builder_peak_bytes: int = 0  # resident memory while the builder works, in a process of its own; 0: there is none
    least_file_bytes: int | None = None  # the same in the smallest form that may be chosen; None: there is one form


@dataclass(frozen=True)
class CompileOptions:
    """What a graph is compiled for, besides its own spec and quantisation.

    Args:
        backend: the `Config` of the chosen backend, a frozen dataclass of JSON-ready fields; None: its defaults.
        sample: a `checkpoints.texts.TextSample` of a target, for a backend that `calibrates`; None: speed alone
            decides.
        grids: an `ops.grid.GridSource`: for the quantisation `stored` the checkpoint, for others the tables that a
            draft shares with a target which keeps its own; None: all weights are floats.
    """

    dtype: str = "float32"  # of activations and caches: float32, float16 or bfloat16
    max_slots: int = 1
    max_rows: int = 0  # cache rows of each, those for a step's nodes after the last sequence row included; 0: no cache
    max_nodes: int = 1  # most nodes of one step that drafts are scored in, the root included
    backend: Any = None
    kv_cache: str = "auto"  # of the target's caches: int8, or auto: `dtype`
    consumes_model: bool = False  # the caller no longer needs the model: its weights may be freed while it is compiled
    sample: Any = None
    grids: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class StepCosts:
    """How long a step of one slot takes, as measured at build or first load: (nodes, milliseconds) by rising nodes."""

    ms_by_nodes: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StepCosts:
        """Returns the costs of a tuning record's `step_ms`, {"nodes": milliseconds}; none where it has another form.

        Noise only adds to a measurement: a time above that of more nodes is replaced by it.
        """
        steps = record.get("step_ms")
        rows = steps.items() if isinstance(steps, Mapping) else ()
        points, least = [], math.inf
        for nodes, ms in sorted(((int(nodes), float(ms)) for nodes, ms in rows), reverse=True):
            least = min(least, ms)
            points.append((nodes, least))
        return cls(tuple(reversed(points)))

    def ms(self, nodes: int) -> float:
        """Returns the milliseconds of a step of `nodes` nodes: piecewise linear, then with the mean slope of all."""
        points = self.ms_by_nodes
        if not points:
            return 0.0
        (first, first_ms), (last, last_ms) = points[0], points[-1]
        if nodes <= first or first == last:
            return first_ms
        if nodes > last:
            return last_ms + (last_ms - first_ms) * (nodes - last) / (last - first)
        right = next(i for i, (n, _) in enumerate(points) if n >= nodes)
        (n0, ms0), (n1, ms1) = points[right - 1], points[right]
        return ms0 + (ms1 - ms0) * (nodes - n0) / (n1 - n0)


@dataclass(frozen=True)
class MethodContext:
    """What a proposer is given at load: sizes and measured costs.

    Args:
        costs: by graph name (`target`, and those of the method's jobs).
        seq_lens: cache rows a sequence may use, by graph name; a graph left out has `max_seq_len`.
    """

    max_slots: int  # sequences decoded at once, at most
    max_seq_len: int  # cache rows a sequence of the target may use
    max_draft_nodes: int  # draft tokens one step may score at most, per slot
    costs: Mapping[str, StepCosts] = field(default_factory=dict)
    seq_lens: Mapping[str, int] = field(default_factory=dict)
