# SPDX-License-Identifier: Apache-2.0
"""Block drafters as the source of two graphs; see `layouts` for those on disk. Needs no torch before the export."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.checkpoints.config_values import check_config
from speccompile.checkpoints.folders import find_folder
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.protocols import Engine
from speccompile.core.specs import CANDIDATES, GraphSpec, probe_inputs
from speccompile.doctor.doctor import open_config, open_known
from speccompile.errors import BuildError, CheckpointError, RecipeError
from speccompile.export.feature_source import FusionGraph, dims_from_config
from speccompile.export.speculator_source import SpeculatorSource
from speccompile.graph_kinds.blocks import (
    NEXT_STATES,
    PAIR_SCORES,
    PATH_SCORES,
    PathSizes,
    block_draft_spec,
    path_step_spec,
)
from speccompile.graph_kinds.features import FeatureDims
from speccompile.speculators.dflash.drafter import (
    CORRECTOR_KEYS,
    NESTED,
    Corrector,
    Drafter,
    drafter_from_config,
    published_layers,
)
from speccompile.speculators.dflash.layouts import EMBEDDINGS, FORMATS, LAYERS, LM_HEAD, METHOD

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from speccompile.speculators.dflash.config import BlockOptions

_NUM_CANDIDATES, _NUM_STREAMS = 16, 5  # where a config does not say


def layers_of_target(
    model: str, config: str | None, asked: Sequence[int] | None, num_layers: int, weights: str
) -> tuple[int, ...]:
    """Returns the layers of a target, for its own graph and the drafter's. Raises RecipeError: wrong number or order.

    Args:
        asked: by the recipe; None: as the checkpoint says, else the published choice.
        weights: "checkpoint" or "random"; a random target may have fewer layers, which are then chosen anew.
    """
    is_random = weights == "random"
    folder = find_folder(GraphJob("draft", model, config=config), weights, SPECULATOR_FILES)
    case = open_config(folder, FORMATS, FORMATS[-1]) if is_random else open_known(folder, FORMATS, None)
    num = case.sizes["num_states"]
    if asked is not None:
        if not all(i < num_layers for i in asked) or (num is not None and len(asked) != num):
            expected = f"{num or 'different'} layers of the target's {num_layers}"
            raise RecipeError("speculator.layers", f"{list(asked)}", expected, "Correct the recipe.")
        return tuple(asked)
    where, named = str(case.folder / "config.json"), case.canonical_config()[NESTED].get(LAYERS)
    if named is None:
        return _spread(num_layers, num or _NUM_STREAMS) if is_random else published_layers(num_layers, num or 1)
    if not isinstance(named, list) or not all(type(i) is int for i in named) or len(set(named)) != len(named):
        raise CheckpointError(where, repr(named), "different layers of the target", "Give speculator.layers.")
    if min(named) >= 0 and max(named) < num_layers:
        return tuple(named)
    if is_random:
        return _spread(num_layers, len(named))
    got, expected = f"the outputs of layers {named}", f"layers of the target's {num_layers}"
    todo = "It was trained for another target, or counts its layers otherwise: `speccompile doctor --target` says."
    raise CheckpointError(where, got, expected, todo)


def _spread(num_layers: int, num: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(i) for i in np.linspace(0, num_layers - 1, num).round()))


class _BlockSource(SpeculatorSource):
    """Base of the sources of both graphs.

    Raises RecipeError: its sizes are not the target's, or its block is too short.
    """

    formats = FORMATS

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.config = self.case.canonical_config()
        self.drafter: Drafter = drafter_from_config(str(self.folder), self.config)
        if self.drafter.mask_token_id >= self.config["vocab_size"]:
            where, todo = f"{self.folder}/config.json (mask_token_id)", "Correct config.json."
            expected = f"a token below {self.config['vocab_size']}"
            raise CheckpointError(where, f"{self.drafter.mask_token_id}", expected, todo)
        # Its layers' kinds and windows are read by the drafter.
        rotary = {k: v for k, v in self.config.items() if k not in ("layer_types", "sliding_window")}
        check_config({**rotary, "model_type": METHOD}, context.max_seq_len)
        dims = dims_from_config(self.folder, self.config, METHOD, context.max_seq_len)
        num, weights = self.target.num_layers, context.weights
        layers = layers_of_target(job.model, job.config, job.options.layers, num, weights)
        self.dims: FeatureDims = replace(dims, layers=layers)
        self.check_target("target states of {}", dims.target_hidden_size)


# Weights of the other graphs, or of none; tables, of which rows are gathered, and biases.
_ELSEWHERE = re.compile(r"^(fc|hidden_norm)\.weight$|^confidence_head\.|^prefix_gru\.|^embed_proj\.0\.")
_TABLES = re.compile(r"embed_tokens\.weight$|_codebook$|markov_w\d\.weight$|^embed_proj\.2\.|base_kernel$|_bias$")


class DraftSource(_BlockSource):
    """A `speccompile.core.protocols.GraphSource`. The job has `BlockOptions`."""

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.max_rows = context.max_seq_len
        options = self._options
        if options.starts_at_root is not None:
            self.drafter = replace(self.drafter, starts_at_root=options.starts_at_root)
        self._check_corrector()
        most = self.drafter.max_drafts
        if options.is_exact and options.num_drafts > most:
            got = f"{options.num_drafts} draft tokens on a path"
            todo = "Draft fewer tokens with speculator.num_draft_tokens or tree."
            raise RecipeError("speculator.num_draft_tokens", got, f"at most {most}, the drafter's block", todo)
        self.num_drafts = max(min(options.num_drafts, most, context.max_draft_nodes), 1)
        num_candidates = options.num_candidates or self.drafter.num_candidates or _NUM_CANDIDATES
        self.num_candidates = min(num_candidates, self.dims.draft_vocab_size)
        if self.num_candidates < options.least_candidates:
            got, todo = f"ranks up to {options.least_candidates - 1}", "Correct the tree, or raise slot_candidates."
            expected = f"ranks below {self.num_candidates}, the candidates of a slot"
            raise RecipeError("speculator.tree", got, expected, todo)
        stored = {e.name for e in self.case.expected.values() if e.key in self.case.files.headers}
        self.needs_tables = not {EMBEDDINGS, LM_HEAD} <= stored
        if EMBEDDINGS not in stored and self.dims.hidden_size != self.dims.target_hidden_size:
            got, expected = f"a hidden size of {self.dims.hidden_size}", f"{self.dims.target_hidden_size}"
            todo = "It has no embeddings of its own, and the target's have another width."
            raise CheckpointError(str(self.folder), got, expected, todo)

    def _check_corrector(self) -> None:
        corrector, todo = self.drafter.corrector, "Leave it auto in the recipe."
        if corrector is None:
            return
        num, vocab = corrector.num_candidates, self.dims.vocab_size
        if self.drafter.starts_at_root:
            raise RecipeError("speculator.sample_from_anchor", "true", "false: LiLiCorr scores slots after it", todo)
        if self._options.num_candidates > num:
            expected = f"at most {num}, which LiLiCorr's layers read"
            raise RecipeError("speculator.slot_candidates", f"{self._options.num_candidates}", expected, todo)
        if num > vocab:
            where, todo = f"{self.folder}/config.json ({CORRECTOR_KEYS['num_candidates'][0]})", "Correct config.json."
            raise CheckpointError(where, f"{num}", f"at most {vocab}, the vocabulary", todo)

    @property
    def _options(self) -> BlockOptions:
        options: BlockOptions = self.job.options
        return options

    def part_of(self, name: str) -> str:
        if _ELSEWHERE.search(name):
            return ""
        return "table" if _TABLES.search(name) else "linear"

    def tables(self) -> dict[str, tuple[int, ...]]:
        """Returns what no row of the layout is: the path head's columns for states, layers that only weights show."""
        drafter, hidden, made = self.drafter, self.dims.hidden_size, dict[str, tuple[int, ...]]()
        if drafter.path is not None:
            made["of_states"] = (drafter.path.width, hidden)
            made["embed_proj.2.weight"] = (self.dims.vocab_size, drafter.path.width)
        if drafter.corrector is not None and self.is_random:
            made["of_corrector"] = (1, corrector_weights(drafter.corrector, hidden))
        return made

    def spec(self) -> GraphSpec:
        return block_draft_spec(
            self.job.name,
            self.dims,
            self.max_rows,
            num_drafts=self.num_drafts,
            num_candidates=self.num_candidates,
            is_paired=self.drafter.is_paired,
            num_masks=self.drafter.num_masks(self.num_drafts),
            path=path_sizes(self.drafter),
        )

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        """Drafts one block from arbitrary features.

        Raises:
            BuildError: a token outside the vocabulary or given twice, or a score that is no number.
        """
        outputs = engine.run(probe_inputs(engine.spec, num_nodes=2))
        where, todo = f"check {engine.spec.name}", "The compiled graph is wrong: report it with the config.json."
        for row in np.asarray(outputs[CANDIDATES])[0].tolist():
            if len(set(row)) < len(row) or min(row) < 0 or max(row) >= engine.spec.vocab_size:
                expected = f"different tokens below {engine.spec.vocab_size}"
                raise BuildError(where, f"candidates {row}", expected, todo)
        if not np.isfinite(np.asarray(outputs[PAIR_SCORES])).all():
            raise BuildError(where, "scores that are not finite", "numbers", todo)
        return {"num_tokens": engine.spec.num_drafts}

    def make_module(self) -> torch.nn.Module:
        from speccompile.checkpoints.target_tables import read_tables
        from speccompile.speculators.dflash.model import make_draft

        tables = read_tables(self.context) if self.needs_tables else None
        shared: Mapping[str, Any] = {} if tables is None else {EMBEDDINGS: tables.embeddings, LM_HEAD: tables.lm_head}
        return make_draft(self.config, self.drafter, self.dims, self.spec(), self.read_weights(), shared)

    def trace(self, module: torch.nn.Module, progress: Callable[[str], None]) -> ir.Model:
        from speccompile.export.decoder import cleanup_table
        from speccompile.export.own_drafts import export_cached_draft

        spec = self.spec()
        # A block may begin at the last row that a sequence can use.
        return export_cached_draft(module, spec, progress, cleanup_table(self.max_rows + spec.rows_written_ahead))


