# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction modules on disk, and as the source of a graph. Needs no torch before the export.

Layouts: the canonical one, Qwen3-Next's and Qwen3.5's (`mtp.*`, alone or in the target's files), DeepSeek-V3's and
GLM's (the layer after the target's last one, in its files), and the speculators format. Embeddings and LM head are the
target's where the module stores none.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import read_dims, stated_size
from speccompile.checkpoints.config_values import check_config, text_config
from speccompile.checkpoints.draft_vocab import DraftTokens, choose_tokens
from speccompile.checkpoints.folders import find_folder
from speccompile.checkpoints.layer_sizes import LATENT_WIDTHS, is_latent
from speccompile.core.dims import LayerDims
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec
from speccompile.doctor.decoder_rows import speculators_format
from speccompile.doctor.doctor import open_checkpoint
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Target, unchanged
from speccompile.errors import CheckpointError, ExportError, RecipeError
from speccompile.export.checks import check_candidates
from speccompile.export.feature_source import check_window, dims_from_config, trace_features
from speccompile.export.speculator_source import SpeculatorSource
from speccompile.graph_kinds.features import FeatureDims, feature_draft_spec
from speccompile.speculators.mtp.block_rows import (
    FAMILY,
    block_rows,
    block_sizes,
    derive_blocks,
    layer_of_blocks,
    stack_experts,
)
from speccompile.speculators.mtp.layer_rows import (
    CHOICES,
    EMBEDDINGS,
    LM_HEAD,
    NORM,
    NORM_EMBEDDING,
    NORM_HIDDEN,
    check_conventions,
    check_layer,
    check_norms,
    conventions,
    derive,
    fuse_experts,
    layer_from_config,
    module_rows,
    module_sizes,
)

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from speccompile.speculators.mtp.config import MtpOptions

_log = logging.getLogger(__name__)
METHOD = "mtp"
PREFIX = f"{METHOD}."
SCOPE, SPECULATORS_SCOPE = "layer_config", "transformer_layer_config"
_CHECKS = (
    *COMMON,
    Check("mtp.layer", check_layer),
    Check("mtp.conventions", check_conventions),
    Check("mtp.norms", check_norms),
)


def _canonical_from(scope: str) -> Callable[[Case], dict[str, Any]]:
    def canonical_config(case: Case) -> dict[str, Any]:
        layer = case.config.get(scope) if scope else case.config
        return config_of_layer(layer if isinstance(layer, Mapping) else {}, case.config)

    return canonical_config


