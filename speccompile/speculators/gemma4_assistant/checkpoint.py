# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's assistants as they are published, and as the source of a graph. Needs no torch before the export.

A text model of a few layers without keys and values, with projections from and to the target's width. With ordered
embeddings the LM head computes the logits of the tokens of the most probable centroids alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import read_text_config, stated_size
from speccompile.checkpoints.folders import find_folder
from speccompile.checkpoints.layer_sizes import FULL, GEMMA4_TYPES, SLIDING, gemma4_kinds
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.specs import GraphSpec, cache_names
from speccompile.doctor.decoder_rows import times
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, finding, flag, unchanged
from speccompile.errors import CheckpointError, RecipeError
from speccompile.export.checks import check_heads
from speccompile.export.speculator_source import SpeculatorSource, check_agreement, check_room
from speccompile.graph_kinds.borrowed import reading_spec
from speccompile.graph_kinds.heads import DraftForm

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
NUM_DRAFTS = 4  # of a chain whose length the recipe leaves open
_LAYER, _OVER = "model.layers.{layer}", (("layer", "num_layers", 0),)
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _derive(sizes: Sizes) -> None:
    sizes["two_hidden"] = times(2, sizes["target_hidden"])


def _check_heads(case: Case) -> Iterator[Finding]:
    """Yields findings where queries are none that the heads of a layer's kind give, or there are too few centroids."""
    num, chosen, vocab = (int(case.sizes[name] or 0) for name in ("num_centroids", "num_chosen", "vocab"))
    if case.sizes["is_ordered"] and num and (chosen > num or vocab % num):
        got, expected = f"{num} centroids of {vocab} tokens", f"at least the {chosen} that are chosen, each of as many"
        yield finding("error", case.where_in_config("num_centroids"), got, expected, "Correct config.json.")
    text = case.config.get("text_config")
    if not isinstance(text, Mapping) or not case.sizes.get("num_layers"):
        return
    try:
        widths = head_dims(str(case.folder / "config.json"), text, int(case.sizes["num_layers"] or 0))
    except CheckpointError as fault:
        yield finding("error", fault.where, fault.got, fault.expected, fault.todo)
        return
    for layer, width in enumerate(widths):
        key = case.prefix + _LAYER.format(layer=layer) + ".self_attn.q_norm.weight"
        header = case.files.headers.get(key)
        if header is not None and tuple(header.shape) != (width,):
            todo = "Config and weights are of different assistants: fetch the folder again."
            got = f"a norm of {list(header.shape)} columns"
            yield finding("error", case.where(key), got, f"[{width}], as the config says of its kind", todo)


def _rows() -> tuple[Row, ...]:
    """Widths of queries differ by the kind of layer: `check_heads` compares them."""
    attention = f"{_LAYER}.self_attn"
    return (
        Row("model.embed_tokens.weight", ("vocab", "hidden")),
        Row(f"{attention}.q_proj.weight", ("q_width", "hidden"), _OVER),
        Row(f"{attention}.q_norm.weight", ("head_width",), _OVER),
        Row(f"{attention}.o_proj.weight", ("hidden", "q_width"), _OVER),
        *(Row(f"{_LAYER}.{name}.weight", ("hidden",), _OVER) for name in _NORMS),
        Row(f"{_LAYER}.mlp.gate_proj.weight", ("inner", "hidden"), _OVER),
        Row(f"{_LAYER}.mlp.up_proj.weight", ("inner", "hidden"), _OVER),
        Row(f"{_LAYER}.mlp.down_proj.weight", ("hidden", "inner"), _OVER),
        Row(f"{_LAYER}.layer_scalar", (1,), _OVER),
        Row("model.norm.weight", ("hidden",)),
        Row("pre_projection.weight", ("hidden", "two_hidden")),
        Row("post_projection.weight", ("target_hidden", "hidden")),
        Row("masked_embedding.centroids.weight", ("num_centroids", "hidden"), need="is_ordered"),
        Row("masked_embedding.token_ordering", ("vocab",), dtypes=("I64", "I32"), need="is_ordered"),
        Row("lm_head.weight", ("vocab", "hidden"), is_optional=True, fallback="model.embed_tokens.weight"),
    )


