# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 drafter as the source of two graphs: the drafter, and the fusion of the target's states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import read_config
from speccompile.core.feature_specs import FeatureDims, feature_draft_spec, fusion_spec
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.protocols import Engine
from speccompile.core.specs import GraphSpec
from speccompile.errors import CheckpointError
from speccompile.export.checks import check_features
from speccompile.export.feature_source import FeatureSource, count_weights, holds
from speccompile.speculators.eagle3.formats import FORMATS, read
from speccompile.speculators.eagle3.layers import NUM_STREAMS, layers_of_target

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from speccompile.speculators.eagle3.config import DraftOptions

EMBEDDINGS = "embed_tokens.weight"


class _Eagle3Source(FeatureSource):
    """What both graphs share."""

    formats = FORMATS

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        assert context.target is not None
        num, asked = context.target.num_layers, job.options.layers
        layers = layers_of_target(job.model, job.config, asked, num, context.weights)
        self.dims: FeatureDims = replace(self.dims, layers=layers)
        nested = read_config(self.folder).get("eagle_config")
        if isinstance(nested, dict) and nested.get("use_aux_hidden_state") is False:
            where = f"{self.folder / 'config.json'} (eagle_config.use_aux_hidden_state)"
            todo = "This variant reads the last state alone and is not supported."
            raise CheckpointError(where, "false", "true: three states are fused", todo)

    def _weights(self, progress: Callable[[str], None]) -> dict[str, torch.Tensor] | None:
        progress("load weights")
        return None if self.context.weights == "random" else read(self.folder)[1]


class DraftSource(_Eagle3Source):
    """See `speccompile.core.protocols.GraphSource`. The job has `DraftOptions`."""

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.needs_tables = context.weights == "random" or not holds(self.folder, EMBEDDINGS)

    def counts(self) -> WeightCounts | None:
        """From the sizes."""
        dims = self.dims
        return count_weights(dims, 2 * dims.hidden_size, 2 + 2 * dims.num_layers)

    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        options: DraftOptions = self.job.options
        num = min(options.num_candidates, self.dims.draft_vocab_size)
        return feature_draft_spec(self.job.name, self.dims, num, options.gives_probs, self.max_rows)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, FeatureDims]:
        """Read or make the weights, and trace."""
        from speccompile.checkpoints.target_tables import read_tables
        from speccompile.export.feature_draft import export_feature_draft
        from speccompile.speculators.eagle3.drafter import make_body

        weights = self._weights(progress)
        embeddings: Any = read_tables(self.context).embeddings if self.needs_tables else None
        body = make_body(self.config, self.dims, weights, embeddings)
        graph = export_feature_draft(body, self.spec(), self.max_rows, progress)
        return graph, replace(self.dims, num_params=sum(p.numel() for p in body.parameters()))


class FusionSource(_Eagle3Source):
    """See `speccompile.core.protocols.GraphSource`. The job has `FusionOptions`."""

    role = "fusion"
    needs_tables = False

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.max_rows = 0

    def counts(self) -> WeightCounts | None:
        """From the sizes; norms are left out."""
        num = NUM_STREAMS * self.dims.target_hidden_size * self.dims.hidden_size
        return WeightCounts(num, num, 0)

    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        return fusion_spec(self.job.name, self.dims)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        """See `speccompile.export.checks.check_features`."""
        return check_features(engine)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, FeatureDims]:
        """Read or make the weights, and trace."""
        from speccompile.export.feature_draft import export_fusion
        from speccompile.speculators.eagle3.drafter import make_fusion

        fusion = make_fusion(self.config, self.dims, self._weights(progress))
        graph = export_fusion(fusion, self.spec(), progress)
        return graph, replace(self.dims, num_params=sum(p.numel() for p in fusion.parameters()))
