# SPDX-License-Identifier: Apache-2.0
"""Medusa heads as the source of a graph. Needs no torch before the export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.folders import digests_from_checkpoint, find_folder
from speccompile.checkpoints.target_tables import digests_from_target, read_tables
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec
from speccompile.doctor.doctor import check_speculator, read_speculator
from speccompile.errors import RecipeError
from speccompile.export.checks import check_head_candidates
from speccompile.speculators.medusa.formats import FORMATS
from speccompile.speculators.medusa.sizes import GraphSizes, read_sizes

if TYPE_CHECKING:
    import onnx_ir as ir

    from speccompile.speculators.medusa.config import HeadsOptions


class HeadsSource:
    """See `speccompile.core.protocols.GraphSource`. The job has `HeadsOptions`.

    Args:
        job: the heads.
        context: the target's sizes must be their own.
    """

    role = "heads"
    max_rows = 0
    has_tokenizer = False
    shares_weights = False

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        self.job, self.context = job, context
        options: HeadsOptions = job.options
        self.folder = find_folder(job, context.weights, SPECULATOR_FILES)
        assert context.target is not None
        # Published configs state a wrong number of heads; who states the number in the recipe has looked.
        self.num_heads = options.num_heads
        self.dims: GraphSizes = read_sizes(
            self.folder,
            context.target,
            has_weights=context.weights == "checkpoint",
            num_drafts=self.num_heads,
            num_guesses=min(options.num_candidates, context.target.vocab_size),
        )
        self._check_sizes(options.least_heads)

    def _check_sizes(self, least_heads: int) -> None:
        sizes, target = self.dims, self.context.target
        assert target is not None
        where = f"speculator: {self.job.model}"
        todo = "Choose the heads that were trained for this target; `speccompile doctor --target` compares them."
        if sizes.hidden_size != target.hidden_size:
            expected = f"{target.hidden_size}, as the target has"
            raise RecipeError(where, f"a hidden size of {sizes.hidden_size}", expected, todo)
        if sizes.vocab_size != target.vocab_size:
            expected = f"{target.vocab_size}, as the target has"
            raise RecipeError(where, f"a vocabulary of {sizes.vocab_size} tokens", expected, todo)
        held = f"the heads of {self.job.model}"
        if sizes.num_drafts > sizes.num_heads:
            expected = f"at most {sizes.num_heads}, {held}"
            raise RecipeError("speculator.num_heads", str(sizes.num_drafts), expected, "Lower it.")
        if least_heads > sizes.num_drafts:
            expected = f"a depth of at most {sizes.num_drafts}, {held}"
            raise RecipeError("speculator.tree", f"a depth of {least_heads}", expected, "Leave the deeper nodes out.")

    def _overrides(self) -> dict[str, int]:
        return {} if self.num_heads is None else {"medusa_num_heads": self.dims.num_heads}

    def check(self) -> None:
        """Every key and shape, from the files' headers."""
        check_speculator(self.folder, FORMATS, overrides=self._overrides())

    def digests(self) -> dict[str, str]:
        """Of config and weights; of the target's as well, where the heads end in its LM head."""
        own = digests_from_checkpoint(self.folder, self.context.weights, SPECULATOR_FILES)
        return {**own, **digests_from_target(self.context)} if self.dims.uses_target_lm_head else own

    def counts(self) -> WeightCounts | None:
        """From the sizes."""
        return self.dims.counts()

    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        return self.dims.spec(self.job.name)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        """See `speccompile.export.checks.check_head_candidates`."""
        return check_head_candidates(engine)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, GraphSizes]:
        """Read or make the weights, and trace."""
        from speccompile.export.heads import export_heads
        from speccompile.speculators.medusa.drafter import make_drafter

        progress("load weights")
        is_random = self.context.weights == "random"
        weights = None if is_random else read_speculator(self.folder, FORMATS, overrides=self._overrides())[1]
        lm_head = read_tables(self.context).lm_head if self.dims.uses_target_lm_head else None
        graph = export_heads(make_drafter(self.dims, weights, lm_head), self.spec(), progress)
        return graph, replace(self.dims, num_params=self.dims.counts().num_params)
