# SPDX-License-Identifier: Apache-2.0
"""Drafting by a small model, one more decoder graph: recipe fields, and what the build and the runtime ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from speccompile.common.parameters import HeadsTraining, declared, parameter
from speccompile.core.jobs import DecoderOptions, GraphJob, MethodContext
from speccompile.core.protocols import Engine
from speccompile.core.registry import Method
from speccompile.drafting.kv_cache import DraftCache
from speccompile.drafting.mask_drafts import MaskDraftCache
from speccompile.drafting.proposer import DraftProposer
from speccompile.drafting.tree_config import CachedDraftFields
from speccompile.errors import RecipeError
from speccompile.graph_kinds.decoder import DraftVocabFields, VocabCandidateOptions

DRAFT = "draft"  # the graph's name in the bundle


@dataclass(frozen=True)
class DraftModelConfig(DraftVocabFields, CachedDraftFields):
    """A draft model.

    Args:
        model: checkpoint folder or hub id of the draft.
        allow_tokenizer_mismatch: build although draft and target have different tokenizers.
        parallel_drafting: draft all tokens of a path in one run, from mask tokens, as PARD trains it; `auto`: where the
            draft's config.json names its mask token (`pard_token`).
        min_confidence: draft no further after a path whose probability in the draft is below this; with a number and
            `num_draft_tokens: auto` nothing else ends a chain. `auto`: the measured costs decide.
        config: folder with the draft's config.json, where the hub cannot be reached; for random weights.
        lora: LoRA adapter in PEFT's layout, folder or hub id, merged into the draft's weights.
    """

    model: str
    max_draft_tokens: int = parameter(10, ge=1, le=64)
    min_confidence: float | Literal["auto"] = parameter("auto", ge=0, lt=1, words=("auto",))
    confidence_odds: float = field(default=2.7, kw_only=True, metadata=declared(ge=0.02, le=50))
    allow_tokenizer_mismatch: bool = False
    config: str | None = None
    parallel_drafting: bool | Literal["auto"] = field(default="auto", kw_only=True)
    lora: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_vocab()

    @property
    def leaves_length(self) -> bool:
        return super().leaves_length and (self.tree == "auto" or self.min_confidence == "auto")

    @property
    def max_length(self) -> int:
        return self.max_draft_tokens if self.num_draft_tokens == "auto" else self.num_draft_tokens

    @property
    def min_path(self) -> float:
        return 0.0 if self.min_confidence == "auto" else self.min_confidence


@dataclass(frozen=True)
class DraftModelTraining(HeadsTraining):
    """Sizes and settings of the training."""

    hidden_size: int = parameter(192, ge=1)
    num_layers: int = parameter(2, ge=1)
    num_heads: int = parameter(4, ge=1)
    num_kv_heads: int = parameter(2, ge=1)
    head_dim: int = parameter(0, ge=0)  # of a head; 0: hidden_size / num_heads
    intermediate_size: int = parameter(512, ge=1)
    chain: int = parameter(4, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads or (not self.head_dim and self.hidden_size % self.num_heads):
            got = f"{self.num_heads} heads, {self.num_kv_heads} key heads, hidden size {self.hidden_size}"
            raise RecipeError("training.heads.num_heads", got, "sizes that divide one another", "Correct the recipe.")


class DraftModelMethod(Method):
    """The speculation method of a `DraftModelConfig`."""

    name = "draft_model"
    Config = DraftModelConfig
    vllm_keys = MappingProxyType({"use_heterogeneous_vocab": "allow_tokenizer_mismatch"})
    takes_models = True
    TrainingConfig = DraftModelTraining
    formats = "speccompile.speculators.draft_model.checkpoint:FORMATS"
    trainer = "speccompile.speculators.draft_model.trainer:DraftModelTrainer"

    def graph_jobs(self, config: DraftModelConfig) -> tuple[GraphJob, ...]:
        is_parallel = config.parallel_drafting
        candidates = VocabCandidateOptions(
            config.candidates_needed,
            config.has_probs,
            max_parallel=config.depth_asked if is_parallel else 1,
            is_parallel=is_parallel is True,
            vocab=config.draft_vocab,
        )
        options = DecoderOptions(candidates=candidates)
        job = GraphJob(
            DRAFT, config.model, config.quantization, options=options, config=config.config, lora=config.lora
        )
        return (job,)

    def allows_tokenizer_mismatch(self, config: DraftModelConfig) -> bool:
        return config.allow_tokenizer_mismatch

    def make_proposer(
        self, config: DraftModelConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftProposer:
        engine, max_rows = engines[DRAFT], context.seq_lens.get(DRAFT, context.max_seq_len)
        most, block = context.max_draft_nodes, engine.spec.num_drafts
        if engine.spec.mask_token is None or not config.parallel_drafting:
            if config.parallel_drafting is True:
                got, todo = "a draft built without a mask token", "Build a bundle whose recipe says so."
                raise RecipeError("speculator.parallel_drafting", got, "a draft that reads masks", todo)
            rows = DraftCache(engine, max_rows, most)
            return DraftProposer(rows, *config.make_drafts(rows, engine, DRAFT, context))
        masked = MaskDraftCache(engine, max_rows, most + 1, min(config.depth_asked, block))
        return DraftProposer(masked, *config.make_drafts(masked, engine, DRAFT, context, block, has_masks=True))
