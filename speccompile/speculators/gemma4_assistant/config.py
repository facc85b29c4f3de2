# SPDX-License-Identifier: Apache-2.0
"""Drafting with Gemma 4's assistant: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from speccompile.core.jobs import GraphJob, MethodContext, TargetOutputs
from speccompile.core.proposer import Proposer
from speccompile.core.protocols import Engine, Outputs, TokenSequence
from speccompile.core.registry import Method
from speccompile.core.specs import TARGET_LENGTHS
from speccompile.drafting.heads import HeadsProposer
from speccompile.drafting.heads_config import HeadsFields

HEADS = "heads"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.gemma4_assistant.checkpoint:AssistantSource"


@dataclass(frozen=True)
class Gemma4AssistantConfig(HeadsFields):
    """The assistant of a Gemma 4 target, as it is published beside the target.

    Args:
        model: checkpoint folder or hub id of the assistant.
    """

    model: str


class Gemma4AssistantMethod(Method):
    """The speculation method of a `Gemma4AssistantConfig`."""

    name = "gemma4_assistant"
    Config = Gemma4AssistantConfig
    formats = "speccompile.speculators.gemma4_assistant.checkpoint:FORMATS"
    vllm_names = ("gemma4_mtp",)

    def target_outputs(self, config: Gemma4AssistantConfig) -> TargetOutputs:
        return TargetOutputs(hidden=True)

    def graph_jobs(self, config: Gemma4AssistantConfig) -> tuple[GraphJob, ...]:
        return (GraphJob(HEADS, config.model, config.quantization, SOURCE, config.form_options(), config.config),)

    def make_proposer(
        self, config: Gemma4AssistantConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> Proposer:
        return config.make_proposer(engines[HEADS], HEADS, context, AssistantProposer)


class AssistantProposer(HeadsProposer):
    """A `HeadsProposer`. While drafts are made the target has read the tokens before the root, and no more."""

    def feeds_of(self, sequences: Sequence[TokenSequence]) -> Outputs:
        lengths = [
            max(len(sequence.tokens) - 1, 1) for sequence in sequences
        ]  # without a row there is no state, and no draft
        return {TARGET_LENGTHS: np.array(lengths, dtype=np.int64)}
