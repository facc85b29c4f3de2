# SPDX-License-Identifier: Apache-2.0
"""GLIDE drafters (ColossalAI's layout) on disk, and as the source of a graph. Needs no torch before the export.

The cross-attention of its layers reads the target's cache, so its queries have the target's heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import optional_number
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CandidateOptions, GraphJob, SourceContext
from speccompile.core.specs import GraphSpec
from speccompile.doctor.decoder_rows import (
    PLAIN_LAYER,
    decoder_config,
    decoder_rows,
    decoder_sizes,
    derive_decoder,
    times,
)
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import (
    Case,
    Check,
    Format,
    Row,
    Size,
    Sizes,
    config_of_sizes,
    finding,
    flag,
    lookup,
    unchanged,
)
from speccompile.export.speculator_source import SpeculatorSource, check_agreement
from speccompile.graph_kinds.decoder import candidate_spec
from speccompile.speculators.glide.config import PUBLISHED_THETA, GlideDims

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

_LAYER, _OVER = "model.layers.{layer}", (("layer", "num_layers", 0),)
_OWN_KEYS = r"cross_attn\.(k|v)_proj\."


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    heads, hidden = sizes["large_heads"], sizes["target_hidden"]
    if not sizes["large_head_dim"]:
        sizes["large_head_dim"] = hidden // heads if hidden and heads else None
    sizes["large_width"] = times(heads, sizes["large_head_dim"])


def _check_own_keys(case: Case) -> Iterator[Finding]:
    keys = [k for k in case.files.headers if re.search(_OWN_KEYS, k)]
    if keys:
        todo = "It is not a GLIDE drafter: its cross-attention does not read the target's cache."
        got = f"keys and values of its own ({len(keys)} keys)"
        yield finding("error", case.where(keys[0]), got, "none: the target's last cache is read", todo)


def _check_heads(case: Case) -> Iterator[Finding]:
    target, sizes = case.target, case.sizes
    if target is None:
        return
    todo = "It was trained for another target: give the model that it belongs to."
    for key, name, want in (
        ("large_num_attention_heads", "large_heads", target.dims.num_heads),
        ("large_head_dim", "large_head_dim", target.dims.head_dim),
    ):
        if sizes.get(name) not in (None, want):
            yield finding("error", case.where_in_config(key), str(sizes[name]), f"{want}, as {target.name} has", todo)


def _check_groups(case: Case) -> Iterator[Finding]:
    target, stated = case.target, case.sizes.get("large_kv_heads")
    if target is None or (target.dims.num_kv_heads == target.dims.num_heads and not stated):
        return
    want, where = target.dims.num_kv_heads, case.where_in_config("large_num_key_value_heads")
    if stated and stated != want:
        todo = "It was trained for another target: give the model that it belongs to."
        yield finding("error", where, str(stated), f"{want}, as {target.name} has", todo)
    elif not stated:
        got, expected = "nothing", f"{want}, the key heads of {target.name}"
        todo = "Published code takes one key head a query head. Say so in config.json if it was trained with groups."
        yield finding("warning", where, got, expected, todo)


def _check_positions(case: Case) -> Iterator[Finding]:
    config = case.target.config if case.target is not None else {}
    want = lookup(config, "rope_parameters.rope_theta") or config.get("rope_theta")
    stated, where = case.config.get("large_rope_theta"), case.where_in_config("large_rope_theta")
    if case.target is None or want is None or float(want) == float(stated or PUBLISHED_THETA):
        return
    expected = f"{want}, the rope_theta of {case.target.name}"
    if stated is not None:
        todo = "It was trained for another target: give the model that it belongs to."
        yield finding("error", where, str(stated), expected, todo)
    else:
        todo = (
            f"Published code rotates queries by {PUBLISHED_THETA:g}. Say so in config.json if it was trained otherwise."
        )
        yield finding("warning", where, "nothing", expected, todo)


_OWN_SIZES = (
    Size("vocab", ("vocab_size",), stored=((r"embed_tokens\.weight$", 0),)),
    Size("num_layers", ("num_hidden_layers",), count=r"^model\.layers\.(\d+)\."),
    Size("target_hidden", ("large_hidden_size",)),
    Size("large_heads", ("large_num_attention_heads",)),
    Size("large_head_dim", ("large_head_dim",), default=0, least=0),
    Size("large_kv_heads", ("large_num_key_value_heads",), default=0, least=0),
    flag("is_tied", "tie_word_embeddings"),
)


def _canonical_config(case: Case) -> dict[str, Any]:
    kv_heads = case.sizes["large_kv_heads"] or (case.target.dims.num_kv_heads if case.target else None)
    return {
        **decoder_config(case.config),
        "model_type": "llama",
        **config_of_sizes(_OWN_SIZES, {**case.sizes, "large_kv_heads": kv_heads}),
        "large_rope_theta": case.config.get("large_rope_theta", PUBLISHED_THETA),
    }


FORMATS = (
    Format(
        "glide/ours",
        "GLIDE drafter (ColossalAI)",
        "glide",
        (*decoder_sizes(), *_OWN_SIZES),
        (
            Row("model.embed_tokens.weight", ("vocab", "hidden")),
            *decoder_rows(_LAYER, _OVER),
            Row(f"{_LAYER}.cross_attn.q_proj.weight", ("large_width", "hidden"), _OVER),
            Row(f"{_LAYER}.cross_attn.o_proj.weight", ("hidden", "large_width"), _OVER),
            Row("model.norm.weight", ("hidden",)),
            Row("lm_head.weight", ("vocab", "hidden"), need="!is_tied"),
            Row("lm_head.weight", ("vocab", "hidden"), need="is_tied", fallback="model.embed_tokens.weight"),
        ),
        (
            *COMMON,
            Check("glide.own_keys", _check_own_keys),
            Check("glide.heads", _check_heads),
            Check("glide.groups", _check_groups),
            Check("glide.positions", _check_positions),
        ),
        marks=(r"cross_attn\.",),
        ignored=(r"rotary_emb\.inv_freq$", _OWN_KEYS),
        derive=_derive,
        ours=_canonical_config,
        config=unchanged,
        reads=("rms_norm_eps", "rope_theta", "rope_parameters.rope_theta", "large_rope_theta"),
        fixed=PLAIN_LAYER,
    ),
)


def dims_for_target(case: Case, target: ModelDims) -> GlideDims:
    """Returns the sizes of a checkpoint; its cross-attention has those of the target."""
    config, last = case.config, target.attention_layers[-1]
    where, nested = str(case.folder / "config.json"), "rope_parameters.rope_theta"
    theta = optional_number(where, config, "rope_theta", PUBLISHED_THETA)
    theta = optional_number(where, {nested: lookup(config, nested)}, nested, theta)
    return GlideDims(
        model_type="glide",
        vocab_size=case.size("vocab"),
        hidden_size=case.size("hidden"),
        num_layers=case.size("num_layers"),
        num_heads=case.size("num_heads"),
        num_kv_heads=case.size("num_kv_heads"),
        head_dim=case.size("head_dim"),
        max_positions=target.max_positions,
        intermediate_size=case.size("inner"),
        target_hidden_size=target.hidden_size,
        target_heads=target.num_heads,
        target_kv_heads=target.per_layer[last].num_kv_heads,
        target_head_dim=target.per_layer[last].head_dim,
        target_layer=last,
        is_tied=bool(case.sizes["is_tied"]),
        rms_norm_eps=optional_number(where, config, "rms_norm_eps", 1e-6),  # as a Llama config without has it
        rope_theta=theta,
        target_rope_theta=optional_number(where, config, "large_rope_theta", PUBLISHED_THETA),
    )


class GlideSource(SpeculatorSource):
    """A `GraphSource` for the target that it was trained for; the job has `CandidateOptions`."""

    formats = FORMATS

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.options: CandidateOptions = job.options
        self.dims: GlideDims = dims_for_target(self.case, self.target)
        self.is_tied = self.dims.is_tied
        # As many as the target has: its rows are read in place.
        self.max_rows = min(context.max_seq_len, self.target.max_positions)
        stated = {} if self.is_random else self.case.sizes
        agreement = (
            ("a vocabulary of {}", self.dims.vocab_size, self.target.vocab_size),
            ("a target's hidden size of {}", stated.get("target_hidden"), self.target.hidden_size),
            ("a number of the target's heads of {}", stated.get("large_heads"), self.target.num_heads),
        )
        check_agreement(job.model, agreement, made="the drafter that was trained")

    def spec(self) -> GraphSpec:
        num = min(self.options.num_candidates, self.dims.vocab_size)
        return candidate_spec(self._plain_spec(), num, self.options.gives_probs)

    def _plain_spec(self) -> GraphSpec:
        return replace(self.dims.decoder_spec(self.job.name, self.target), max_rows=self.max_rows)

    def tables(self) -> dict[str, tuple[int, ...]]:
        return {"lm_head.weight": (self.dims.vocab_size, self.dims.hidden_size)}

    def make_module(self) -> torch.nn.Module:
        from speccompile.speculators.glide.model import make_drafter

        # Padding comes after the last row that a sequence may use.
        return make_drafter(self.dims, self.read_weights(), self.max_rows + self.context.max_draft_nodes + 1)

    def trace(self, module: torch.nn.Module, progress: Callable[[str], None]) -> ir.Model:
        from speccompile.export.own_drafts import export_cached_draft

        return export_cached_draft(module, self._plain_spec(), progress)
