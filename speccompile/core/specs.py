# SPDX-License-Identifier: Apache-2.0
"""Names, dims and dtypes of every graph, declared once: ONNX, engine bindings and servers derive from these objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Dim = str | int
Probe = Literal["neutral", "tokens", "lengths", "states", "nodes", "last_node", "sure"]
SHARED_ROWS = "shared_rows"  # the dim of borrowed caches that are only read: their owner decides how many rows
_RARE = (
    "image_tokens",
    "mask_token",
    "window",
    "state_owner",
)  # fields of few graphs, left out of JSON at their defaults
PENDING, CONV_ROWS = "pending", "conv_rows"  # dims of recurrent states, of a fixed size: see `GraphSpec.state_shapes`

TOKENS = "tokens"  # [batch, nodes] int64: token of each node, node 0 is the root
LENGTHS = "lengths"  # [batch] int64: cache entries in use before this step
TREE_MASK = "tree_mask"  # [batch, nodes, nodes] bool: row i is true at i and at its ancestors
SCORED_NODES = "scored_nodes"  # [batch, scored] int64: the nodes whose logits are wanted
PARENTS = "parents"  # [batch, nodes] int64: parent of each node, -1 at the root and at padding
DRAFT_PROBS = "draft_probs"  # [batch, scored, draft_vocab] float32; draft_vocab 1 = deterministic drafts
UNIFORMS = "uniforms"  # [batch, scored, 2] float32 in [0, 1): accept this node, draw at this node
TEMPERATURE = "temperature"  # [batch] float32, 0 = greedy
TOP_K = "top_k"  # [batch] int64, 0 = off
TOP_P = "top_p"  # [batch] float32, 1 = off
PATH = "path"  # [batch, scored] int64: accepted nodes from the root on, -1 after the end
NUM_ACCEPTED = "num_accepted"  # [batch] int64: accepted draft tokens, root not counted
NEXT_TOKEN = "next_token"  # [batch] int64: recovered or bonus token
LOGITS = "logits"  # [batch, scored, vocab] float32
ADAPTER = "adapter"  # [batch] int64: number of each slot's LoRA adapter, in the order of the recipe from 1 on; 0: none
IMAGE_NODES = "image_nodes"  # [batch, nodes] bool: nodes whose embedding is a row of an image
IMAGE_ROWS = "image_rows"  # [batch, nodes, hidden] float32: those rows; not read at other nodes
HIDDEN = "hidden"  # [batch, nodes, hidden] float32: what the LM head reads
KV_ROWS = "kv_rows"  # [kv] int8, never read: its length is the number of cache rows that this step attends to
SAMPLED_TOKEN = "sampled_token"  # [batch] int64: the draft's own next token
CONFIDENCE = "confidence"  # [batch] float32: the draft's probability of it at temperature 1
SAMPLED_PROBS = "sampled_probs"  # [batch, vocab] float32: the warped distribution it was drawn from
START_NODES = "start_nodes"  # [batch] int64: the node of `hidden` that each slot's drafts start from
SAMPLED_TOKENS = "sampled_tokens"  # [batch, drafts] int64: a chain of drafts, each a child of the one before
CONFIDENCES = "confidences"  # [batch, drafts] float32: the draft's probability of each at temperature 1
CHAIN_PROBS = "chain_probs"  # [batch, drafts + 1, draft_vocab] float32: `draft_probs` of that chain, row 0 unused
DRAFT_PARENTS = "draft_parents"  # [batch, drafts] int64: parent draft of each, counted from 1; 0 = root
CANDIDATES = "candidates"  # [batch, scored, candidates] int64: most probable tokens after each node, best first
CANDIDATE_PROBS = "candidate_probs"  # [batch, scored, candidates] float32: their probabilities at temperature 1
TARGET_LENGTHS = "target_lengths"  # [batch] int64: rows in use of the target's caches, where a draft reads those
NODE_PROBS = "node_probs"  # [batch, scored, draft_vocab] float32: the warped distribution after each; 1 wide if greedy
FEATURES = "hidden.features"  # [batch, states, hidden] float32: what a draft reads of positions
FEATURE_NODES = "feature_nodes"  # [batch, nodes] int64: the row of `hidden.features` that belongs to each node
NEXT_FEATURES = "hidden.next"  # [batch, next_states, hidden] float32: what node 0 read, then each node's own
STATE_LENGTHS = "state_lengths"  # [batch] int64: rows of each slot that its recurrent states hold
SURE_NODES = "sure_nodes"  # [batch] int64: the first nodes of this step that stay whatever is decided


def hidden_name(layer: int) -> str:
    """Returns the name of the residual stream after decoder layer `layer` (0-based)."""
    return f"{HIDDEN}.{layer}"


def cache_names(layer: int) -> tuple[str, str]:
    """Returns the names of the K and V cache inputs of a layer."""
    return f"k_cache.{layer}", f"v_cache.{layer}"


def state_names(layer: int) -> tuple[str, str, str]:
    """Returns the names of a recurrent layer's states; a layer without a state has the last one alone.

    `state.i` [batch, Hv, dk, dv] float32; `pending.i` [batch, pending, width] float32, the rows of the last step that
    are not applied to it; `conv_rows.i` [batch, conv_rows, C] float32, the raw rows before its causal convolution: the
    last ones of the tokens that the state holds, then the pending ones. `RecurrentDims` has the sizes.
    """
    return f"state.{layer}", f"pending.{layer}", f"conv_rows.{layer}"


def updated_cache_name(cache: str) -> str:
    """Returns the name of the output with the updated cache or state `cache`; at run time it aliases its input."""
    return f"{cache}.updated"


def compacted_cache_name(cache: str) -> str:
    """Returns the name of the output that carries the updated `cache` after KVRollback; it aliases the same memory."""
    return f"{cache}.compacted"


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output."""

    name: str
    dims: tuple[Dim, ...]  # a str is a dynamic dim by name, an int is static
    dtype: str  # numpy name: float32, int64, bool, ...; bfloat16 is ml_dtypes' name
    probe: Probe = "neutral"  # of an input: how it is fed in a probe run, see `probes.probe_inputs`


