# SPDX-License-Identifier: Apache-2.0
"""What the graph sources of speculators with files of their own share: folder, agreement with the target. No torch."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.folders import digests_from_checkpoint, find_folder
from speccompile.checkpoints.target_tables import digests_from_target
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES
from speccompile.core.jobs import GraphJob, SourceContext, WeightCounts
from speccompile.core.specs import GraphSpec
from speccompile.doctor.doctor import (
    check_kind,
    check_method,
    check_speculator,
    findings_from_case,
    open_config,
    open_known,
    read_speculator,
)
from speccompile.doctor.layouts import FLOATS, Case, Expected, Format
from speccompile.errors import RecipeError
from speccompile.export.checks import check_candidates

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from speccompile.core.protocols import Engine

_log = logging.getLogger(__name__)


class SpeculatorSource:
    """The part of `core.protocols.GraphSource` that does not depend on the method.

    A method's source sets `dims` and `formats`, and adds `spec`, `make_module` and, unless it is of heads, `trace`.

    Raises:
        CheckpointError: it is of another method, or, without weights, its config of a kind that is not supported yet.
    """

    role = "draft"
    max_rows = 0
    has_tokenizer = False
    shares_weights = False
    is_needed = True
    is_tied = False  # its LM head is its own table of embeddings
    dims: Any
    formats: Sequence[Format] = ()  # the method's layouts on disk
    config_layout: Format | None = None  # of a config without weights that names no layout; None: the canonical one
    needs_tables = False  # of the target: its embeddings or its LM head are copied into the graph
    overrides: Mapping[str, Any] | None = None  # instead of values of its config.json
    output_check: Callable[[Engine], dict[str, Any]] = staticmethod(check_candidates)

    def __init__(self, job: GraphJob, context: SourceContext) -> None:
        assert context.target is not None
        self.job, self.context, self.target = job, context, context.target
        self.folder = find_folder(job, context.weights, SPECULATOR_FILES)
        if self.is_random:
            check_kind(self.folder, self.formats)
        elif self.formats:
            check_method(self.folder, self.formats[0].method)

    def check_target(self, text: str, hidden: int, made: str = "the speculator that was trained") -> None:
        """Checks that width and vocabulary are the target's; `text` has a place for the width."""
        width = (text, hidden, self.target.hidden_size)
        vocab = ("a vocabulary of {} tokens", self.dims.vocab_size, self.target.vocab_size)
        check_agreement(self.job.model, (width, vocab), made)

    @property
    def is_random(self) -> bool:
        return self.context.weights == "random"

    @functools.cached_property
    def case(self) -> Case:
        """The checkpoint; without weights it is known by its config alone."""
        if self.is_random:
            canonical = next(f for f in self.formats if f.name.endswith("/ours"))
            return open_config(self.folder, self.formats, self.config_layout or canonical)
        return open_known(self.folder, self.formats, None)

    def read_weights(self) -> dict[str, torch.Tensor] | None:
        """Returns the tensors by the names of our layout; None where weights are random."""
        return None if self.is_random else read_speculator(self.folder, self.formats, overrides=self.overrides)[1]

    def spec(self) -> GraphSpec:
        raise NotImplementedError

    def make_module(self) -> torch.nn.Module:
        """Returns the module that is traced, with the checkpoint's weights or random ones."""
        raise NotImplementedError

    def trace(self, module: torch.nn.Module, progress: Callable[[str], None]) -> ir.Model:
        from speccompile.export.own_drafts import export_heads

        return export_heads(module.eval(), self.spec(), progress)

    def export(self, progress: Callable[[str], None]) -> tuple[ir.Model, Any]:
        """Reads or makes the weights, and traces the graph."""
        progress("load weights")
        module = self.make_module()
        graph = self.trace(module, progress)
        return graph, replace(self.dims, num_params=sum(p.numel() for p in module.parameters()))

    def check(self) -> None:
        """Checks every key and shape by the files' headers, and warns of what else the doctor finds in them."""
        job = self.context.target_job
        folder = None if job is None else find_folder(job, self.context.weights)
        case = check_speculator(self.folder, self.formats, self.target, target_folder=folder, overrides=self.overrides)
        for found in findings_from_case(case) if self.role == "draft" else ():  # several graphs may be of one folder
            _log.warning("%s: got %s; expected %s. %s", found.where, found.got, found.expected, found.todo)

    def check_compiled(self, engine: Engine, max_nodes: int) -> dict[str, Any]:
        return self.output_check(engine)

    def digests(self) -> dict[str, str]:
        """Returns the digests of config and weights, and of the target's where its tables are used."""
        own = digests_from_checkpoint(self.folder, self.context.weights, SPECULATOR_FILES)
        return own | (digests_from_target(self.context) if self.needs_tables else {})

    def part_of(self, name: str) -> str:
        """Returns what a weight of the canonical layout is in the graph: "linear", "table"; empty: not in it."""
        return "table" if name.endswith("embed_tokens.weight") else "linear"

    def tables(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the graph's tables that the layout does not have, by their names."""
        return {}

    def counts(self) -> WeightCounts | None:
        """Returns the weights of the graph: of the layout's rows, shared ones once, and of its further tables."""
        rows = [e for e in self.case.expected.values() if e.row.dtypes == FLOATS]
        shapes = {e.name: self._shape_of(e) for e in rows if not e.fallback or e.row.may_differ} | self.tables()
        sizes = {name: math.prod(shape) for name, shape in shapes.items() if self.part_of(name)}
        linear = sum(n for name, n in sizes.items() if len(shapes[name]) > 1 and self.part_of(name) == "linear")
        head, total = sum(n for name, n in sizes.items() if name.startswith("lm_head")), sum(sizes.values())
        return WeightCounts(total - (head if self.is_tied else 0), linear, total - linear, head, self.is_tied)

    def _shape_of(self, expected: Expected) -> tuple[int, ...]:
        """Returns the shape of a weight; sizes that its config does not state, as "hidden", are the target's."""
        pairs = zip(expected.shape, expected.row.dims, strict=True)
        return tuple(getattr(self.dims, f"{name}_size", 0) if size is None else size for size, name in pairs)


def check_agreement(
    model: str, sizes: Sequence[tuple[str, int | None, int]], made: str = "the speculator that was trained"
) -> None:
    """Checks that the sizes for which a speculator was made are those of its target.

    Args:
        sizes: (text for a number, as "a hidden size of {}"; the speculator's size, None: it states none; the target's).
    """
    for text, size, wanted in sizes:
        if size is not None and size != wanted:
            todo = f"Choose {made} for this target; `speccompile doctor --target` compares them."
            raise RecipeError(f"speculator: {model}", text.format(size), f"{wanted}, as the target has", todo)


def check_room(depth: int, context: SourceContext) -> None:
    """Checks that a step may score every draft token of the longest path."""
    if depth > context.max_draft_nodes:
        expected = f"at least {depth}, the tokens on the longest path of a draft"
        todo = "Raise it, or draft fewer tokens with speculator.num_draft_tokens."
        raise RecipeError("engine.max_draft_nodes", str(context.max_draft_nodes), expected, todo)
