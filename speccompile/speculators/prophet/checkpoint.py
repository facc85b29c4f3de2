# SPDX-License-Identifier: Apache-2.0
"""Prophet drafters (our own layout) on disk, and as the source of a graph. Needs no torch before the export.

A small causal transformer with Llama's keys; its first input is the target's hidden state through `input_proj`. With
`uses_target_embeddings` it has the target's embeddings, LM head and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.target_tables import read_tables
from speccompile.core.jobs import GraphJob, SourceContext
from speccompile.core.specs import GraphSpec
from speccompile.doctor.decoder_rows import PLAIN_LAYER, decoder_rows, decoder_sizes, derive_decoder
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, config_of_sizes, finding, flag, unchanged
from speccompile.errors import CheckpointError
from speccompile.export.checks import check_heads
from speccompile.export.speculator_source import SpeculatorSource, check_room
from speccompile.graph_kinds.heads import DraftForm
from speccompile.speculators.prophet.config import MODEL_TYPE, ProphetSizes

if TYPE_CHECKING:
    import torch


def _derive(sizes: Sizes) -> None:
    derive_decoder(sizes)
    sizes["has_tables"] = int(not sizes["uses_target"])
    sizes["has_head"] = int(not sizes["uses_target"] and not sizes["is_tied"])


def _check_width(case: Case) -> Iterator[Finding]:
    width, target_width = case.sizes.get("hidden"), case.sizes.get("target_hidden")
    if case.sizes["uses_target"] and width != target_width:
        where, got = case.where_in_config("hidden_size"), f"{width} with the target's embeddings"
        todo = "Correct config.json: a narrower drafter has embeddings of its own."
        yield finding("error", where, got, f"{target_width}, the target's hidden size", todo)


_OWN_SIZES = (
    Size("vocab", ("vocab_size",), stored=((r"^embed_tokens\.weight$", 0),)),
    Size("num_layers", ("num_hidden_layers",), count=r"^layers\.(\d+)\."),
    Size("target_hidden", ("target_hidden_size",), stored=((r"^input_proj\.weight$", 1),)),
    Size("horizon", ("horizon",)),
    flag("uses_target", "uses_target_embeddings"),
    flag("is_tied", "tie_word_embeddings"),
)


def _canonical_config(case: Case) -> dict[str, Any]:
    heads = {"num_key_value_heads": case.sizes["num_kv_heads"], "head_dim": case.sizes["head_dim"]}
    return {**case.config, "model_type": MODEL_TYPE, **heads, **config_of_sizes(_OWN_SIZES, case.sizes)}


FORMATS = (
    Format(
        "prophet/ours",
        "Prophet drafter",
        "prophet",
        (*decoder_sizes(), *_OWN_SIZES),
        (
            Row("input_proj.weight", ("hidden", "target_hidden")),
            *decoder_rows("layers.{layer}", (("layer", "num_layers", 0),)),
            Row("norm.weight", ("hidden",)),
            Row("embed_tokens.weight", ("vocab", "hidden"), need="has_tables"),
            Row("lm_head.weight", ("vocab", "hidden"), need="has_head"),
        ),
        (*COMMON, Check("prophet.width", _check_width)),
        marks=(r"^input_proj\.weight$",),
        config_marks=(("model_type", MODEL_TYPE),),
        derive=_derive,
        ours=_canonical_config,
        config=unchanged,
        reads=("rms_norm_eps", "rope_theta"),
        fixed=PLAIN_LAYER,
    ),
)


def sizes_of(case: Case) -> ProphetSizes:
    """Returns the sizes of a checkpoint."""
    case.check_type(MODEL_TYPE)
    config, names = case.canonical_config(), [f.name for f in fields(ProphetSizes) if f.name != "num_params"]
    for name in names:
        if config.get(name) is None:
            todo = "Fetch the folder again; `speccompile doctor` lists every fault."
            raise CheckpointError(case.where_in_config(name), "nothing", "a size of the transformer", todo)
    return ProphetSizes(**{name: config[name] for name in names})


class ProphetSource(SpeculatorSource):
    """A `GraphSource` for a target of the sizes that the speculator was made for; the job has `FormOptions`."""

    role = "heads"
    formats = FORMATS
    output_check = staticmethod(check_heads)

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.dims: ProphetSizes = sizes_of(self.case)
        self.needs_tables = self.dims.uses_target_embeddings
        self.is_tied = self.dims.tie_word_embeddings and not self.needs_tables
        self.form = DraftForm.from_options(job.options, context.max_draft_nodes)
        self.check_target("a target of hidden size {}", self.dims.target_hidden_size)
        check_room(self.form.depth, context)

    def spec(self) -> GraphSpec:
        return self.form.spec(self.job.name, self.dims.target_hidden_size, self.dims.vocab_size)

    def tables(self) -> dict[str, tuple[int, ...]]:
        shape = (self.dims.vocab_size, self.dims.hidden_size)
        return {"embed_tokens.weight": shape, "lm_head.weight": shape}

    def make_module(self) -> torch.nn.Module:
        from speccompile.export.tree_drafters import drafter_from_form
        from speccompile.speculators.prophet.model import make_expander

        tables = read_tables(self.context) if self.needs_tables else None
        return drafter_from_form(make_expander(self.dims, self.read_weights(), tables), self.form)
