# SPDX-License-Identifier: Apache-2.0
"""Names, dims and dtypes of every graph, declared once.

ONNX inputs and outputs, engine bindings and server configurations derive from these objects and are
asserted against them; no tensor name is written anywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

Dim = str | int
Role = Literal["target", "draft"]
Probe = Literal["neutral", "tokens", "lengths", "states", "nodes", "last_node"]
SHARED_ROWS = "shared_rows"  # the dim of borrowed caches that are only read: their owner decides how many rows
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # of activations and caches

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
NODE_PROBS = (
    "node_probs"  # [batch, scored, draft_vocab] float32: the warped distribution after each node; 1 wide when greedy
)
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


def updated_cache_name(cache: str) -> str:
    """Returns the name of the output that carries the updated `cache`; at run time it aliases its input."""
    return f"{cache}.updated"


def borrowed_name(owner: str, cache: str) -> str:
    """Returns the name of the input that is the cache `cache` of the graph `owner`, where it is only read."""
    return f"{owner}.{cache}"


def compacted_cache_name(cache: str) -> str:
    """Returns the name of the output that carries the updated `cache` after KVRollback; it aliases the same memory."""
    return f"{cache}.compacted"


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output.

    Args:
        name: tensor name in the graph.
        dims: a str is a dynamic dim by name, an int is static.
        dtype: numpy name: float32, int64, bool, ...; bfloat16 is ml_dtypes' name.
        probe: of an input: how it is fed in a probe run, see `probes.probe_inputs`.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: str
    probe: Probe = "neutral"


@dataclass(frozen=True)
class ModelDims:
    """The sizes of a decoder that graphs, caches and predictions need."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    num_params: int = 0

    @property
    def cache_row_bytes(self) -> int:
        """Bytes of K and V, all layers, of one token of one slot in float32."""
        return self.cache_row_bytes_in("float32")

    def cache_row_bytes_in(self, dtype: str) -> int:
        """Returns the bytes of K and V, all layers, of one token of one slot; `dtype` is a key of `DTYPE_BYTES`."""
        return 2 * DTYPE_BYTES[dtype] * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class BorrowedCache:
    """A cache input that another engine owns: it is bound at the owner's address, slot for slot.

    Args:
        name: of the input. One that is in `GraphSpec.caches` is written in place, any other is only read.
        cache: its name in the owner's graph.
        owner: name of the graph that owns it.
    """

    name: str
    cache: str
    owner: str = "target"


@dataclass(frozen=True)
class GraphSpec:
    """A graph's inputs and outputs in order.

    Cache inputs come last among the inputs, their updates last among the outputs; where the graph also compacts
    its caches, the compacted ones come after all updates.

    Args:
        name: the graph's name.
        inputs: in order.
        outputs: in order.
        caches: names of the cache inputs.
        vocab_size: of the tokens it reads.
        max_rows: cache rows it can address (its position tables end there); 0 = not limited.
        draft_vocab: width of the distributions it gives, where it drafts in a vocabulary of its own; 0 = `vocab_size`.
        borrowed: inputs that are caches of other engines; those that are only read come before `caches`.
        rows_written_ahead: cache rows that a run writes after those of its nodes.
        reads_prompts: it runs over the chunks of a prompt as well as over steps.
        scores: which nodes a run scores by default: `one` of each slot, or all `nodes`.
        num_candidates: most probable tokens that it gives after each scored node.
        num_drafts: draft tokens that it gives for each slot in one run, a chain or a tree.
        gives_probs: where a slot samples it also gives the distributions that drafts are drawn from.
        tail: what the passes put after the exported graph's logits: `verify` or `candidates`.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    caches: tuple[str, ...] = ()
    vocab_size: int = 0
    max_rows: int = 0
    draft_vocab: int = 0
    borrowed: tuple[BorrowedCache, ...] = ()
    rows_written_ahead: int = 0
    reads_prompts: bool = False
    scores: Literal["one", "nodes"] = "nodes"
    num_candidates: int = 0
    num_drafts: int = 0
    gives_probs: bool = False
    tail: Literal["none", "verify", "candidates"] = "none"

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
        """The inputs that are no caches."""
        held = set(self.cache_inputs)
        return tuple(t for t in self.inputs if t.name not in held)

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
        """Returns a JSON-ready dict; `spec_from_json` reads it back."""
        return asdict(self)


def spec_from_json(data: Mapping[str, Any]) -> GraphSpec:
    """Returns the spec of a dict that `GraphSpec.json_from_spec` made."""
    known = _given(data)

    def tensors(key: str) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(**{**_given(row), "dims": tuple(row["dims"])}) for row in known[key])

    cache_refs = tuple(BorrowedCache(**_given(cache_ref)) for cache_ref in known.get("borrowed", ()))
    made = {"inputs": tensors("inputs"), "outputs": tensors("outputs"), "caches": tuple(known["caches"])}
    return GraphSpec(**{**known, **made, "borrowed": cache_refs})


def _given(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that are not null."""
    return {key: value for key, value in data.items() if value is not None}


