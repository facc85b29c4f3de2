# SPDX-License-Identifier: Apache-2.0
"""Drafting with GLIDE: recipe fields, what the build and the runtime ask, and the rows of the drafter's own cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.common.parameters import HeadsTraining, parameter
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import PREFILL_CHUNK, CandidateOptions, GraphJob, MethodContext
from speccompile.core.protocols import Batch, Engine, Outputs, TokenSequence
from speccompile.core.registry import Method
from speccompile.core.specs import TARGET_LENGTHS, TOKENS, GraphSpec, cache_names
from speccompile.core.tree import Ints
from speccompile.drafting.kv_cache import DraftCache
from speccompile.drafting.proposer import DraftProposer
from speccompile.drafting.tree_config import CachedDraftFields
from speccompile.graph_kinds.borrowed import reading_spec
from speccompile.graph_kinds.decoder import decoder_spec

DRAFT = "draft"  # the graph's name in the bundle
SOURCE = "speccompile.speculators.glide.checkpoint:GlideSource"

PUBLISHED_THETA = 10000.0  # of the queries' positions, whatever the target's is


@dataclass(frozen=True)
class GlideDims(ModelDims):
    """Sizes of a drafter; the fields before are those of its self-attention, and `max_positions` is the target's."""

    intermediate_size: int = 0
    target_hidden_size: int = 0
    target_heads: int = 0  # query heads of the target, which the cross-attention has, too
    target_kv_heads: int = 0  # key heads of the target's caches
    target_head_dim: int = 0
    target_layer: int = 0  # layer of the target whose caches are read, from 0
    is_tied: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    target_rope_theta: float = PUBLISHED_THETA  # base of the positions in the target's caches

    def decoder_spec(self, name: str, target: ModelDims) -> GraphSpec:
        return reading_spec(decoder_spec(name, self), target, cache_names(self.target_layer))

    def config(self) -> dict[str, Any]:
        """Returns the config.json of a drafter of these sizes."""
        return {
            "architectures": ["GlideLlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.is_tied,
            "large_hidden_size": self.target_hidden_size,
            "large_num_attention_heads": self.target_heads,
            "large_head_dim": self.target_head_dim,
            "large_num_key_value_heads": self.target_kv_heads,
            "large_rope_theta": self.target_rope_theta,
        }


@dataclass(frozen=True)
class GlideConfig(CachedDraftFields):
    """A GLIDE drafter: a small decoder that also reads the cache of the target's last layer.

    Args:
        model: checkpoint folder or hub id of the drafter.
        config: folder with the drafter's config.json, where the hub cannot be reached; for random weights.
    """

    model: str
    config: str | None = None


@dataclass(frozen=True)
class GlideTraining(HeadsTraining):
    """Sizes of the training. Drafts of a `block` see the rows of the target's cache before its root."""

    num_layers: int = parameter(1, ge=1)
    intermediate_size: int = parameter(0, ge=0)  # of its MLPs; 0: the target's
    block: int = parameter(5, ge=1)


class GlideMethod(Method):
    """The speculation method of a `GlideConfig`."""

    name = "glide"
    Config = GlideConfig
    TrainingConfig = GlideTraining
    formats = "speccompile.speculators.glide.checkpoint:FORMATS"
    trainer = "speccompile.speculators.glide.trainer:GlideTrainer"

    def graph_jobs(self, config: GlideConfig) -> tuple[GraphJob, ...]:
        options = CandidateOptions(config.candidates_needed, config.has_probs)
        return (GraphJob(DRAFT, config.model, config.quantization, SOURCE, options, config.config),)

    def make_proposer(
        self, config: GlideConfig, engines: Mapping[str, Engine], context: MethodContext
    ) -> DraftProposer:
        engine, max_rows = engines[DRAFT], context.seq_lens.get(DRAFT, context.max_seq_len)
        rows = GlideRows(engine, max_rows, context.max_draft_nodes)
        return DraftProposer(rows, *config.make_drafts(rows, engine, DRAFT, context))


class GlideRows(DraftCache):
    """See `DraftCache`. Every run is told how many rows of the target's caches are in use.

    While drafts are made the target has read the tokens before the root, and no more.
    """

    catches_up = False

    def __init__(self, engine: Engine, max_seq_len: int, max_nodes: int) -> None:
        super().__init__(engine, max_seq_len, max_nodes)
        self._target_lengths: Ints = np.zeros(engine.max_slots, dtype=np.int64)

    def _run(self, feeds: dict[str, Any], first_slot: int = 0) -> Outputs:
        lengths = self._target_lengths[first_slot : first_slot + len(feeds[TOKENS])]
        return self.engine.run({**feeds, TARGET_LENGTHS: lengths}, first_slot)

    def start(self, slot: int) -> None:
        super().start(slot)
        self._target_lengths[slot] = 0

    def resume(self, slot: int, sequence: TokenSequence, num_rows: int) -> int:
        self._target_lengths[slot] = num_rows
        start = self.lengths[slot] = min(self.lengths[slot], num_rows)
        end = min(num_rows, self.max_seq_len)
        if end - start > PREFILL_CHUNK:
            return start
        self._read(slot, np.array(sequence.tokens[start:end], dtype=np.int64))
        return num_rows

    def prefill(self, slot: int, sequence: TokenSequence, tokens: Ints, start: int, outputs: Outputs) -> None:
        self._target_lengths[slot] = start + tokens.shape[1]
        super().prefill(slot, sequence, tokens, start, outputs)

    def room(self, slot: int, sequence: TokenSequence) -> int:
        return super().room(slot, sequence) if len(sequence.tokens) > 1 else -1

    def begin(self, batch: Batch, slots: Sequence[int], warp: Mapping[str, NDArray[Any]]) -> Outputs:
        self._target_lengths[: len(batch.sequences)] = [len(sequence.tokens) - 1 for sequence in batch.sequences]
        return super().begin(batch, slots, warp)
