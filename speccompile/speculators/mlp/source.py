# SPDX-License-Identifier: Apache-2.0
"""A published MLP speculator as the source of the heads' graph. Needs no torch before the export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.folders import digests_from_checkpoint, find_folder
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.heads_specs import DraftForm
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec
from speccompile.doctor.doctor import check_speculator
from speccompile.errors import RecipeError
from speccompile.export.checks import check_heads
from speccompile.speculators.mlp.formats import FORMATS, read
from speccompile.speculators.mlp.sizes import HeadsSizes, read_sizes

if TYPE_CHECKING:
    import onnx_ir as ir


class HeadsSource:
    """See `speccompile.core.protocols.GraphSource`. The job has `FormOptions`.

    Args:
        job: the speculator.
        context: the target's sizes must be its own.
    """

    role = "heads"
    max_rows = 0
    has_tokenizer = False
    shares_weights = False

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        self.job, self.context = job, context
        self.folder = find_folder(job, context.weights, SPECULATOR_FILES)
        sizes = read_sizes(self.folder)
        self.form = DraftForm.from_options(job.options, sizes.num_heads)
        self.dims: HeadsSizes = replace(sizes, num_drafts=self.form.depth)
        self._check_sizes()

    def _check_sizes(self) -> None:
        sizes, target, room = self.dims, self.context.target, self.context.max_draft_nodes
        assert target is not None
        where = f"speculator: {self.job.model}"
        todo = "Choose the speculator that was trained for this target; `speccompile doctor --target` compares them."
        if sizes.hidden_size != target.hidden_size:
            expected = f"{target.hidden_size}, as the target has"
            raise RecipeError(where, f"a hidden size of {sizes.hidden_size}", expected, todo)
        if sizes.vocab_size != target.vocab_size:
            expected = f"{target.vocab_size}, as the target has"
            raise RecipeError(where, f"a vocabulary of {sizes.vocab_size} tokens", expected, todo)
        if sizes.num_drafts > sizes.num_heads:
            expected = f"at most {sizes.num_heads}, the heads of {self.job.model}"
            if self.form.choices:
                raise RecipeError(
                    "speculator.tree", f"a depth of {sizes.num_drafts}", expected, "Take deeper nodes out."
                )
            raise RecipeError("speculator.num_draft_tokens", str(sizes.num_drafts), expected, "Lower it.")
        if sizes.num_drafts > room:
            todo = "Raise it, or use fewer heads with speculator.num_draft_tokens."
            raise RecipeError("engine.max_draft_nodes", str(room), f"at least {sizes.num_drafts}, one a head", todo)

    def check(self) -> None:
        """Every key and shape, from the files' headers."""
        check_speculator(self.folder, FORMATS)

    def digests(self) -> dict[str, str]:
        """Of config and weights."""
        return digests_from_checkpoint(self.folder, self.context.weights, SPECULATOR_FILES)

    def counts(self) -> WeightCounts | None:
        """From the sizes."""
        return self.dims.counts()

    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        return self.form.spec(self.job.name, self.dims.hidden_size, self.dims.vocab_size)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        """See `speccompile.export.checks.check_heads`."""
        return check_heads(engine)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, HeadsSizes]:
        """Read or make the weights, and trace."""
        from speccompile.export.heads import export_heads
        from speccompile.export.tree_drafters import drafter_from_form
        from speccompile.speculators.mlp.heads import MlpExpander, heads_from_weights, random_heads

        progress("load weights")
        is_random = self.context.weights == "random"
        heads = random_heads(self.dims) if is_random else heads_from_weights(self.dims, read(self.folder)[1])
        graph = export_heads(drafter_from_form(MlpExpander(heads), self.form), self.spec(), progress)
        return graph, replace(self.dims, num_params=self.dims.counts().num_params)
