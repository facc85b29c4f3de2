# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the sources of drafts that read features: config, sizes, agreement with the target. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import stated_size
from speccompile.checkpoints.config_values import check_config, check_heads
from speccompile.checkpoints.tensor_files import open_files
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.errors import CheckpointError
from speccompile.export.checks import check_features
from speccompile.export.speculator_source import SpeculatorSource
from speccompile.graph_kinds.features import FeatureDims, fusion_spec

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch


_NESTED = ("transformer_layer_config", "model")  # in a config: the layers' own, the latter in vLLM's


class FeatureSource(SpeculatorSource):
    """The part of `GraphSource` that methods share whose drafts read features, of a target of their sizes."""

    needs_tables = True
    has_windows = False  # its layers' attention may have a window

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        method = self.formats[0].method
        self.config = self.case.canonical_config()
        if not self.has_windows:
            check_window(self.folder, self.case.config)
        rotary = {k: v for k, v in self.config.items() if k not in ("layer_types", "sliding_window")}
        check_config({**rotary, "model_type": method}, context.max_seq_len)
        self.max_rows = context.max_seq_len
        self.dims: FeatureDims = dims_from_config(self.folder, self.config, method, context.max_seq_len)
        self.check_target("target states of {}", self.dims.target_hidden_size)

    def trace(self, module: torch.nn.Module, progress: Callable[[str], None]) -> ir.Model:
        return trace_features(module, self.spec(), self.max_rows, progress)


class FusionGraph(SpeculatorSource):
    """The source of the graph that fuses residual streams of the target, beside a method's own base class.

    `dims` is a `FeatureDims` with the target's layers. The job has `drafting.feature_config.FusionOptions`.
    """

    role = "fusion"
    needs_tables = False
    output_check = staticmethod(check_features)

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.max_rows = 0

    def counts(self) -> WeightCounts | None:
        num = len(self.dims.layers) * self.dims.target_hidden_size * self.dims.hidden_size
        return WeightCounts(num, num, 0)

    def spec(self) -> GraphSpec:
        return fusion_spec(self.job.name, self.dims)

    def trace(self, module: torch.nn.Module, progress: Callable[[str], None]) -> ir.Model:
        from speccompile.export.feature_draft import export_fusion

        return export_fusion(module, self.spec(), progress)


def trace_features(module: Any, spec: GraphSpec, max_rows: int, progress: Callable[[str], None]) -> ir.Model:
    """Traces a `FeatureBody`."""
    from speccompile.export.feature_draft import export_feature_draft

    return export_feature_draft(module, spec, max_rows, progress)


def layer_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return next((held for name in _NESTED if isinstance(held := config.get(name), Mapping)), config)


def check_window(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a window of the attention, which loaders without windows drop silently."""
    layer = layer_config_of(config)
    window = layer.get("sliding_window")
    if window and layer.get("use_sliding_window", True):
        where, todo = f"{folder / 'config.json'} (sliding_window)", "Drafters with a window are not supported."
        raise CheckpointError(where, f"a window of {window} tokens", "full attention", todo)


def holds(folder: Path, key: str) -> bool:
    return any(name.split(".", name.count(".") - key.count("."))[-1] == key for name in open_files(folder).headers)


def dims_from_config(folder: Path, config: Mapping[str, Any], model_type: str, max_positions: int) -> FeatureDims:
    """Returns the sizes. Raises CheckpointError: a size is missing or no positive integer; see `check_heads`.

    Args:
        max_positions: rows of the cache: positions are rotary and not bounded by the config's number.
    """

    def size(name: str, default: int | None = None) -> int:
        return stated_size(folder, config, name, "Complete config.json.", default)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    check_heads(str(folder / "config.json"), (hidden, heads, kv_heads), has_dim=bool(config.get("head_dim")))
    return FeatureDims(
        model_type=model_type,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        num_layers=size("num_hidden_layers", 1),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size("head_dim", hidden // heads),
        max_positions=max_positions,
        target_hidden_size=size("target_hidden_size", hidden),
        intermediate_size=size("intermediate_size"),
        draft_vocab_size=size("draft_vocab_size", size("vocab_size")),
        head_rank=size("head_rank") if config.get("head_rank") else 0,
    )