def _caches(dims: ModelDims) -> tuple[TensorSpec, ...]:
    shape: tuple[Dim, ...] = ("batch", dims.num_kv_heads, "max_seq", dims.head_dim)
    return tuple(TensorSpec(n, shape, "float32") for i in range(dims.num_layers) for n in cache_names(i))


def decoder_spec(
    name: str, dims: ModelDims, *, hidden: bool = False, hidden_layers: tuple[int, ...] = (), logits: bool = True
) -> GraphSpec:
    """Returns the spec of a decoder as it is exported: tokens in, logits, hidden states and caches out."""
    caches = _caches(dims)
    inputs = (
        TensorSpec(TOKENS, ("batch", "nodes"), "int64", "tokens"),
        TensorSpec(LENGTHS, ("batch",), "int64", "lengths"),
        TensorSpec(TREE_MASK, ("batch", "nodes", "nodes"), "bool"),
        TensorSpec(SCORED_NODES, ("batch", "scored"), "int64"),
        *caches,
    )
    wanted = [TensorSpec(LOGITS, ("batch", "scored", dims.vocab_size), "float32")] if logits else []
    names = [HIDDEN] * hidden + [hidden_name(i) for i in hidden_layers]
    wanted += [TensorSpec(n, ("batch", "nodes", dims.hidden_size), "float32") for n in names]
    outputs = (*wanted, *(TensorSpec(updated_cache_name(c.name), c.dims, c.dtype) for c in caches))
    held = tuple(c.name for c in caches)
    return GraphSpec(name, inputs, outputs, held, dims.vocab_size, reads_prompts=True)


def _with_tail(
    spec: GraphSpec, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], keep_logits: bool
) -> GraphSpec:
    num = len(spec.caches)
    plain = tuple(t for t in spec.outputs[: len(spec.outputs) - num] if keep_logits or t.name != LOGITS)
    return replace(
        spec,
        inputs=(*spec.inputs[: len(spec.inputs) - num], *inputs, *spec.inputs[len(spec.inputs) - num :]),
        outputs=(*outputs, *plain, *spec.outputs[len(spec.outputs) - num :]),
    )


_WARP = (
    TensorSpec(TEMPERATURE, ("batch",), "float32"),
    TensorSpec(TOP_K, ("batch",), "int64"),
    TensorSpec(TOP_P, ("batch",), "float32"),
)


def verified_spec(spec: GraphSpec, keep_logits: bool = False) -> GraphSpec:
    """Returns `spec` with a SpecVerify tail: verdicts out; logits stay inside unless kept."""
    inputs = (
        TensorSpec(PARENTS, ("batch", "nodes"), "int64"),
        TensorSpec(DRAFT_PROBS, ("batch", "scored", "draft_vocab"), "float32"),
        TensorSpec(UNIFORMS, ("batch", "scored", 2), "float32"),
        *_WARP,
    )
    outputs = (
        TensorSpec(PATH, ("batch", "scored"), "int64"),
        TensorSpec(NUM_ACCEPTED, ("batch",), "int64"),
        TensorSpec(NEXT_TOKEN, ("batch",), "int64"),
    )
    return replace(_with_tail(spec, inputs, outputs, keep_logits), tail="verify")


