# SPDX-License-Identifier: Apache-2.0
"""Optimization profiles: the sizes that a plan supports, derived from its spec, its options and the recipe's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speccompile.backends.tensorrt.config import ProfileConfig, SizeRange, config_from_options
from speccompile.core.jobs import PREFILL_CHUNK, CompileOptions
from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.errors import BuildError
from speccompile.graph_kinds.features import STATES

Range = tuple[int, int, int]
Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
_SECTION = "engine.tensorrt"


@dataclass(frozen=True)
class Profile:
    """One optimization profile."""

    name: str  # prefill, decode, or step where a graph has only one
    sizes: Mapping[str, Range]  # (min, opt, max) by name of a dynamic dim

    def shapes(self, spec: GraphSpec) -> Shapes:
        """Returns (min, opt, max) shapes of every input with a dynamic dim."""
        dynamic = [t for t in spec.inputs if any(isinstance(d, str) for d in t.dims)]
        return {t.name: (self._shape(t, 0), self._shape(t, 1), self._shape(t, 2)) for t in dynamic}

    def _shape(self, tensor: TensorSpec, which: int) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else self.sizes[d][which] for d in tensor.dims)

    def json_from_profile(self) -> dict[str, Any]:
        """Returns {"name", "sizes": {dim: [min, opt, max]}}."""
        return {"name": self.name, "sizes": {dim: list(sizes) for dim, sizes in self.sizes.items()}}


def make_profiles(spec: GraphSpec, options: CompileOptions) -> tuple[Profile, ...]:
    """Returns the profiles of a graph; that of steps comes last.

    A graph that reads prompts has `prefill`, one sequence and up to a chunk of its prompt, and `decode`, every slot and
    up to the nodes of a step. All others have `step`, with decode's sizes. Their options are in `options.backend`.

    Raises:
        BuildError: a profile of the recipe lacks sizes that the runtime needs, or exceeds the graph's.
    """
    names = ("prefill", "decode") if spec.reads_prompts else ("step",)
    profiles = tuple(_make_profile(name, spec, options) for name in names)
    unknown = sorted({d for t in spec.inputs for d in t.dims if isinstance(d, str)} - set(profiles[0].sizes))
    if unknown:
        expected = f"one of {', '.join(sorted(profiles[0].sizes))}"
        raise BuildError(f"profiles of {spec.name}", f"dim {unknown[0]!r}", expected, "Report it with the recipe.")
    return profiles


def _make_profile(name: str, spec: GraphSpec, options: CompileOptions) -> Profile:
    # The sizes that the runtime needs; the recipe may widen the range and chooses the optimum.
    num_masks = 0 if spec.mask_token is None else spec.num_drafts - 1
    rows, nodes = max(options.max_rows, 1), options.max_nodes + num_masks
    is_prefill = name == "prefill"
    own_rows = max(options.max_rows - spec.rows_written_ahead, 0)
    chunk = max(min(max(PREFILL_CHUNK, spec.image_tokens), own_rows or PREFILL_CHUNK), nodes)
    num_slots = 1 if is_prefill else options.max_slots
    needed = {"batch": (1, num_slots), "nodes": (1, chunk if is_prefill else nodes), "kv": (1, rows)}
    scores_one = spec.scores == "one"
    # A draft of chains reads one token at a time once it has caught up; a target scores whole drafts.
    steps_by_one = scores_one or spec.num_candidates == 1
    nodes_best = 1 if steps_by_one and not is_prefill else needed["nodes"][1]
    best = {"batch": num_slots, "nodes": nodes_best, "kv": max(rows // 2, 1)}
    config = config_from_options(options)
    profile = {"prefill": config.prefill, "decode": config.decode}.get(name, ProfileConfig())
    wishes: dict[str, SizeRange] = {"batch": profile.batch, "nodes": profile.nodes, "kv": profile.kv}
    sizes = {dim: _fit(name, dim, wishes[dim], needed[dim], best[dim]) for dim in needed}
    if sizes["kv"][2] > rows:
        got, where = f"{list(sizes['kv'])}", f"{_SECTION}.{name}.kv"
        todo = "Lower it, or raise engine.max_seq_len."
        raise BuildError(where, got, f"at most the {rows} cache rows of {spec.name}", todo)
    scored = 1 if scores_one else nodes
    return Profile(
        name,
        {
            **sizes,
            # Features that a draft reads: the target's of a step, or its own and one more.
            STATES: (1, sizes["nodes"][1], max(sizes["nodes"][2], nodes + 1)),
            "scored": (1, 1 if is_prefill or steps_by_one else scored, scored),
            "draft_vocab": (1, 1, max(spec.dist_width, 1)),
        },
    )


def _fit(name: str, dim: str, wish: SizeRange, needed: tuple[int, int], best: int) -> Range:
    low, high = needed
    if isinstance(wish, str):
        return low, best, high
    if wish[0] > low or wish[2] < high:
        where, todo = f"{_SECTION}.{name}.{dim}", "Widen it, or lower the sizes in engine."
        raise BuildError(where, f"{list(wish)}", f"a range that holds {low} to {high}", todo)
    return wish[0], wish[1], wish[2]
