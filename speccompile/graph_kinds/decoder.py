# SPDX-License-Identifier: Apache-2.0
"""Specs of decoders and of what is attached to them: verification, candidates, and the compaction of caches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CandidateOptions
from speccompile.core.specs import (
    ADAPTER,
    CANDIDATE_PROBS,
    CANDIDATES,
    CONV_ROWS,
    DRAFT_PROBS,
    HIDDEN,
    IMAGE_NODES,
    IMAGE_ROWS,
    LENGTHS,
    LOGITS,
    NEXT_TOKEN,
    NODE_PROBS,
    NUM_ACCEPTED,
    PARENTS,
    PATH,
    PENDING,
    SCORED_NODES,
    STATE_LENGTHS,
    SURE_NODES,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    TOP_P,
    TREE_MASK,
    UNIFORMS,
    Dim,
    GraphSpec,
    TensorSpec,
    cache_names,
    hidden_name,
    state_names,
    updated_cache_name,
)
from speccompile.errors import RecipeError


def _caches(dims: ModelDims) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, ("batch", layer.num_kv_heads, "max_seq", layer.head_dim), "float32")
        for i, layer in enumerate(dims.per_layer)
        for name in cache_names(i)[: layer.num_caches]
    )


def _states(dims: ModelDims) -> tuple[TensorSpec, ...]:
    made = []
    for i, layer in enumerate(dims.per_layer):
        if (sizes := layer.recurrent) is not None:
            state: tuple[Dim, ...] = ("batch", sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
            shapes = (state, ("batch", PENDING, sizes.pending_width), ("batch", CONV_ROWS, sizes.conv_channels))
            named = [*zip(state_names(i), shapes, strict=True)][-sizes.num_states :]
            made += [TensorSpec(name, shape, "float32") for name, shape in named]
    return tuple(made)


def _updates(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(updated_cache_name(t.name), t.dims, t.dtype) for t in tensors)


def decoder_spec(
    name: str,
    dims: ModelDims,
    *,
    hidden: bool = False,
    hidden_layers: tuple[int, ...] = (),
    logits: bool = True,
    max_pending: int = 0,
    image_tokens: int = 0,
    adapters: bool = False,
) -> GraphSpec:
    """Returns the spec of a decoder as it is exported: tokens in, logits, hidden states and caches out.

    Args:
        hidden_layers: give the residual stream after these layers.
        max_pending: see `GraphSpec`; read where layers are recurrent.
        image_tokens: see `GraphSpec`; 0: its prompts have no images.
    """
    caches, states = _caches(dims), _states(dims)
    rows = TensorSpec(IMAGE_ROWS, ("batch", "nodes", dims.hidden_size), "float32")
    inputs = (
        TensorSpec(TOKENS, ("batch", "nodes"), "int64", "tokens"),
        TensorSpec(LENGTHS, ("batch",), "int64", "lengths"),
        TensorSpec(TREE_MASK, ("batch", "nodes", "nodes"), "bool"),
        TensorSpec(SCORED_NODES, ("batch", "scored"), "int64"),
        *((TensorSpec(ADAPTER, ("batch",), "int64"),) if adapters else ()),
        *((TensorSpec(IMAGE_NODES, ("batch", "nodes"), "bool"), rows) if image_tokens else ()),
        *(_STATE_INPUTS if states else ()),
        *states,
        *caches,
    )
    wanted = [TensorSpec(LOGITS, ("batch", "scored", dims.vocab_size), "float32")] if logits else []
    names = [HIDDEN] * hidden + [hidden_name(i) for i in hidden_layers]
    wanted += [TensorSpec(n, ("batch", "nodes", dims.hidden_size), "float32") for n in names]
    outputs = (*wanted, *_updates(states), *_updates(caches))
    held = tuple(c.name for c in caches)
    spec = GraphSpec(name, inputs, outputs, held, dims.vocab_size, reads_prompts=True, image_tokens=image_tokens)
    if not states:
        return spec
    kernels = {layer.recurrent.conv_kernel for layer in dims.per_layer if layer.recurrent is not None}
    return replace(
        spec,
        states=tuple(t.name for t in states),
        max_pending=max_pending,
        conv_history=max(kernels) - 1,
        state_trees=len(kernels) == 1,  # the pending rows of an accepted path begin at one place in all layers
    )


_STATE_INPUTS = (
    TensorSpec(STATE_LENGTHS, ("batch",), "int64", "lengths"),
    TensorSpec(SURE_NODES, ("batch",), "int64", "sure"),
)


def _with_tail(
    spec: GraphSpec, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], keep_logits: bool
) -> GraphSpec:
    num = len(spec.states) + len(spec.caches)
    plain = tuple(t for t in spec.outputs[: len(spec.outputs) - num] if keep_logits or t.name != LOGITS)
    return replace(
        spec,
        inputs=(*spec.inputs[: len(spec.inputs) - num], *inputs, *spec.inputs[len(spec.inputs) - num :]),
        outputs=(*outputs, *plain, *spec.outputs[len(spec.outputs) - num :]),
    )


WARP = (
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
        *WARP,
    )
    outputs = (
        TensorSpec(PATH, ("batch", "scored"), "int64"),
        TensorSpec(NUM_ACCEPTED, ("batch",), "int64"),
        TensorSpec(NEXT_TOKEN, ("batch",), "int64"),
    )
    return replace(_with_tail(spec, inputs, outputs, keep_logits), tail="verify")


def candidate_outputs(num_candidates: int, dists: bool) -> tuple[TensorSpec, ...]:
    """Returns outputs with candidates after each scored node, and with `dists` warped distributions for drawn drafts.

    `draft_vocab` is 1 if all are greedy.
    """
    rows: tuple[Dim, ...] = ("batch", "scored", num_candidates)
    candidates = (TensorSpec(CANDIDATES, rows, "int64"), TensorSpec(CANDIDATE_PROBS, rows, "float32"))
    return (*candidates, *((TensorSpec(NODE_PROBS, ("batch", "scored", "draft_vocab"), "float32"),) if dists else ()))


def candidate_spec(spec: GraphSpec, num_candidates: int, dists: bool) -> GraphSpec:
    """Returns `spec` with the tail `candidate_outputs`; with `dists` temperature, top_k and top_p are inputs."""
    made = _with_tail(spec, WARP if dists else (), candidate_outputs(num_candidates, dists), keep_logits=False)
    return replace(made, num_candidates=num_candidates, gives_probs=dists, tail="candidates")


def rollback_spec(dims: ModelDims) -> GraphSpec:
    """Returns the spec of the cache compaction graph: keep the rows of `path`, every attention layer, in place."""
    caches = _caches(dims)
    lengths = TensorSpec(LENGTHS, ("batch",), "int64", "lengths")
    inputs = (lengths, TensorSpec(PATH, ("batch", "scored"), "int64"), *caches)
    return GraphSpec("rollback", inputs, _updates(caches), tuple(c.name for c in caches))


NUM_CHANNELS = 3
PIXELS = "pixels"  # [1, channels, height, width] float32: an image, resized and normalised
IMAGE_EMBEDDING = "image_embedding"  # [1, image_tokens, hidden] float32: its rows


def vision_spec(name: str, image_size: int, image_tokens: int, hidden_size: int) -> GraphSpec:
    """Returns the spec of a vision tower with its projection."""
    pixels = TensorSpec(PIXELS, (1, NUM_CHANNELS, image_size, image_size), "float32")
    rows = TensorSpec(IMAGE_EMBEDDING, (1, image_tokens, hidden_size), "float32")
    return GraphSpec(name, (pixels,), (rows,))


DRAFT_VOCAB = "speculator.draft_vocab_size"


@dataclass(frozen=True)
class DraftVocab:
    """Which tokens a draft may name: a large LM head takes long. The others have probability 0 in its distribution."""

    size: int
    text: str = field(compare=False)  # file in which they are counted; no part of a cache key: the chosen tokens are


@dataclass(frozen=True)
class VocabCandidateOptions(CandidateOptions):
    """Options of a draft whose LM head may be cut."""

    vocab: DraftVocab | None = field(default=None, kw_only=True)  # the tokens that are kept; None: all


@dataclass(frozen=True, kw_only=True)
class DraftVocabFields:
    """Recipe fields; a method's `Config` inherits them.

    Args:
        draft_vocab_size: draft only the most frequent tokens of `draft_vocab_text`, so many of them; null: all tokens.
        draft_vocab_text: text like that which will be written: JSON lines with `text` or `prompt`, else a text file.

    Raises:
        RecipeError: there is one without the other, or the size is no vocabulary's.
    """

    draft_vocab_size: int | None = None
    draft_vocab_text: str | None = None

    def check_vocab(self) -> None:
        """Checks both fields."""
        size, text = self.draft_vocab_size, self.draft_vocab_text
        if size is not None and size < 2:
            raise RecipeError(DRAFT_VOCAB, f"{size}", "at least 2 tokens", "Correct the recipe.")
        if (size is None) != (text is None):
            got = "draft_vocab_text alone" if size is None else "draft_vocab_size alone"
            todo = "Give both, or neither to draft with the whole vocabulary."
            raise RecipeError("speculator", got, "the number of tokens and the text in which they are counted", todo)

    @property
    def draft_vocab(self) -> DraftVocab | None:
        size, text = self.draft_vocab_size, self.draft_vocab_text
        return None if size is None or text is None else DraftVocab(size, text)
