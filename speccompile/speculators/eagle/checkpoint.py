# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1 and EAGLE-2 drafters on disk, and as the source of a graph. Needs no torch before the export.

The first layer has no norm before its attention, and there is no LM head: the target's is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.target_tables import EMBEDDINGS
from speccompile.core.jobs import CandidateOptions
from speccompile.core.specs import GraphSpec
from speccompile.doctor.decoder_rows import (
    decoder_config,
    decoder_reads,
    decoder_rows,
    decoder_sizes,
    derive_decoder,
    times,
)
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, config_of_sizes, finding, flag, unchanged
from speccompile.export.feature_source import FeatureSource
from speccompile.graph_kinds.features import feature_draft_spec

if TYPE_CHECKING:
    import torch

_LAYER = "layers.{layer}"
_FIRST_NORM = "layers.0.input_layernorm.weight"


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    sizes["target_hidden"] = sizes["hidden"]
    sizes["two_hidden"] = times(2, sizes["hidden"])


def _check_first_norm(case: Case) -> Iterator[Finding]:
    key = case.prefix + _FIRST_NORM
    if key in case.files.headers:
        todo = "It is a variant that was trained with this norm: dropping it would change every draft."
        yield finding("error", case.where(key), "a norm in the first layer", "none, as the layer has none", todo)


def _check_head(case: Case) -> Iterator[Finding]:
    key = case.prefix + "lm_head.weight"
    if key in case.files.headers:
        todo = "The target's LM head is used; if this one was trained, the drafter is of another kind."
        yield finding("error", case.where(key), "an LM head", "none: the target's head reads the features", todo)


_OWN_SIZES = (
    Size("vocab", ("vocab_size",), stored=((r"^embed_tokens\.weight$", 0),)),
    Size("num_layers", ("num_hidden_layers",), count=r"^layers\.(\d+)\."),
    flag("has_bias", "bias", present=r"^fc\.bias$"),
)


def _canonical_config(case: Case) -> dict[str, Any]:
    return {**decoder_config(case.config), "model_type": "eagle", **config_of_sizes(_OWN_SIZES, case.sizes)}


FORMATS = (
    Format(
        "eagle/ours",
        "EAGLE-1 or 2 drafter",
        "eagle",
        (*decoder_sizes(), *_OWN_SIZES),
        (
            Row("embed_tokens.weight", ("vocab", "hidden"), table=EMBEDDINGS),
            Row("fc.weight", ("hidden", "two_hidden")),
            Row("fc.bias", ("hidden",), need="has_bias"),
            *decoder_rows("layers.0", has_input_norm=False),
            *decoder_rows(_LAYER, (("layer", "num_layers", 1),)),
        ),
        (*COMMON, Check("eagle.first_norm", _check_first_norm), Check("eagle.lm_head", _check_head)),
        marks=(r"^fc\.(weight|bias)$", r"^layers\.0\.self_attn\.q_proj\.weight$"),
        without=(r"(^|\.)midlayer\.", r"hidden_norm", r"(^|\.)(d2t|t2d)$", r"cross_attn", r"(^|\.)norm\.weight$"),
        ignored=(r"rotary_emb\.inv_freq$", r"layers\.0\.input_layernorm\.weight$", r"(^|\.)lm_head\.weight$"),
        derive=_derive,
        ours=_canonical_config,
        config=unchanged,
        reads=(*decoder_reads(), "sliding_window", "use_sliding_window"),
    ),
)


class DraftSource(FeatureSource):
    """A `speccompile.core.protocols.GraphSource`. The job has `CandidateOptions`."""

    formats = FORMATS

    def tables(self) -> dict[str, tuple[int, ...]]:
        return {"lm_head.weight": (self.dims.vocab_size, self.dims.hidden_size)}

    def spec(self) -> GraphSpec:
        options: CandidateOptions = self.job.options
        num = min(options.num_candidates, self.dims.vocab_size)
        return feature_draft_spec(self.job.name, self.dims, num, options.gives_probs, self.max_rows)

    def make_module(self) -> torch.nn.Module:
        from speccompile.checkpoints.target_tables import read_tables
        from speccompile.speculators.eagle.model import make_body

        return make_body(self.config, self.dims, self.read_weights(), read_tables(self.context).lm_head)