def candidate_outputs(num_candidates: int, dists: bool) -> tuple[TensorSpec, ...]:
    """Returns the outputs of a graph with candidates after each scored node; `draft_vocab` is 1 if all are greedy.

    Args:
        num_candidates: tokens a node.
        dists: the warped distribution after each node as well, for drafts that are drawn.
    """
    rows: tuple[Dim, ...] = ("batch", "scored", num_candidates)
    candidates = (TensorSpec(CANDIDATES, rows, "int64"), TensorSpec(CANDIDATE_PROBS, rows, "float32"))
    return (*candidates, *((TensorSpec(NODE_PROBS, ("batch", "scored", "draft_vocab"), "float32"),) if dists else ()))


def candidate_spec(spec: GraphSpec, num_candidates: int, dists: bool) -> GraphSpec:
    """Returns `spec` with a tail that gives candidates after every scored node, for drafts of trees; no logits.

    Args:
        spec: of a decoder.
        num_candidates: see `candidate_outputs`.
        dists: see `candidate_outputs`; temperature, top_k and top_p are inputs then.
    """
    made = _with_tail(spec, _WARP if dists else (), candidate_outputs(num_candidates, dists), keep_logits=False)
    return replace(made, num_candidates=num_candidates, gives_probs=dists, tail="candidates")


def heads_spec(name: str, hidden_size: int, vocab_size: int, num_drafts: int) -> GraphSpec:
    """Returns the spec of heads on the target's hidden state that draft a chain in one run; no caches.

    Args:
        name: the graph's name.
        hidden_size: of the target's `hidden`, read as the target gives it; `start_nodes` picks a row of each slot.
        vocab_size: of tokens and distributions.
        num_drafts: length of the chain after the root in `tokens`.
    """
    inputs = (*start_inputs(hidden_size), ROOT, TensorSpec(UNIFORMS, ("batch", num_drafts), "float32"), *_WARP)
    drafts = chain_outputs(num_drafts)
    return GraphSpec(name, inputs, drafts, (), vocab_size, scores="one", num_drafts=num_drafts, gives_probs=True)


ROOT = TensorSpec(TOKENS, ("batch", 1), "int64", "tokens")  # of heads: the token that their drafts follow


def start_inputs(hidden_size: int) -> tuple[TensorSpec, TensorSpec]:
    """Returns what heads read of the target: the states of its step, and the node of each slot to start from."""
    return (
        TensorSpec(HIDDEN, ("batch", "nodes", hidden_size), "float32", "states"),
        TensorSpec(START_NODES, ("batch",), "int64", "last_node"),
    )


def chain_outputs(num_drafts: int) -> tuple[TensorSpec, ...]:
    """Returns the outputs of a graph that drafts a whole chain; `draft_vocab` may be 1 when every slot is greedy."""
    return (
        TensorSpec(SAMPLED_TOKENS, ("batch", num_drafts), "int64"),
        TensorSpec(CONFIDENCES, ("batch", num_drafts), "float32"),
        TensorSpec(CHAIN_PROBS, ("batch", num_drafts + 1, "draft_vocab"), "float32"),
    )


def rollback_spec(dims: ModelDims) -> GraphSpec:
    """Returns the spec of the cache compaction graph: keep the rows of `path`, every layer, in place."""
    caches = _caches(dims)
    lengths = TensorSpec(LENGTHS, ("batch",), "int64", "lengths")
    inputs = (lengths, TensorSpec(PATH, ("batch", "scored"), "int64"), *caches)
    outputs = tuple(TensorSpec(updated_cache_name(c.name), c.dims, c.dtype) for c in caches)
    return GraphSpec("rollback", inputs, outputs, tuple(c.name for c in caches))