@dataclass(frozen=True)
class BorrowedCache:
    """A cache input that another engine owns, slot for slot; only those in `GraphSpec.caches` are written."""

    name: str
    cache: str
    owner: str = "target"


@dataclass(frozen=True)
class GraphSpec:
    """A graph's inputs and outputs in order.

    Cache inputs come last, recurrent states before them, and their updates alike among the outputs; compacted caches
    come after all updates.

    Args:
        draft_vocab: width of the distributions it gives, where it drafts in a vocabulary of its own; 0 = `vocab_size`.
        borrowed: inputs that are caches of other engines; those that are only read come before `caches`.
        mask_token: token of the rows after the root's, each of which gives one more draft token; None: it reads none.
        tail: what the passes put after the exported graph's logits: `verify` or `candidates`.
        states: names of the inputs that are recurrent states, in order; each has an output `updated_cache_name`, and
            both are bound at the same address.
        max_pending: of a graph with states: rows of a slot's last step that may wait for its verdict, which are most
            nodes of a step with drafts, the root included. The size of the dim "pending".
        conv_history: rows before its own that a row of a convolution sees. "conv_rows" is this and `max_pending`.
        state_trees: of a graph with states: they follow the paths of `tree_mask`; otherwise every step is a chain.
        image_tokens: of a graph that reads images: tokens of each, which a chunk of a prompt holds all or none of.
        state_owner: the graph whose recurrent states its own ones follow, see `protocols.States.follow`; "": none.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    caches: tuple[str, ...] = ()
    vocab_size: int = 0
    max_rows: int = 0  # cache rows it can address (its position tables end there); 0 = not limited
    draft_vocab: int = 0
    borrowed: tuple[BorrowedCache, ...] = ()
    rows_written_ahead: int = 0  # cache rows that a run writes after those of its nodes
    reads_prompts: bool = False  # it runs over the chunks of a prompt as well as over steps
    scores: Literal["one", "nodes"] = "nodes"  # which nodes a run scores by default: `one` of each slot, or all `nodes`
    num_candidates: int = 0  # most probable tokens that it gives after each scored node
    num_drafts: int = 0  # draft tokens that it gives for each slot in one run, a chain or a tree
    mask_token: int | None = None
    gives_probs: bool = False  # where a slot samples it also gives the distributions that drafts are drawn from
    tail: Literal["none", "verify", "candidates"] = "none"
    states: tuple[str, ...] = ()
    max_pending: int = 0
    conv_history: int = 0
    state_trees: bool = False
    image_tokens: int = 0
    window: int = 0  # the longest window of its layers, where rows before it may be dropped; 0: all rows are kept
    state_owner: str = ""

    @property
    def own_caches(self) -> tuple[str, ...]:
        """The caches that its engine owns."""
        shared = {cache_ref.name for cache_ref in self.borrowed}
        return tuple(name for name in self.caches if name not in shared)

    @property
    def cache_inputs(self) -> tuple[str, ...]:
        """All inputs that are caches, in order."""
        held = {*self.caches, *(cache_ref.name for cache_ref in self.borrowed)}
        return tuple(t.name for t in self.inputs if t.name in held)

    @property
    def plain_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that are no caches and no states."""
        held = {*self.cache_inputs, *self.states}
        return tuple(t for t in self.inputs if t.name not in held)

    @property
    def plain_outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs that are no updates of caches or states."""
        held = {updated_cache_name(name) for name in (*self.caches, *self.states)}
        return tuple(t for t in self.outputs if t.name not in held)

    def state_shapes(self, num_slots: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the states of so many slots by name, in order; all are float32."""
        sizes = {"batch": num_slots, PENDING: self.max_pending, CONV_ROWS: self.conv_history + self.max_pending}
        return {n: tuple(sizes[d] if isinstance(d, str) else d for d in self.input(n).dims) for n in self.states}

    @property
    def dist_width(self) -> int:
        """The width of the distributions that it gives."""
        return self.draft_vocab or self.vocab_size

    @cached_property
    def dynamic_dims(self) -> Mapping[str, tuple[tuple[int, str], ...]]:
        """By input that is no cache: its (axis, dim)s of dynamic size."""
        return {t.name: tuple((i, d) for i, d in enumerate(t.dims) if isinstance(d, str)) for t in self.plain_inputs}

    def input(self, name: str) -> TensorSpec:
        """Returns the input of that name; KeyError when there is none."""
        return {t.name: t for t in self.inputs}[name]

    def output(self, name: str) -> TensorSpec:
        """Returns the output of that name; KeyError when there is none."""
        return {t.name: t for t in self.outputs}[name]

    def json_from_spec(self) -> dict[str, Any]:
        """Returns a JSON-ready dict for `spec_from_json`, without what few graphs have."""
        data = asdict(self)
        unused = () if self.states else ("states", "max_pending", "conv_history", "state_trees")
        for name in (*unused, *(n for n in _RARE if data[n] == getattr(GraphSpec, n))):
            del data[name]
        return data


