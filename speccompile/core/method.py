# SPDX-License-Identifier: Apache-2.0
"""The base class of all speculation methods, as the build, the doctor, the training and the runtime see them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine

SECTIONS = "sections"  # metadata of a field of a `Config` that lists speculator sections


class Method:
    """A speculation method: what it needs of the build, and its proposer.

    A method is found by name: a line in `core.registry.METHODS`, or an entry point of an installed package. Importing
    it needs no torch; parts that do are named by import strings.

    Attributes:
        Config: frozen dataclass, the recipe's `speculator:` fields besides `method`; its property `draft_bounds`
            (`core.jobs.DraftBounds`) says how much they let it draft.
        TrainingConfig: frozen dataclass, the recipe's `training.heads`; None: it cannot be trained.
        formats: import string of a tuple of `doctor.layouts.Format`, the layouts of its checkpoints; empty: none.
        vllm_keys: fields of `Config` by the keys that vLLM has for them, besides those that methods share.
        default_section: import string of a function: a target's folder -> the section with which it drafts without
            another model, or None; empty: it is never chosen by default.
    """

    name: str  # in recipes
    Config: type[Any]
    TrainingConfig: type[Any] | None = None
    formats: str = ""
    trainer: str = ""  # import string of its `training_contract.Trainer`; empty: it cannot be trained
    vllm_names: tuple[str, ...] = ()  # what vLLM calls it, besides `name`
    vllm_keys: Mapping[str, str] = MappingProxyType({})
    default_section: str = ""
    takes_models: bool = False  # its `model` is any language model

    def target_outputs(self, config: Any) -> TargetOutputs:
        """Returns what it reads of the target: by default nothing besides the verdicts."""
        return TargetOutputs()

    def graph_jobs(self, config: Any) -> tuple[GraphJob, ...]:
        """Returns the graphs it needs besides the target: by default none."""
        return ()

    def allows_tokenizer_mismatch(self, config: Any) -> bool:
        """Whether graphs with a tokenizer of their own are built although it is not the target's: by default not."""
        return False

    def make_proposer(self, config: Any, engines: Mapping[str, Engine], context: MethodContext) -> Proposer:
        """Returns the proposer over loaded engines. Raises RecipeError: an engine was built for less than that."""
        raise NotImplementedError(f"{type(self).__name__}.make_proposer")
