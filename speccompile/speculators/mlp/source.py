# SPDX-License-Identifier: Apache-2.0
"""A published MLP speculator as the source of the heads' graph. Needs no torch before the export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.errors import CheckpointError, RecipeError
from speccompile.frontend.folders import digests_from_checkpoint, find_folder
from speccompile.frontend.state_dict import FILES, Shape, check_shapes, read_shapes, read_tensors
from speccompile.speculators.mlp.sizes import PREFIX, HeadsSizes, read_sizes

if TYPE_CHECKING:
    import onnx_ir as ir


class HeadsSource:
    """See `speccompile.core.protocols.GraphSource`. Option of the job: `num_drafts`, heads in the graph; None: all.

    Args:
        job: the speculator.
        context: the target's sizes must be its own.
    """

    role = "heads"
    max_rows = 0
    has_tokenizer = False

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        self.job, self.context = job, context
        num_drafts: int | None = dict(job.options)["num_drafts"]
        self.folder = find_folder(job, context.weights, FILES)
        self.dims: HeadsSizes = read_sizes(self.folder, num_drafts)
        self._check_sizes()

    def _check_sizes(self) -> None:
        sizes, target, room = self.dims, self.context.target, self.context.max_draft_nodes
        assert target is not None
        where, todo = f"speculator: {self.job.model}", "Choose the speculator that was trained for this target."
        if sizes.hidden_size != target.hidden_size:
            expected = f"{target.hidden_size}, as the target has"
            raise RecipeError(where, f"a hidden size of {sizes.hidden_size}", expected, todo)
        if sizes.vocab_size != target.vocab_size:
            expected = f"{target.vocab_size}, as the target has"
            raise RecipeError(where, f"a vocabulary of {sizes.vocab_size} tokens", expected, todo)
        if sizes.num_drafts > sizes.num_heads:
            expected = f"at most {sizes.num_heads}, the heads of {self.job.model}"
            raise RecipeError("speculator.num_draft_tokens", str(sizes.num_drafts), expected, "Lower it.")
        if sizes.num_drafts > room:
            todo = "Raise it, or use fewer heads with speculator.num_draft_tokens."
            raise RecipeError("engine.max_draft_nodes", str(room), f"at least {sizes.num_drafts}, one a head", todo)

    def check(self) -> None:
        """Every key and shape, from the files' headers."""
        self._wanted(read_shapes(self.folder))

    def _wanted(self, held: Mapping[str, Shape]) -> dict[str, str]:
        """Names in the files by name of the parameter; copies that a tied checkpoint may hold are left out.

        Raises:
            CheckpointError: a weight is missing, extra or of another shape.
        """
        prefix = PREFIX if any(name.startswith(PREFIX) for name in held) else ""
        sizes = self.dims
        wanted: dict[str, Shape] = {}
        used: dict[str, str] = {}
        for kind, head, shape in sizes.weights():
            own, name = sizes.shares(kind, head) == head, prefix + kind.format(head)
            if own or name in held:
                wanted[name] = shape
            if own:
                used[kind.format(head)] = name
        check_shapes(self.folder, held, wanted)
        return used

    def digests(self) -> dict[str, str]:
        """Of config and weights."""
        return digests_from_checkpoint(self.folder, self.context.weights, FILES)

    def counts(self) -> WeightCounts | None:
        """From the sizes."""
        return self.dims.counts()

    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        return self.dims.spec(self.job.name)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, HeadsSizes]:
        """Read or make the weights, and trace."""
        from speccompile.frontend.heads import export_heads
        from speccompile.speculators.mlp.heads import MlpDrafter, heads_from_weights, random_heads

        progress("load weights")
        is_random = self.context.weights == "random"
        heads = random_heads(self.dims) if is_random else heads_from_weights(self.dims, self._read_weights())
        graph = export_heads(MlpDrafter(heads).eval(), self.spec(), progress)
        return graph, replace(self.dims, num_params=self.dims.counts().num_params)

    def _read_weights(self) -> dict[str, Any]:
        held = read_tensors(self.folder)
        used = self._wanted({name: tuple(tensor.shape) for name, tensor in held.items()})
        for kind, head, _ in self.dims.weights():
            first = self.dims.shares(kind, head)
            source = used[kind.format(first)]
            copy = source.removesuffix(kind.format(first)) + kind.format(head)
            if first != head and copy in held and not bool((held[copy] == held[source]).all()):
                got, expected = f"{copy} that differs from {source}", "equal weights, as tie_weights says"
                raise CheckpointError(str(self.folder), got, expected, "Config and weights are of different models.")
        return {name: held[source] for name, source in used.items()}