def spec_from_json(data: Mapping[str, Any]) -> GraphSpec:
    """Returns the spec of a dict that `GraphSpec.json_from_spec` made."""
    known = _given(data)
    cache_refs = tuple(BorrowedCache(**_given(cache_ref)) for cache_ref in known.get("borrowed", ()))
    made = {}
    for key in ("inputs", "outputs"):
        made[key] = tuple(TensorSpec(**{**_given(row), "dims": tuple(row["dims"])}) for row in known[key])
    states = tuple(known.get("states", ()))
    return GraphSpec(**{**known, **made, "caches": tuple(known["caches"]), "borrowed": cache_refs, "states": states})


def _given(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}


def probe_inputs(
    spec: GraphSpec, *, num_slots: int = 1, num_nodes: int = 1, length: int = 0
) -> dict[str, NDArray[Any]]:
    """Returns the feeds of one run by name, int64, or float32 for states; `neutral` inputs are left out.

    `tokens` are drawn from the vocabulary, `lengths` the rows in use, `states` arbitrary numbers, `nodes` the index of
    each node and `last_node` that of the last one of each slot. `sure` is 0 as in a step with drafts, or all nodes
    where a step has more than may wait for a verdict.

    Args:
        num_nodes: of each slot, the size of every dynamic dim but the batch; `scored` may be 1.
    """
    sizes = {"batch": num_slots, "scored": 1 if spec.scores == "one" else num_nodes}
    feeds: dict[str, NDArray[Any]] = {}
    for tensor in spec.plain_inputs:
        shape = [sizes.get(d, num_nodes) if isinstance(d, str) else d for d in tensor.dims]
        if tensor.probe == "tokens":
            feeds[tensor.name] = np.random.default_rng(num_nodes).integers(0, spec.vocab_size, shape)
        elif tensor.probe == "states":
            feeds[tensor.name] = np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)
        elif tensor.probe == "nodes":
            feeds[tensor.name] = np.broadcast_to(np.arange(shape[1]), shape).copy()
        elif tensor.probe != "neutral":
            sure = num_nodes if num_nodes > spec.max_pending else 0
            values = {"lengths": length, "last_node": num_nodes - 1, "sure": sure}
            feeds[tensor.name] = np.full(shape, values[tensor.probe])
    return feeds


def all_sure(spec: GraphSpec, num_slots: int, num_nodes: int) -> dict[str, NDArray[Any]]:
    """Returns the feeds by which all nodes of a step stay in recurrent states; none for a graph without states."""
    return {SURE_NODES: np.full(num_slots, num_nodes, dtype=np.int64)} if spec.states else {}
