# SPDX-License-Identifier: Apache-2.0
"""A GLIDE drafter as the source of a graph. Needs no torch before the export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.folders import digests_from_checkpoint, find_folder
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.jobs import CandidateOptions, GraphJob, SourceContext, WeightCounts
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec, guessing_spec
from speccompile.doctor.doctor import check_speculator
from speccompile.errors import RecipeError
from speccompile.export.checks import check_candidates
from speccompile.speculators.glide.formats import FORMATS, read
from speccompile.speculators.glide.sizes import GlideDims, read_sizes, stated_target, with_params

if TYPE_CHECKING:
    import onnx_ir as ir


class GlideSource:
    """See `speccompile.core.protocols.GraphSource`. The job has `CandidateOptions`.

    Args:
        job: the drafter.
        context: the target's sizes must be those that it was trained for.
    """

    role = "draft"
    has_tokenizer = False
    shares_weights = False

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        self.job, self.context = job, context
        self.options: CandidateOptions = job.options
        assert context.target is not None
        self.folder = find_folder(job, context.weights, SPECULATOR_FILES)
        self.dims: GlideDims = read_sizes(self.folder, context.target)
        # As many as the target has: its rows are read where they lie.
        self.max_rows = min(context.max_seq_len, context.target.max_positions)
        self._check_sizes()

    def _check_sizes(self) -> None:
        target, where = self.context.target, f"speculator: {self.job.model}"
        assert target is not None
        hidden, heads = stated_target(self.folder)
        todo = "Choose the drafter that was trained for this target; `speccompile doctor --target` compares them."
        for got, want, what in (
            (self.dims.vocab_size, target.vocab_size, "a vocabulary"),
            (hidden, target.hidden_size, "a target's hidden size"),
            (heads, target.num_heads, "a number of the target's heads"),
        ):
            if got is not None and got != want and not (self._is_random and what != "a vocabulary"):
                raise RecipeError(where, f"{what} of {got}", f"{want}, as the target has", todo)

    @property
    def _is_random(self) -> bool:
        return self.context.weights == "random"

    def check(self) -> None:
        """Every key and shape, from the files' headers."""
        check_speculator(self.folder, FORMATS, self.context.target)

    def digests(self) -> dict[str, str]:
        """Of config and weights."""
        return digests_from_checkpoint(self.folder, self.context.weights, SPECULATOR_FILES)

    def counts(self) -> WeightCounts | None:
        """From the sizes."""
        return self.dims.counts()

    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        num = min(self.options.num_candidates, self.dims.vocab_size)
        return guessing_spec(self._plain_spec(), num, self.options.gives_probs)

    def _plain_spec(self) -> GraphSpec:
        assert self.context.target is not None
        return replace(self.dims.decoder_spec(self.job.name, self.context.target), max_rows=self.max_rows)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        """See `speccompile.export.checks.check_candidates`."""
        return check_candidates(engine)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, GlideDims]:
        """Read or make the weights, and trace."""
        from speccompile.export.cached_draft import export_cached_draft
        from speccompile.speculators.glide.drafter import make_drafter, sizes_from_dims

        progress("load weights")
        assert self.context.target is not None
        weights = None if self._is_random else read(self.folder)[1]
        # Padding stands behind the last row that a sequence may use.
        num_positions = self.max_rows + self.context.max_draft_nodes + 1
        sizes = sizes_from_dims(self.dims, self.context.target)
        graph = export_cached_draft(make_drafter(sizes, weights, num_positions), self._plain_spec(), progress)
        return graph, with_params(self.dims)