def config_of_layer(config: Mapping[str, Any], stated: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns our config.json of a module, from that of a model with layers of its kind.

    Args:
        stated: see `layer_rows.conventions`; None: the architecture's.
    """
    layer = layer_from_config(config)
    if layer.get("model_type") == FAMILY and SCOPE not in (stated or {}):
        layer |= layer_of_blocks(text_config(config))
    fields = conventions(layer, stated or {})
    return {"model_type": METHOD, "architectures": ["MtpModule"], SCOPE: layer, **fields}


def _numbered_prefix(config: Mapping[str, Any]) -> str:
    return f"model.layers.{text_config(config).get('num_hidden_layers')}."


def _speculators_config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    usual = conventions(config[SCOPE], {})
    for name in CHOICES:
        if config[name] != usual[name]:
            where, todo = f"config.json ({name})", "Keep it in our own layout."
            raise CheckpointError(where, repr(config[name]), f"{usual[name]}, as readers of the format assume", todo)
    return {
        "architectures": ["MTPDraftModel"],
        **speculators_format(METHOD, "0.3.0", target),
        SPECULATORS_SCOPE: dict(config[SCOPE]),
        "num_nextn_predict_layers": 1,
    }


_SPECULATORS_NAMES = {
    "fc.weight": "mtp_layers.0.input_proj.weight",
    NORM_EMBEDDING: "mtp_layers.0.token_layernorm.weight",
    NORM_HIDDEN: "mtp_layers.0.hidden_layernorm.weight",
    NORM: "mtp_layers.0.final_layernorm.weight",
}
_NUMBERED_NAMES = {
    "fc.weight": "eh_proj.weight",
    NORM_EMBEDDING: "enorm.weight",
    NORM_HIDDEN: "hnorm.weight",
    NORM: "shared_head.norm.weight",
    LM_HEAD: "shared_head.head.weight",
}
_PROBE = "speccompile.speculators.mtp.probe:MtpProbe"
_PARTS: dict[str, Any] = {"checks": _CHECKS, "derive": derive, "complete": fuse_experts, "probe": _PROBE}
FORMATS = (
    Format(
        "mtp/ours",
        "multi-token prediction module",
        METHOD,
        module_sizes(f"{SCOPE}."),
        module_rows({}, "layers.0."),
        config_marks=(("model_type", METHOD),),
        prefixes=(PREFIX, ""),
        ours=_canonical_from(SCOPE),
        config=unchanged,
        reads=(SCOPE, *CHOICES),  # transformers reads the layer's config
        **_PARTS,
    ),
    Format(
        "mtp/speculators",
        "multi-token prediction module (speculators format)",
        METHOD,
        module_sizes(f"{SPECULATORS_SCOPE}."),
        module_rows(_SPECULATORS_NAMES, "mtp_layers.0."),
        config_marks=(("speculators_model_type", METHOD),),
        ours=_canonical_from(SPECULATORS_SCOPE),
        reads=(SPECULATORS_SCOPE, *CHOICES),
        config=_speculators_config,
        **_PARTS,
    ),
    Format(
        "mtp/in_target",
        "multi-token prediction module in its target's files",
        METHOD,
        module_sizes("", "text_config."),
        module_rows({}, "layers.0."),
        marks=(r"^(fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight$",),
        prefixes=(PREFIX,),
        has_others=True,
        ours=_canonical_from(""),
        **_PARTS,
    ),
    Format(
        "mtp/blocks",
        "multi-token prediction module of two blocks in its target's files",
        METHOD,
        block_sizes(),
        block_rows(),
        (*COMMON, Check("mtp.conventions", check_conventions), Check("mtp.norms", check_norms)),
        marks=(r"^layers\.0\.eh_proj\.weight$",),
        prefixes=(PREFIX,),
        has_others=True,
        ours=_canonical_from(""),
        derive=derive_blocks,
        complete=stack_experts,
        probe=_PROBE,
    ),
    Format(
        "mtp/numbered",
        "multi-token prediction module as a further layer of its target",
        METHOD,
        module_sizes("", "text_config."),
        module_rows(_NUMBERED_NAMES, ""),
        marks=(r"^model\.layers\.\d+\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight$",),
        config_prefix=_numbered_prefix,
        has_others=True,
        ours=_canonical_from(""),
        **_PARTS,
    ),
)


def section_for_target(folder: Path) -> dict[str, Any] | None:
    """See `Method.default_section`: where the target's files have a module that can be built."""
    from speccompile.speculators.mtp.config import MtpConfig, MtpMethod

    try:
        found = open_checkpoint(folder, FORMATS)
        if found.layout is None or not found.layout.has_others:
            return None
        job = replace(MtpMethod().graph_jobs(MtpConfig())[0], model=str(folder))
        dims = read_dims(folder)
        DraftSource(job, SourceContext("checkpoint", dims.max_positions or 1, 1, dims)).check()
    except (CheckpointError, ExportError, RecipeError) as fault:
        _log.info("%s: drafts without its own module: %s", folder, fault)
        return None
    return {}


class DraftSource(SpeculatorSource):
    """A `GraphSource` with `MtpOptions`. Raises RecipeError: sizes or the state that it reads are not the target's."""

    formats = FORMATS
    config_layout = FORMATS[2]  # a config without weights is a target's

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        case, options = self.case, self._options
        stated = case.canonical_config()
        of_recipe = {"norms": options.norms, "concat": options.concat, "chaining": options.chaining}
        self.config: dict[str, Any] = stated | {name: value for name, value in of_recipe.items() if value != "auto"}
        self._check_hidden(stated["target_hidden"])
        layer = self.config[SCOPE]
        if "layer_types" not in layer:
            check_window(self.folder, layer)
        # Its architecture may be one of hybrids or mixtures: only the layer itself has to be expressed.
        is_row = is_latent(layer)
        apart = ("layers_block_type", *LATENT_WIDTHS[:1]) if is_row else ("layers_block_type",)
        stated = {name: value for name, value in layer.items() if name not in apart}
        check_config({**stated, "model_type": METHOD}, context.max_seq_len)
        self.max_rows = context.max_seq_len
        inner = layer.get("intermediate_size") or layer.get("moe_intermediate_size")
        sizes = {**layer, "intermediate_size": inner}
        self.dims: FeatureDims = dims_from_config(self.folder, sizes, METHOD, context.max_seq_len)
        if is_row:
            width = sum(stated_size(self.folder, layer, name, "Complete config.json.") for name in LATENT_WIDTHS)
            rows = (LayerDims(1, width, is_latent=True),)
            self.dims = replace(self.dims, num_kv_heads=1, head_dim=width, layer_dims=rows)
        self.dims = replace(self.dims, num_layers=1)  # of a module's blocks one has a cache
        self.check_target("target states of {}", self.dims.hidden_size)
        stored = {e.name for e in case.expected.values() if e.key in case.files.headers}
        self.needs_tables = not {EMBEDDINGS, LM_HEAD} <= stored

    @property
    def _options(self) -> MtpOptions:
        options: MtpOptions = self.job.options
        return options

    def _check_hidden(self, stated: str) -> None:
        is_normed = stated != "before_norm"
        if is_normed != self._options.reads_normed:
            last = self.target.num_layers - 1
            got = "after_norm" if self._options.reads_normed else "a layer's output"
            expected = "after_norm" if is_normed else f"{last}: the checkpoint says {stated}"
            todo = "Correct the recipe; drafts from the other state are accepted less often."
            raise RecipeError("speculator.target_hidden", got, expected, todo)

    def spec(self) -> GraphSpec:
        options = self._options
        num = min(options.num_candidates, self.dims.vocab_size)
        return feature_draft_spec(self.job.name, self.dims, num, options.gives_probs, self.max_rows)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        kept = {} if self.draft_tokens is None else {"draft_vocab": self.draft_tokens.record()}
        return check_candidates(engine) | kept

    @functools.cached_property
    def draft_tokens(self) -> DraftTokens | None:
        """The tokens that the module may draft; None: all."""
        if self._options.vocab is None:
            return None
        assert self.context.target_job is not None
        folder = find_folder(self.context.target_job, self.context.weights)
        return choose_tokens(self._options.vocab, folder, self.dims.vocab_size)

    def digests(self) -> dict[str, str]:
        kept = {} if self.draft_tokens is None else {"draft_vocab": self.draft_tokens.digest}
        return super().digests() | kept

    def make_module(self) -> torch.nn.Module:
        from speccompile.checkpoints.target_tables import read_tables
        from speccompile.speculators.mtp.model import make_body

        tables = read_tables(self.context) if self.needs_tables else None
        body = make_body(str(self.folder), self.config, self.dims, self.read_weights(), tables)
        if self.draft_tokens is not None:
            body.keep_tokens(self.draft_tokens.ids)
        return body

    def trace(self, module: torch.nn.Module, progress: Callable[[str], None]) -> ir.Model:
        return trace_features(module, self.spec(), self.max_rows, progress)
