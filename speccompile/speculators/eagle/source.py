# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-1 or 2 drafter as the source of a graph. Needs no torch before the export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from speccompile.core.feature_specs import FeatureDims, feature_draft_spec
from speccompile.core.jobs import CandidateOptions, WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.export.feature_source import FeatureSource, count_weights
from speccompile.speculators.eagle.formats import FORMATS, read

if TYPE_CHECKING:
    import onnx_ir as ir


class DraftSource(FeatureSource):
    """See `speccompile.core.protocols.GraphSource`. The job has `CandidateOptions`."""

    formats = FORMATS

    def counts(self) -> WeightCounts | None:
        """From the sizes."""
        hidden = self.dims.hidden_size
        return count_weights(self.dims, hidden, 2 * self.dims.num_layers - 1, 2 * hidden * hidden)

    def spec(self) -> GraphSpec:
        """Inputs and outputs of the graph."""
        options: CandidateOptions = self.job.options
        num = min(options.num_candidates, self.dims.vocab_size)
        return feature_draft_spec(self.job.name, self.dims, num, options.gives_probs, self.max_rows)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, FeatureDims]:
        """Read or make the weights, and trace."""
        from speccompile.checkpoints.target_tables import read_tables
        from speccompile.export.feature_draft import export_feature_draft
        from speccompile.speculators.eagle.drafter import make_body

        progress("load weights")
        weights = None if self.context.weights == "random" else read(self.folder)[1]
        body = make_body(self.config, self.dims, weights, read_tables(self.context).lm_head)
        graph = export_feature_draft(body, self.spec(), self.max_rows, progress)
        return graph, replace(self.dims, num_params=sum(p.numel() for p in body.parameters()))
