# SPDX-License-Identifier: Apache-2.0
"""Several drafters in one bundle: the recipe's list of their sections, and what they need together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, astuple, dataclass, field, fields
from typing import Any

from speccompile.core import registry
from speccompile.core.jobs import DraftBounds, GraphJob, MethodContext, TargetOutputs
from speccompile.core.protocols import Engine
from speccompile.core.registry import SECTIONS, Method
from speccompile.errors import RecipeError
from speccompile.speculators.hybrid.choice import DrafterCosts
from speccompile.speculators.hybrid.proposer import Drafter, HybridProposer


@dataclass(frozen=True)
class HybridConfig:
    """Several drafters: two or more speculator sections, each with its `method`.

    Raises:
        RecipeError: fewer than two, one of them is wrong, or two cannot be in one bundle.
    """

    drafters: tuple[Mapping[str, Any], ...] = field(metadata={SECTIONS: True})

    def __post_init__(self) -> None:
        given = self.drafters
        if not isinstance(given, list | tuple) or len(given) < 2:
            got, todo = f"{len(given) if isinstance(given, list | tuple) else given!r}", "List two drafters or more."
            raise RecipeError("speculator.drafters", got, "a list of two sections or more", todo)
        parts = tuple(_part(index, section) for index, section in enumerate(given))
        object.__setattr__(self, "drafters", tuple({"method": m.name, **asdict(c)} for m, c in parts))
        object.__setattr__(self, "_parts", parts)
        self._check_graphs()

    def _check_graphs(self) -> None:
        names = [job.name for method, config in self.parts for job in method.graph_jobs(config)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            got = f"two drafters with a graph called {twice[0]}"
            raise RecipeError("speculator.drafters", got, "graphs of different names", "Leave one of the drafters out.")

    @property
    def parts(self) -> tuple[tuple[Method, Any], ...]:
        parts: tuple[tuple[Method, Any], ...] = self._parts  # type: ignore[attr-defined]
        return parts

    @property
    def draft_bounds(self) -> DraftBounds:
        """The greatest bounds of the drafters; open where one of them is."""
        bounds = [config.draft_bounds for _, config in self.parts]
        return DraftBounds(*(max(values) for values in zip(*map(astuple, bounds), strict=True)))


def _part(index: int, section: Any) -> tuple[Method, Any]:
    """Returns the method and the `Config` of one section, a mapping or a recipe's model; lists do not nest."""
    where = f"speculator.drafters[{index}]"
    values: dict[str, Any] = dict(section)
    name = values.pop("method", None)
    if not isinstance(name, str):
        raise RecipeError(where, "no method", "a section with the key method", "Write a method's name.")
    registry.find_method(name, f"{where}.method")
    method = registry.method(name)
    known = {f.name: f for f in fields(method.Config)}
    if any(f.metadata.get(SECTIONS) for f in known.values()):
        raise RecipeError(f"{where}.method", repr(name), "a drafter, not a list of them", "List its drafters here.")
    if unknown := sorted(set(values) - set(known)):
        todo = f"Remove it; {name} has {', '.join(known) or 'no keys'}."
        raise RecipeError(f"{where}.{unknown[0]}", "an unknown key", f"the keys of {name}", todo)
    required = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [n for n in required if n not in values]:
        raise RecipeError(where, "no value", f"the key {missing[0]}", "Add it.")
    return method, method.Config(**values)


class HybridMethod(Method):
    """The speculation method of a `HybridConfig`."""

    name = "hybrid"
    Config = HybridConfig

    def target_outputs(self, config: HybridConfig) -> TargetOutputs:
        needs = [method.target_outputs(part) for method, part in config.parts]
        layers = [outputs.hidden_layers for outputs in needs if outputs.hidden_layers]
        if any(other != layers[0] for other in layers[1:]):
            got, todo = "two drafters that read different layers of the target", "Leave one of the drafters out."
            raise RecipeError("speculator.drafters", got, "the same layers", todo)
        return TargetOutputs(any(outputs.hidden for outputs in needs), layers[0] if layers else ())

    def graph_jobs(self, config: HybridConfig) -> tuple[GraphJob, ...]:
        return tuple(job for method, part in config.parts for job in method.graph_jobs(part))

    def allows_tokenizer_mismatch(self, config: HybridConfig) -> bool:
        return any(method.allows_tokenizer_mismatch(part) for method, part in config.parts)

    def host_ms(self, config: HybridConfig) -> float:
        return sum(method.host_ms(part) for method, part in config.parts)

    def make_proposer(
        self, config: HybridConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> HybridProposer:
        drafters = []
        for method, part in config.parts:
            names = [job.name for job in method.graph_jobs(part) if job.name in engines or not job.is_optional]
            own = {name: engines[name] for name in names}
            proposer, costs = method.make_proposer(part, own, context), None
            if names:
                per_run = max(engine.spec.num_drafts for engine in own.values())
                known = [context.costs[name] for name in names if name in context.costs]
                costs = DrafterCosts(known, per_run, has_caches=bool(proposer.caches))
            drafters.append(Drafter(proposer, costs))
        return HybridProposer(drafters, context, has_trees=config.draft_bounds.has_tree)
