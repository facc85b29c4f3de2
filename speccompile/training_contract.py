# SPDX-License-Identifier: Apache-2.0
"""What the training of a speculator reads from the target, and what it returns: the protocols of a trainer.

Tensors are torch's; they are typed as Any, as importing this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from speccompile.errors import RecipeError

Tensor = Any


@dataclass(frozen=True)
class TargetNeeds:
    """Which outputs of the target a trainable reads."""

    hidden: bool = False
    layers: tuple[int, ...] = ()  # residual streams after these decoder layers
    caches: bool = False  # K and V of the last decoder layer


@dataclass(frozen=True)
class TargetParts:
    """What a trainable may start from: parts of the frozen target."""

    config: Mapping[str, Any]
    folder: Path
    embeddings: Tensor  # [vocab, hidden] float32
    lm_head: Tensor  # [vocab, hidden] float32
    token_counts: Tensor  # [vocab] int64, how often the training text has each token
    norm: Tensor = None  # [hidden] float32, weight of the norm before the LM head; None where it is no RMS norm
    layers: tuple[Mapping[str, Tensor], ...] = ()  # of each decoder layer by their names in it, float32


@dataclass(frozen=True)
class TrainingBatch:
    """Windows of text with the target's outputs; row p of each tensor belongs to the token at position p."""

    tokens: Tensor  # [batch, nodes] int64
    dist_tokens: Tensor  # [batch, nodes, kept] int64, the most probable tokens after each position, the best first
    dist_probs: Tensor  # [batch, nodes, kept] float32, their probabilities; the tail of the distribution is left out
    is_label: Tensor = None  # [batch, nodes] bool, whether the distribution after a position is learned; None: all are
    hidden: Tensor = None  # [batch, nodes, hidden], where wanted
    layers: Mapping[int, Tensor] = field(default_factory=dict)  # [batch, nodes, hidden] by layer, where wanted
    k_cache: Tensor = None  # [batch, kv_heads, nodes, head_dim], where wanted: keys with their positions rotated in
    v_cache: Tensor = None
    seed: int = 0  # of the trainable's own draws for this batch


@dataclass(frozen=True)
class Selection:
    """Scores of pairs for drafters with independent slots, added to the logits of the most probable candidates.

    Args:
        score: (states [drafts, width], before [drafts], candidates [drafts, num] of the draft vocabulary) -> [drafts,
            num].
    """

    num: int
    before: Tensor  # [rows, depth] int64, the token of the text before each draft
    score: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Drafted:
    """Teacher-forced drafts: inputs of the vocabulary projection, and the position whose distribution is the label.

    Args:
        labels: [rows, depth] int64, position in the flattened [batch * nodes] whose distribution is the label, or -1.
        d2t: [draft_vocab] int64, the target's token of each draft token; None where the vocabularies are one.
        selection: scores of pairs, whose cross-entropy over the candidates is added, and by which a draft is chosen.
    """

    states: Tensor  # [rows, depth, width]; a row is a start, its depths are the drafts of the chain from there
    labels: Tensor
    projections: tuple[Tensor, ...]  # one [draft_vocab, width] for each depth; the same tensor where depths share it
    d2t: Tensor = None
    selection: Selection | None = None


class Trainable(Protocol):
    """A torch module whose parameters that require gradients are trained.

    Teacher forcing (`forward`) computes the same numbers as drafting step by step (`draft`).
    """

    num_positions: int  # drafts of a chain that are trained

    def __call__(self, batch: TrainingBatch) -> Drafted:
        """Returns the teacher-forced drafts of a batch."""
        ...

    def draft(self, batch: TrainingBatch, num: int) -> Tensor:
        """Returns a greedy chain [num] int64 after one sequence, whose `tokens` end with the root, without rows."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the public checkpoint layout: config.json and model.safetensors in bfloat16."""
        ...


class Trainer(Protocol):
    """How a method's speculator is trained. `config` is the method's `TrainingConfig`.

    A trainer with a true attribute `reads_sizes` takes all sizes from the checkpoint `start`.
    """

    def needs(self, config: Any, target: Mapping[str, Any]) -> TargetNeeds:
        """Returns what it reads from a target with this config.json."""
        ...

    def make(self, config: Any, parts: TargetParts, start: Path | None) -> Any:
        """Returns a `Trainable`, which is a torch module, with new weights or those of the checkpoint `start`.

        Raises:
            RecipeError: the sizes do not go with the target's.
            CheckpointError: `start` does not hold what `config` says.
        """
        ...


def layer_sizes(target: Mapping[str, Any], hidden: int, inner: int) -> dict[str, int]:
    """Returns the sizes of a layer like the target's, by their keys in config.json.

    Args:
        inner: width of the MLP; 0: the target's, or 4 times its hidden size where it states none.
    """
    heads = int(target["num_attention_heads"])
    return {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": inner or int(target.get("intermediate_size") or 4 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": int(target.get("num_key_value_heads") or heads),
        "head_dim": int(target.get("head_dim") or hidden // heads),
    }


def chosen_mask(asked: int, target: Mapping[str, Any], vocab: int) -> int:
    """Returns the token of masks: `asked`, or for -1 the target's padding. Raises RecipeError: there is none."""
    mask = asked if asked >= 0 else target.get("pad_token_id")
    if not isinstance(mask, int) or not 0 <= mask < vocab:
        got, expected = f"{mask}", f"a token below {vocab} that texts do not have"
        raise RecipeError("training.heads.mask_token_id", got, expected, "Name one, such as a reserved token.")
    return mask
