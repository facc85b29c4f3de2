# SPDX-License-Identifier: Apache-2.0
"""EAGLE-1 and EAGLE-2 drafters on disk, and as the source of a graph. Needs no torch before the export.

The first layer has no norm before its attention. Where no LM head or embeddings are stored, the target's are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.target_tables import EMBEDDINGS, LM_HEAD
from speccompile.core.jobs import CandidateOptions, GraphJob, SourceContext
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
from speccompile.doctor.layouts import (
    ANY,
    Case,
    Check,
    Format,
    Row,
    Size,
    Sizes,
    config_of_sizes,
    finding,
    flag,
    unchanged,
)
from speccompile.doctor.token_map import CHECK_MAP, IGNORED_MAP, MAP_ROW, cut_heads, derive_map, map_sizes
from speccompile.export.feature_source import FeatureSource, layer_config_of
from speccompile.graph_kinds.features import feature_draft_spec

if TYPE_CHECKING:
    import torch

_LAYER = "layers.{layer}"
_FIRST_NORM = "layers.0.input_layernorm.weight"
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    sizes["target_hidden"] = sizes["hidden"]
    sizes["two_hidden"] = times(2, sizes["hidden"])
    derive_map(sizes)


def _check_first_norm(case: Case) -> Iterator[Finding]:
    key = case.prefix + _FIRST_NORM
    if key in case.files.headers:
        todo = "It is a variant that was trained with this norm: dropping it would change every draft."
        yield finding("error", case.where(key), "a norm in the first layer", "none, as the layer has none", todo)


_OWN_SIZES = (
    Size("vocab", ("vocab_size",), stored=((r"^embed_tokens\.weight$", 0),)),
    Size("num_layers", ("num_hidden_layers",), count=r"^layers\.(\d+)\.", default=1),
    flag("has_bias", "bias", "eagle_fc_bias", "fusion_bias", present=r"^(fusion_)?fc\.bias$"),
    *map_sizes(r"^lm_head\.weight$", "draft_vocab_size", "truncated_vocab_size"),
)
_READS = (*decoder_reads(), "sliding_window", "use_sliding_window")


def _canonical_config(case: Case) -> dict[str, Any]:
    config = {**layer_config_of(case.config), **case.config}
    return {**decoder_config(config), "model_type": "eagle", **config_of_sizes(_OWN_SIZES, case.sizes)}


def _layout(name: str, label: str, *, scope: str = "", fc: str = "fc", first: str = "layers.0", **own: Any) -> Format:
    # `scope`: the object of its config that has the layers', beside which the config's own keys count first.
    sizes = (*decoder_sizes(), *_OWN_SIZES)
    rows = (
        Row(_EMBEDDINGS, ("vocab", "hidden"), is_optional=True, table=EMBEDDINGS),
        Row(f"{fc}.weight", ("hidden", "two_hidden"), name="fc.weight"),
        Row(f"{fc}.bias", ("hidden",), name="fc.bias", need="has_bias"),
        *decoder_rows(first, name="layers.0", has_input_norm=False),
        *decoder_rows(_LAYER, (("layer", "num_layers", 1),)),
        Row(_HEAD, ("draft_vocab", "hidden"), is_optional=True, table=LM_HEAD),
        MAP_ROW,
    )
    return Format(
        f"eagle/{name}",
        label,
        "eagle",
        tuple(replace(size, keys=(*size.keys, *(scope + key for key in size.keys))) for size in sizes),
        rows,
        (*COMMON, Check("eagle.first_norm", _check_first_norm), CHECK_MAP),
        ignored=(r"rotary_emb\.inv_freq$", r"layers\.0\.input_layernorm\.weight$", IGNORED_MAP),
        derive=_derive,
        complete=cut_heads,
        ours=_canonical_config,
        reads=(*_READS, *(scope + key for key in _READS)),
        **own,
    )


FORMATS = (
    _layout(
        "vllm",
        "EAGLE-1 or 2 drafter (vLLM)",
        scope="model.",
        config_marks=(("model.hidden_size", ANY),),
        prefixes=("", "model."),
    ),
    _layout(
        "speculators",
        "EAGLE-1 or 2 drafter (speculators format)",
        scope="transformer_layer_config.",
        fc="fusion_fc",
        first="transformer",
        config_marks=(("speculators_model_type", "eagle"),),
        fixed={"layernorms": (False,), "transformer_layer_architecture": ("LlamaDecoderLayer",)},
    ),
    _layout(
        "ours",
        "EAGLE-1 or 2 drafter",
        marks=(r"^fc\.(weight|bias)$", r"^layers\.0\.self_attn\.q_proj\.weight$"),
        without=(r"(^|\.)midlayer\.", r"hidden_norm", r"(^|\.)(d2t|t2d)$", r"cross_attn", r"(^|\.)norm\.weight$"),
        config=unchanged,
    ),
)


class DraftSource(FeatureSource):
    """A `speccompile.core.protocols.GraphSource`. The job has `CandidateOptions`."""

    formats = FORMATS

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.needs_tables = any(self.case.key_of(name) is None for name in (_EMBEDDINGS, _HEAD))

    def tables(self) -> dict[str, tuple[int, ...]]:
        return {_HEAD: (self.dims.draft_vocab_size, self.dims.hidden_size)}

    def spec(self) -> GraphSpec:
        options: CandidateOptions = self.job.options
        num = min(options.num_candidates, self.dims.draft_vocab_size)
        return feature_draft_spec(self.job.name, self.dims, num, options.gives_probs, self.max_rows)

    def make_module(self) -> torch.nn.Module:
        from speccompile.checkpoints.target_tables import read_tables
        from speccompile.speculators.eagle.model import make_body

        tables = read_tables(self.context) if self.needs_tables else None
        return make_body(self.config, self.dims, self.read_weights(), tables)
