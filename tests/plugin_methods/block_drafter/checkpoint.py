# SPDX-License-Identifier: Apache-2.0
"""Drafters of blocks on disk, and as the source of a graph. Needs no torch before the export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.checkpoints.checkpoint import read_config, stated_size
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.protocols import Engine
from speccompile.core.specs import LENGTHS, TREE_MASK, GraphSpec, TensorSpec, probe_inputs, updated_cache_name
from speccompile.doctor.findings import Finding
from speccompile.doctor.key_checks import COMMON
from speccompile.doctor.layouts import Case, Check, Format, Row, Size, Sizes, Target, finding
from speccompile.errors import BuildError
from speccompile.export.speculator_source import SpeculatorSource, check_agreement
from tests.plugin_methods.block_drafter.proposer import ANCHOR, ANCHOR_NODE, BLOCK, FEATURES

if TYPE_CHECKING:
    import onnx_ir as ir

MODEL_TYPE = "block_drafter"


def _derive(sizes: Sizes) -> None:
    sizes["target_hidden"] = sizes["hidden"]
    block, vocab = sizes["block"], sizes["vocab"]
    sizes["successors"] = block * vocab if block and vocab else None


def _check_block(case: Case) -> Iterator[Finding]:
    """Yields a finding for blocks of one token, which a draft model gives in a step."""
    if case.sizes.get("block") == 1:
        todo = "Draft with more than one token a run."
        yield finding("warning", case.where_in_config("block_size"), "1", "2 or more", todo)


def _config(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    return dict(config)


FORMATS = (
    Format(
        "block_drafter/ours",
        "Drafter of blocks",
        "block_drafter",
        (
            Size("hidden", ("hidden_size",), stored=((r"^k_proj\.weight$", 1),)),
            Size("head_dim", ("head_dim",), stored=((r"^k_proj\.weight$", 0),)),
            Size("vocab", ("vocab_size",), stored=((r"^out_proj\.weight$", 0),)),
            Size("block", ("block_size",)),
        ),
        (
            *(Row(f"{name}_proj.weight", ("head_dim", "hidden")) for name in "qkv"),
            Row("out_proj.weight", ("vocab", "head_dim")),
            Row("successors.weight", ("vocab", "successors")),
        ),
        (*COMMON, Check("block_drafter.block", _check_block)),
        marks=(r"^successors\.weight$",),
        config_marks=(("model_type", MODEL_TYPE),),
        derive=_derive,
        config=_config,
    ),
)


@dataclass(frozen=True)
class BlockDims:
    """Sizes of a drafter in a graph.

    Args:
        hidden_size: of the target.
        head_dim: of its attention, which has one head.
        vocab_size: of the target.
        trained_size: tokens of a block in the checkpoint.
        block_size: tokens of a block in the graph.
        num_params: parameters.
    """

    hidden_size: int
    head_dim: int
    vocab_size: int
    trained_size: int
    block_size: int
    num_params: int = 0

    def spec(self, name: str, max_rows: int) -> GraphSpec:
        """Returns the inputs and outputs of the graph."""
        caches = tuple(
            TensorSpec(f"block_{kind}_cache", ("batch", 1, "max_seq", self.head_dim), "float32") for kind in "kv"
        )
        return GraphSpec(
            name,
            (
                TensorSpec(FEATURES, ("batch", "nodes", self.hidden_size), "float32", "states"),
                TensorSpec(ANCHOR, ("batch", 1), "int64", "tokens"),
                TensorSpec(ANCHOR_NODE, ("batch",), "int64", "last_node"),
                TensorSpec(LENGTHS, ("batch",), "int64", "lengths"),
                TensorSpec(TREE_MASK, ("batch", "nodes", "nodes"), "bool"),
                *caches,
            ),
            (
                TensorSpec(BLOCK, ("batch", self.block_size), "int64"),
                *(TensorSpec(updated_cache_name(c.name), c.dims, c.dtype) for c in caches),
            ),
            tuple(c.name for c in caches),
            self.vocab_size,
            max_rows,
            reads_prompts=True,
            scores="one",
            num_drafts=self.block_size,
        )


class BlockSource(SpeculatorSource):
    """See `speccompile.core.protocols.GraphSource`. The job has `BlockOptions`.

    Args:
        job: the drafter.
        context: its target must have the sizes that the drafter was made for.
    """

    role = "block drafter"
    formats = FORMATS

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.max_rows = context.max_seq_len
        config, names = read_config(self.folder), ("hidden_size", "head_dim", "vocab_size", "block_size")
        sizes = [stated_size(self.folder, config, name, "Complete config.json.") for name in names]
        self.dims = BlockDims(*sizes, job.options.block_size or sizes[-1])
        agreement = (
            ("a hidden size of {}", self.dims.hidden_size, self.target.hidden_size),
            ("a vocabulary of {}", self.dims.vocab_size, self.target.vocab_size),
        )
        check_agreement(job.model, agreement)

    def counts(self) -> WeightCounts | None:
        """Returns the weight counts of these sizes."""
        dims = self.dims
        linear = dims.head_dim * (3 * dims.hidden_size + dims.vocab_size)
        plain = dims.trained_size * dims.vocab_size**2
        return WeightCounts(linear + plain, linear, plain)

    def spec(self) -> GraphSpec:
        """Returns the inputs and outputs of the graph."""
        return self.dims.spec(self.job.name, self.max_rows)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        """Drafts one block from arbitrary features."""
        tokens = np.asarray(engine.run(probe_inputs(engine.spec, num_nodes=2))[BLOCK])[0]
        if tokens.min() < 0 or tokens.max() >= engine.spec.vocab_size:
            expected = f"ids below {engine.spec.vocab_size}"
            raise BuildError(f"check {engine.spec.name}", f"tokens {tokens.tolist()}", expected, "Report it.")
        return {"num_tokens": len(tokens)}

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, BlockDims]:
        """Reads or makes the weights, and traces the graph."""
        from speccompile.export.own_drafts import export_cached_draft
        from tests.plugin_methods.block_drafter.model import make_drafter

        progress("load weights")
        graph = export_cached_draft(make_drafter(self.dims, self.read_weights()), self.spec(), progress)
        counts = self.counts()
        assert counts is not None
        return graph, replace(self.dims, num_params=counts.num_params)