FORMATS = (
    Format(
        "gemma4_assistant/ours",
        "Gemma 4 assistant",
        "gemma4_assistant",
        (
            Size("hidden", ("text_config.hidden_size",), stored=((r"^model\.norm\.weight$", 0),)),
            Size("vocab", ("text_config.vocab_size",), stored=((r"embed_tokens\.weight$", 0),)),
            Size("inner", ("text_config.intermediate_size",), stored=((r"up_proj\.weight$", 0),)),
            Size("num_layers", ("text_config.num_hidden_layers",), count=r"^model\.layers\.(\d+)\."),
            Size("target_hidden", ("backbone_hidden_size",), stored=((r"^post_projection\.weight$", 0),)),
            Size("num_centroids", ("num_centroids",), default=2048),
            Size("num_chosen", ("centroid_intermediate_top_k",), default=32),
            flag("is_ordered", "use_ordered_embeddings"),
        ),
        _rows(),
        (*COMMON, Check("gemma4_assistant.heads", _check_heads)),
        marks=(r"^(pre|post)_projection\.weight$",),
        config_marks=tuple(("model_type", kind) for kind in MODEL_TYPES),
        derive=_derive,
        config=unchanged,
        reads=("text_config",),  # transformers reads it
    ),
)


@dataclass(frozen=True)
class AssistantSizes:
    """Sizes of an assistant."""

    model_type: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    intermediate_size: int
    query_widths: tuple[int, ...]
    num_centroids: int  # of its LM head; 0: it computes all logits
    num_drafts: int  # runs of the assistant in the graph, depths of a tree
    num_params: int = 0  # parameters in the graph, with the target's embeddings

    def counts(self) -> WeightCounts:
        """Returns the weights of the graph."""
        inner, table = self.inner_size, self.vocab_size * self.inner_size
        layers = inner * (2 * sum(self.query_widths) + 3 * self.intermediate_size * self.num_layers)
        linear = layers + 3 * inner * self.hidden_size + self.num_centroids * inner
        linear += 0 if self.num_centroids else table  # with centroids rows of it are gathered
        plain = self.vocab_size * self.hidden_size + (4 * self.num_layers + 1) * inner
        plain += table if self.num_centroids else 0
        return WeightCounts(linear + plain, linear, plain, 0 if self.num_centroids else table)


