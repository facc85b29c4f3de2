# SPDX-License-Identifier: Apache-2.0
"""The target's own decoder layers as the source of a draft's graph, which works on the target's caches. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.folders import digests_from_checkpoint
from speccompile.checkpoints.lora import digests_of_adapter
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import DecoderOptions, GraphJob, SourceContext, WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.export.checks import check_candidates
from speccompile.export.decoder_source import BY_LAYER, WEIGHT_FILES, DecoderSource
from speccompile.graph_kinds.borrowed import sharing_spec
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec

if TYPE_CHECKING:
    import onnx_ir as ir

    from speccompile.core.protocols import Engine


class TargetLayersSource:
    """The part of `core.protocols.GraphSource` that methods share which draft with the target's own layers.

    The job has `CandidateOptions`. A method's source sets `dims` and `layers`, and changes the model in `prepare`.
    """

    role = "draft"
    has_tokenizer = False
    shares_weights = True
    needs_tables = False
    is_needed = True
    dims: ModelDims
    layers: Sequence[int]  # of the target, those that draft, in rising order

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        assert context.target is not None and context.target_job is not None
        self.job, self.context, self.of_target = job, context, context.target
        self.num_candidates = min(job.options.num_candidates, context.target.vocab_size)
        kept = DecoderOptions(num_layers=context.target_job.options.num_layers)
        target_job = replace(context.target_job, options=kept, adapters=())  # requests choose those of the target alone
        self.target = DecoderSource(target_job, replace(context, target=None))
        self.folder, self.max_rows = self.target.folder, self.target.max_rows

    def check(self) -> None:
        """Checks nothing: the target's keys and shapes are checked with the target."""

    def digests(self) -> dict[str, str]:
        """Returns the digests of the target's config and weights, and of the adapter in them."""
        weights = self.context.weights
        found = digests_from_checkpoint(self.folder, weights, WEIGHT_FILES) | digests_of_adapter(self.target.job)
        return {f"target/{name}": digest for name, digest in found.items()}

    def counts(self) -> WeightCounts | None:
        """Returns None: the target's config.json and the sizes are enough."""
        return None

    def spec(self) -> GraphSpec:
        plain = decoder_spec(self.job.name, self.dims, max_pending=self.context.max_draft_nodes + 1)
        shared = sharing_spec(replace(plain, max_rows=self.max_rows), self.layers)
        return candidate_spec(shared, self.num_candidates, self.job.options.gives_probs)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        return check_candidates(engine)

    def prepare(self, model: Any, dims: ModelDims) -> ModelDims:
        """Keeps the layers that draft, in place; returns the new sizes."""
        return keep_layers(model, dims, self.layers)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, Any]:
        """Reads the target, changes it with `prepare`, and traces it."""
        graph, made = self.target.export_changed(self.prepare, progress)
        return graph, replace(self.dims, num_params=made.num_params)


def keep_layers(model: Any, dims: ModelDims, kept: Sequence[int]) -> ModelDims:
    """Keeps the layers of indices `kept`, rising from 0, in place, numbers them anew, and returns the new sizes.

    Raises:
        ExportError: the layers cannot be found.
    """
    from speccompile.export.wrapper import find_layers

    layers, config = find_layers(model, dims.num_layers), model.config
    for index in sorted(set(range(dims.num_layers)) - set(kept), reverse=True):
        del layers[index]
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = index
    for name in BY_LAYER:
        if isinstance(held := getattr(config, name, None), list) and len(held) == dims.num_layers:
            setattr(config, name, [held[index] for index in kept])
    config.num_hidden_layers = len(kept)
    return dims.kept(kept)
