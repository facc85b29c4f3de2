# SPDX-License-Identifier: Apache-2.0
"""What engines, proposers and graph sources promise to the runtime and the build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.sampling_params import SamplingParams
from speccompile.core.specs import GraphSpec
from speccompile.core.tree import Floats
from speccompile.errors import RuntimeFault

# By name. A value is an array, or one that stays on a device: the latter has `shape` and `dtype`, can be fed to an
# engine as it is, and becomes a host array by `numpy.asarray`.
Outputs = Mapping[str, NDArray[Any]]


class DeviceLost(RuntimeFault):
    """A device has failed for the rest of this process: no engine on it can be used again."""


class States(Protocol):
    """The recurrent states of an engine's slots.

    After a step they hold the tokens before it and its `sure_nodes`; the next step applies other nodes that were
    accepted. So the next `lengths` may roll back among these pending nodes alone.
    """

    scores_trees: bool  # whether steps may be trees

    def reusable(self, slot: int, rows: int) -> int:
        """Returns how many of a slot's first `rows` tokens one can go on from: by its states, else by its snapshot."""
        ...

    def resume(self, slot: int, rows: int) -> None:
        """Makes a slot's states ready for a step after its first `rows` tokens: 0, or a length from `reusable`."""
        ...

    def follow(self, num_slots: int) -> None:
        """Copies what the owner's states of the first slots hold, where the spec names one: `GraphSpec.state_owner`."""
        ...

    def take_snapshot(self, slot: int) -> None:
        """Copies the states of a slot, in place of its earlier snapshot; it moves with the slot."""
        ...


class Engine(Protocol):
    """A loaded graph with its caches.

    It owns static caches [slots, kv_heads, max_seq, head_dim]; a step works on a contiguous range of slots. Borrowed
    caches are another engine's memory, slot for slot, which only the owner moves, resets and compacts. The caller keeps
    the lengths. Recurrent states travel with their slot, but cannot be cut: see `States`. Not thread-safe.
    """

    spec: GraphSpec
    max_slots: int
    max_rows: int
    compacts_in_step: bool  # a step keeps the accepted path itself: `compact` is not called
    seconds: float  # spent in `run` and `compact` since it was loaded
    max_scored: int | None  # most `scored_nodes` of a step; None: as many as it has nodes

    @property
    def states(self) -> States | None:
        """The recurrent states of its slots; None: its graph has none."""
        ...

    @property
    def graph_fault(self) -> str | None:
        """Why its steps no longer run as captured graphs; None: they do, or never could."""
        ...

    @property
    def view_rows(self) -> int:
        """Rows of its own caches that every step works on, which `shrink` reduces; 0: no more than it needs."""
        ...

    def run(self, feeds: Mapping[str, np.ndarray], first_slot: int = 0) -> Mapping[str, np.ndarray]:
        """Runs one step over the slots first_slot .. first_slot + batch - 1.

        Args:
            feeds: inputs by name (see `speccompile.core.specs`); `tokens` [batch, nodes], `lengths` [batch] always. An
                input left out is neutral: a chain, every node in `scored_nodes`, deterministic drafts, greedy.

        Returns:
            The outputs by name, without the caches. The arrays are valid until the next `run`. A `next_token` of -1
            means that a row of the slot's logits was not finite.

        Raises:
            RuntimeFault: lengths + nodes exceed `max_rows`, or the slots exceed `max_slots`; or the recurrent states of
                a slot do not hold its first `lengths` tokens.
            DeviceLost: no engine of the device can be used again; any call may raise it.
        """
        ...

    def reset(self, rows: int = 1) -> None:
        """Marks all slots unused; the caches may be laid out anew for sequences of `rows` rows."""

    def shrink(self, rows: int) -> None:
        """Keeps the first `rows` rows of each slot; the caches may be laid out anew for these."""

    def move_slot(self, source: int, dest: int, rows: int | None = None) -> None:
        """Copies the cache of slot `source` to slot `dest`, at least its first `rows` rows; None: all."""

    def swap_slots(self, first: int, second: int, rows: int) -> None:
        """Exchanges at least the first `rows` rows of two slots."""

    def slide_slot(self, slot: int, first: int, num: int) -> None:
        """Moves `num` rows of a slot from row `first` on to its front; see `GraphSpec.window`."""

    def clear_slot(self, slot: int) -> None:
        """Zeroes all rows of a slot's own caches: they may hold NaN, which masks do not hide (0 x NaN is NaN)."""

    def read_caches(self, slot: int, rows: int) -> Mapping[str, NDArray[Any]] | None:
        """Returns the first `rows` rows of a slot of its own caches, [kv_heads, rows, head_dim] by name; for checks.

        The arrays are valid until the next `run`. None: its caches are not shown.
        """
        ...

    def compact(self, lengths: np.ndarray, path: np.ndarray) -> None:
        """Runs KVRollback in place: row lengths[b] + i of slot b becomes row lengths[b] + path[b, i].

        Args:
            lengths: [batch] int64, cache entries before the step that wrote the tree.
            path: [batch, depth] int64, nodes to keep in order; -1 ends a path.
        """
        ...