def corrector_weights(corrector: Corrector, width: int) -> int:
    """Returns the number of weights of layers over candidates, without norms, biases and small tables."""
    own = corrector.hidden_size or width
    around = 2 * width * own + (width * own if own != width else 0)  # of states, features' anchor and tokens
    layers = corrector.num_layers * own * (4 * own + 2 * int(own * corrector.mlp_ratio))
    return around + layers + own * (own + 3 * own + 3 * corrector.factor_dim)


def path_sizes(drafter: Drafter) -> PathSizes | None:
    """Returns the sizes of a drafter's state over its path; None where it has none."""
    return None if drafter.path is None else PathSizes(drafter.path.state_size, drafter.path.width)


class StepSource(DraftSource):
    """The source of the step of drafters with a state over their paths. The job has `BlockOptions`."""

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        super().__init__(job, context)
        self.max_rows, self.needs_tables, self.is_needed = 0, False, self.drafter.path is not None

    def counts(self) -> WeightCounts | None:
        assert self.drafter.path is not None
        state, width = self.drafter.path.state_size, self.drafter.path.width
        num = state * (3 * (self.dims.hidden_size + state) + width)
        return WeightCounts(num, num, 0)

    def spec(self) -> GraphSpec:
        sizes = path_sizes(self.drafter)
        assert sizes is not None
        return path_step_spec(self.job.name, self.dims, sizes, self.num_candidates)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        outputs = engine.run(probe_inputs(engine.spec, num_nodes=2))
        where, todo = f"check {engine.spec.name}", "The compiled graph is wrong: report it with the config.json."
        largest = float(np.abs(np.asarray(outputs[NEXT_STATES])).max())
        if not largest < 1.01:
            raise BuildError(where, f"a state of {largest}", "numbers between -1 and 1", todo)
        if not np.isfinite(np.asarray(outputs[PATH_SCORES])).all():
            raise BuildError(where, "scores that are not finite", "numbers", todo)
        return {"num_tokens": 2}

    def make_module(self) -> torch.nn.Module:
        from speccompile.speculators.dflash.heads import make_step

        assert self.drafter.path is not None
        return make_step(self.drafter.path, self.dims.hidden_size, self.read_weights())

    def trace(self, module: torch.nn.Module, progress: Callable[[str], None]) -> ir.Model:
        from speccompile.export.feature_draft import export_fusion

        return export_fusion(module, self.spec(), progress)


class FusionSource(FusionGraph, _BlockSource):
    """A `speccompile.core.protocols.GraphSource`. The job has `FusionOptions`."""

    def make_module(self) -> torch.nn.Module:
        from speccompile.speculators.dflash.model import make_fusion

        return make_fusion(self.config, self.dims, self.read_weights())