def head_dims(where: str, text: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the width of a head in each layer."""
    own, full = text.get("head_dim") or 256, text.get("global_head_dim") or 512
    by_layer = text.get("per_layer_config")
    found = []
    for layer, kind in enumerate(gemma4_kinds(where, text, num_layers)):
        stated = by_layer.get(str(layer), {}) if isinstance(by_layer, Mapping) else {}
        default = full if kind == FULL and not isinstance(by_layer, Mapping) else own
        width = stated.get("head_dim", default) if isinstance(stated, Mapping) else default
        if type(width) is not int or width < 1:
            todo = "Correct it, or download the file again."
            raise CheckpointError(f"{where} (layer {layer}: head_dim)", repr(width), "a positive integer", todo)
        found.append(width)
    return tuple(found)


def sizes_of(case: Case) -> AssistantSizes:
    """Returns the sizes of a checkpoint."""
    case.check_type(*MODEL_TYPES)
    text, num_layers = case.config.get("text_config") or {}, case.size("num_layers")
    heads = stated_size(case.folder, text, "num_attention_heads")
    widths = head_dims(str(case.folder / "config.json"), text, num_layers)
    return AssistantSizes(
        model_type=str(case.config["model_type"]),
        vocab_size=case.size("vocab"),
        hidden_size=case.size("target_hidden"),
        inner_size=case.size("hidden"),
        num_layers=num_layers,
        intermediate_size=case.size("inner"),
        query_widths=tuple(heads * width for width in widths),
        num_centroids=case.size("num_centroids") if case.sizes["is_ordered"] else 0,
        num_drafts=NUM_DRAFTS,
    )


def source_layers(context: SourceContext) -> dict[str, int]:
    """Returns the target's last layer with K and V of each kind. Raises RecipeError: the target is no Gemma 4."""
    target = context.target
    assert target is not None and context.target_job is not None
    if target.model_type not in GEMMA4_TYPES:
        todo = "Choose the Gemma 4 model that the assistant was published for."
        raise RecipeError("target.model", f"a {target.model_type} model", f"one of {', '.join(GEMMA4_TYPES)}", todo)
    folder = find_folder(context.target_job, context.weights)
    kinds = gemma4_kinds(str(folder / "config.json"), read_text_config(folder), target.num_layers)
    return {kinds[layer]: layer for layer in target.attention_layers}


class AssistantSource(SpeculatorSource):
    """A `GraphSource` for the Gemma 4 target that the assistant was made for; the job has `FormOptions`."""

    role = "heads"
    formats = FORMATS
    needs_tables = True
    output_check = staticmethod(check_heads)

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        # As many as the target has: its rows are read in place.
        self.max_rows = min(context.max_seq_len, self.target.max_positions)
        sizes, found = sizes_of(self.case), self.case.sizes
        # What the config leaves out is read off the weights, or the class's default.
        own = {"num_centroids": found["num_centroids"], "centroid_intermediate_top_k": found["num_chosen"]}
        self.config = {**self.case.config, "backbone_hidden_size": sizes.hidden_size, **own}
        self.form = DraftForm.from_options(job.options, NUM_DRAFTS)
        self.dims: AssistantSizes = replace(sizes, num_drafts=self.form.depth)
        sources, text = source_layers(context), self.config["text_config"]
        kinds = gemma4_kinds(job.model, text, sizes.num_layers)
        self.layers = {kind: sources[kind] for kind in (SLIDING, FULL) if kind in kinds and kind in sources}
        self._check(job, text, kinds)
        check_room(self.form.depth, context)

    def _check(self, job: GraphJob, text: Mapping[str, Any], kinds: tuple[str, ...]) -> None:
        target, sizes = self.target, self.dims
        if missing := sorted(set(kinds) - set(self.layers)):
            todo = "Choose the assistant that was published for this target."
            got = f"a target without layers of {missing[0]}"
            raise RecipeError(f"speculator: {job.model}", got, f"layers of {', '.join(sorted(set(kinds)))}", todo)
        heads = stated_size(self.folder, text, "num_attention_heads")
        agreement = [
            ("a target's hidden size of {}", sizes.hidden_size, target.hidden_size),
            ("a vocabulary of {} tokens", sizes.vocab_size, target.vocab_size),
        ]
        for kind, width in zip(kinds, sizes.query_widths, strict=True):
            held = target.per_layer[self.layers[kind]]
            agreement.append((f"heads of {{}} columns in layers of {kind}", width // heads, held.head_dim))
            if heads % held.num_kv_heads:
                todo = "Choose the assistant that was published for this target."
                expected = f"a multiple of the target's {held.num_kv_heads} K heads in layers of {kind}"
                raise RecipeError(f"speculator: {job.model}", f"{heads} query heads", expected, todo)
        check_agreement(job.model, agreement, made="the assistant that was published")

    def spec(self) -> GraphSpec:
        """Returns the inputs and outputs of the graph: K and V of each kind of layer are the target's."""
        plain = self.form.spec(self.job.name, self.dims.hidden_size, self.dims.vocab_size)
        caches = tuple(name for layer in self.layers.values() for name in cache_names(layer))
        return replace(reading_spec(plain, self.target, caches), max_rows=self.max_rows)

    def counts(self) -> WeightCounts:
        return self.dims.counts()

    def make_module(self) -> torch.nn.Module:
        from speccompile.checkpoints.target_tables import read_tables
        from speccompile.export.tree_drafters import drafter_from_form
        from speccompile.speculators.gemma4_assistant.model import (
            AssistantExpander,
            ReadingChain,
            ReadingTree,
            make_assistant,
        )

        assistant = make_assistant(str(self.folder), self.config, self.read_weights())
        expander = AssistantExpander(assistant, read_tables(self.context).embeddings)
        reader = ReadingChain if self.spec().gives_probs else ReadingTree
        return reader(drafter_from_form(expander, self.form), tuple(self.layers))