class StepTimes(NamedTuple):
    """Where the time of one step went, in seconds."""

    propose_s: float
    score_s: float
    step_s: float  # the whole step, both included; as a planner sees it, with the delivery of its outputs


class TokenSequence(Protocol):
    """What a proposer may read of a sequence that is being decoded."""

    tokens: list[int]  # prompt and emitted tokens; the last one is the root, not yet in the target's cache
    sampling: SamplingParams
    max_drafts: int  # draft tokens on one path that this step may use: limits and room in the cache
    draft_state: Any  # the proposer's own state: set by `start` and `resume`, not read elsewhere
    # False: the draft has not read its prompt, so it never drafts; nothing is kept for it. In `start` and `resume`:
    # `prefill` will not be called.
    has_draft: bool
    grammar: Any  # `drafting.grammars.Grammar` that has read `tokens`; None: any token may follow


class Batch(Protocol):
    """The active sequences: slot i of every engine belongs to `sequences[i]`."""

    is_greedy: bool  # every sequence has temperature 0, so that drafts do not race either
    # Drafts are forced in this step: chains have `max_drafts` tokens, whatever a budget expects to gain; trees have the
    # size that the method's budget decides, and are at most `max_drafts` deep.
    is_forced: bool
    # Draft tokens of every sequence, where text, context and `max_drafts` allow and whatever they cost; above 0 where a
    # request asks for drafts in every step (`speculation: on`).
    least_drafts: int

    @property
    def sequences(self) -> Sequence[TokenSequence]:
        """The sequences in the order of their slots."""
        ...

    @property
    def may_draw(self) -> bool:
        """Whether a sequence samples and texts may depend on drafts; else drafts are deterministic, without draws."""
        ...

    def race_draws(self, depth: int) -> Floats:
        """Returns [batch, 2] float32: the draws of the race that decides the token at `depth` (1 = child of the root).

        Deterministic drafts may use them (`drafting.race`): they are the target's, so both sides mostly agree.
        """
        ...

    def warp_feeds(self) -> dict[str, NDArray[Any]]:
        """Returns `temperature`, `top_k`, `top_p` [batch]; those that are neutral in every sequence are left out."""
        ...

    def draft_uniforms(self, depth: int, num: int = 1) -> Floats:
        """Returns [batch, num] float32: the draws that decide the draft tokens at `depth` (1 = child of the root)."""
        ...


class GraphSource(Protocol):
    """A graph before it is compiled: checkpoint or config, sizes, tensors; a job's `source`. Needs no torch."""

    role: str  # in the manifest: target, draft, heads, ...
    folder: Path  # of the checkpoint, or of the config.json where weights are random
    dims: Any  # frozen dataclass of the sizes, JSON-ready, with `num_params`
    max_rows: int  # of its caches; 0 without caches
    has_tokenizer: bool  # reads text of its own, so that its tokenizer must be the target's
    shares_weights: bool  # the target's for the greater part: where graphs are ONNX, what is equal is written once
    needs_tables: bool  # the target's embeddings or LM head are copied into the graph
    is_needed: bool  # by its checkpoint, see `GraphJob.is_optional`; where not, nothing else is called

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        """Finds the folder and reads the sizes.

        Raises:
            CheckpointError: no such folder or hub id, or a wrong config.json.
            RecipeError: the sizes do not fit the target's or the recipe's.
        """
        ...

    def check(self) -> None:
        """Proves the weights complete; not called where they are random."""
        ...

    def digests(self) -> dict[str, str]:
        """Returns the SHA-256 by name of the files that `export` reads."""
        ...

    def counts(self) -> WeightCounts | None:
        """Returns the weight counts; None where config.json and `dims` are enough, as for a decoder."""
        ...

    def spec(self) -> GraphSpec:
        """Returns the inputs and outputs of the compiled graph, tail included."""
        ...

    def export(self, progress: Callable[[str], None]) -> tuple[Any, Any]:
        """Returns the neutral graph (an `onnx_ir.Model`), and `dims` with what only the weights can show."""
        ...

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        """Runs the compiled graph a little; `export.checks` has checks.

        Returns what was seen, empty in too small caches.

        Args:
            max_nodes: most nodes that a step may score, at least 2.
        """
        ...
