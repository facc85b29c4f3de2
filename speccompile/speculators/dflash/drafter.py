# SPDX-License-Identifier: Apache-2.0
"""How a drafter computes, by its config.json in z-lab's (canonical) layout; `dflash_config` comes first. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speccompile.checkpoints.checkpoint import MAX_SIZE
from speccompile.errors import CheckpointError

NESTED = "dflash_config"
SLIDING = "sliding_attention"
CORRECTED, DOMINO = "LiLiCorrDraftModel", "DominoDraftModel"  # in `architectures`
_TODO = "Complete or correct config.json."


def value_of(config: Mapping[str, Any], name: str) -> Any:
    """Returns a value of `dflash_config`, else of the top level; None where neither has one."""
    nested = config.get(NESTED)
    inner = nested.get(name) if isinstance(nested, Mapping) else None
    return config.get(name) if inner is None else inner


@dataclass(frozen=True)
class Corrector:
    """Layers over all candidates of a block (LiLiCorr), whose vectors give the scores of pairs."""

    num_candidates: int  # of a slot; each candidate's vector depends on all of them
    hidden_size: int  # of its layers; 0: the drafter's
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor_dim: int
    vector_eps: float
    logit_scale: float


# Keys of the config and the least values; none has a default, as most shapes and both last ones are nowhere else.
CORRECTOR_KEYS: dict[str, tuple[str, float]] = {
    "num_candidates": ("lilicorr_candidate_topk", 1),
    "hidden_size": ("lilicorr_hidden_size", 0),
    "num_layers": ("lilicorr_num_layers", 1),
    "num_heads": ("lilicorr_num_heads", 1),
    "mlp_ratio": ("lilicorr_mlp_ratio", 1e-3),
    "factor_dim": ("lilicorr_factor_dim", 1),
    "vector_eps": ("lilicorr_vector_eps", 1e-12),
    "logit_scale": ("lilicorr_logit_scale", 1e-6),
}
_REALS = ("mlp_ratio", "vector_eps", "logit_scale")


@dataclass(frozen=True)
class PathHead:
    """A recurrent state over the drafts of a path (Domino), which corrects the scores of the slot that follows."""

    state_size: int
    width: int
    num_plain: int


@dataclass(frozen=True)
class Drafter:
    """A drafter."""

    block_size: int  # rows of a block, the root's included
    mask_token_id: int
    windows: tuple[int, ...]  # of each layer's attention; 0 = none
    is_causal: tuple[bool, ...]  # whether rows of a block see the earlier rows alone, by layer
    starts_at_root: bool = False  # row i drafts position i + 1, not its own
    embedding_scale: float = 1.0
    multiplier: float = 1.0
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap); 0 = off
    taps: int = 0  # of the convolutions around attention and MLP; 0: there are none
    group_size: int = 16
    selector_rank: int = 0  # of the codebooks of predecessors and successors; 0: there are none
    markov_rank: int = 0  # of the tables of a Markov head; 0: there is none
    num_candidates: int = 0  # of a slot, as its config says; 0: it does not
    corrector: Corrector | None = None  # layers over the candidates; None: there are none
    path: PathHead | None = None  # state over the drafts of a path; None: there is none

    @property
    def is_paired(self) -> bool:
        return bool(self.selector_rank or self.markov_rank or self.corrector)

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.starts_at_root else self.block_size - 1

    def num_masks(self, num_drafts: int) -> int:
        """Returns how many masked rows a block of so many draft tokens has."""
        return num_drafts - self.starts_at_root


def drafter_from_config(where: str, config: Mapping[str, Any]) -> Drafter:
    """Returns how a drafter computes. Raises CheckpointError: a value is missing, wrong, or of another variant."""

    def number(name: str, default: float | None = None, least: float = 0, is_whole: bool = True) -> Any:
        given = value_of(config, name)
        value: Any = default if given is None else given
        is_right = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
        if not is_right or not least <= value <= MAX_SIZE:
            kind = f"a {'whole ' if is_whole else ''}number, {least} or more"
            raise CheckpointError(f"{where}/config.json ({name})", repr(given), kind, _TODO)
        return value

    refuse_variant(where, config)
    num_layers = int(config["num_hidden_layers"])
    kinds = layer_kinds(config, num_layers)
    window = window_of(config)
    stated = config.get("is_causal")
    corrector = None
    if is_corrected(config):
        rows = CORRECTOR_KEYS.items()
        corrector = Corrector(**{name: number(key, None, least, name not in _REALS) for name, (key, least) in rows})
        if (width := corrector.hidden_size or int(config["hidden_size"])) % corrector.num_heads:
            key, expected = CORRECTOR_KEYS["num_heads"][0], f"a divisor of the width {width}"
            raise CheckpointError(f"{where}/config.json ({key})", f"{corrector.num_heads}", expected, _TODO)
    path = None
    if has_path(config):
        sizes = (number("gru_hidden_dim", least=1), number("emb_dim", least=1))
        path = PathHead(*sizes, number("pure_draft_prefix_len", 0))
    return Drafter(
        block_size=number("block_size", least=2),
        mask_token_id=number("mask_token_id"),
        windows=tuple(window if kind == SLIDING else 0 for kind in kinds),
        is_causal=tuple(kind == SLIDING if stated is None else bool(stated) for kind in kinds),
        starts_at_root=bool(value_of(config, "sample_from_anchor")),
        embedding_scale=number("input_embedding_scale", 1.0, is_whole=False),
        multiplier=number("output_multiplier", 1.0, is_whole=False),
        softcap=number("final_logit_softcapping", 0.0, is_whole=False),
        taps=number("conv_kernel_size", 0),
        group_size=number("conv_group_size", 16, 1),
        selector_rank=number("selector_rank", 0),
        markov_rank=number("markov_rank", 0),
        num_candidates=corrector.num_candidates if corrector else number("selector_top_k", 0),
        corrector=corrector,
        path=path,
    )


def has_path(config: Mapping[str, Any]) -> bool:
    return value_of(config, "projector_type") == "domino" or config.get("architectures") == [DOMINO]


def is_dspark(config: Mapping[str, Any]) -> bool:
    """Whether a config in z-lab's layout is a DSpark drafter's: by its kind, its class or its Markov head."""
    named = "DSpark" in str(config.get("architectures")) or value_of(config, "projector_type") == "dspark"
    return named or value_of(config, "markov_rank") is not None


def published_layers(num_layers: int, num: int) -> tuple[int, ...]:
    """Returns the layers that released drafters read where a config names none: evenly spaced, from 0."""
    if num == 1:
        return (num_layers // 2,)
    return tuple(round(1 + k * (num_layers - 4) / (num - 1)) for k in range(num))


def is_corrected(config: Mapping[str, Any]) -> bool:
    """Whether a drafter has layers over its candidates: its config says so, or gives a value of theirs."""
    if (stated := value_of(config, "lilicorr_enabled")) is not None:
        return bool(stated)
    is_named = config.get("architectures") == [CORRECTED] or value_of(config, "projector_type") == "lilicorr"
    return is_named or any(value_of(config, key) is not None for key, _ in CORRECTOR_KEYS.values())


def layer_kinds(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    kinds = config.get("layer_types")
    return tuple(kinds[:num_layers]) if isinstance(kinds, (list, tuple)) else ("full_attention",) * num_layers


def window_of(config: Mapping[str, Any]) -> int:
    """Returns the window of sliding layers; 0 where it is off, as it is by default in the config of Qwen3."""
    is_qwen = str(config.get("model_type", "qwen3")).startswith("qwen")
    is_on = config.get("use_sliding_window", not is_qwen)
    return int(config.get("sliding_window") or 0) if is_on else 0


_VARIANTS = (
    ("attention_sink_bias", (None, False), "attention sinks", "heads without sinks"),
    ("attention_k_eq_v", (None, False), "layers of Gemma 4, whose V is their K", "layers as Qwen3 has them"),
    ("markov_head_type", (None, "vanilla"), "a Markov head with a state or a gate", "vanilla: a table alone"),
)


# Beside the heads of LiLiCorr and Domino, which read the target's own logits.
_BESIDE = (
    ("selector_rank", (None, 0), "a candidate selector", "one of them"),
    ("markov_rank", (None, 0), "a Markov head", "one of them"),
    ("output_multiplier", (None, 1.0), "scaled logits", "the LM head's own logits"),
    ("final_logit_softcapping", (None, 0), "capped logits", "the LM head's own logits"),
)
_SLOTS = ("sample_from_anchor", (None, False), "a root's row that drafts", "slots after the root's")
_KINDS = (None, "dflash", "dspark", "lilicorr", "domino")  # of `projector_type`


def refuse_variant(where: str, config: Mapping[str, Any]) -> None:
    """Refuses drafters that compute otherwise."""
    if (fault := variant_of(config)) is not None:
        name, got, expected = fault
        todo = "Use another drafter for this target, such as DFlash or DFlash 2."
        raise CheckpointError(f"{where}/config.json ({name})", got, expected, todo)


def variant_of(config: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Returns (key, what it says, what is built) of a variant that is not built; None where there is none."""
    if (kind := value_of(config, "projector_type")) not in _KINDS:
        return "projector_type", f"{kind}: a head of another kind", "dflash, dspark, lilicorr or domino"
    is_lilicorr, is_domino = is_corrected(config), has_path(config)
    if is_lilicorr and is_domino:
        return "projector_type", "Domino beside LiLiCorr", "one of them"
    head = "LiLiCorr" if is_lilicorr else "Domino"
    conflicts = (*(_BESIDE if is_lilicorr or is_domino else ()), *((_SLOTS,) if is_lilicorr else ()))
    for name, known, label, expected in (*_VARIANTS, *conflicts):
        if (value := value_of(config, name)) not in known:
            is_conflict = (name, known, label, expected) in conflicts
            return name, f"{value!r}: {label}{f' beside {head}' if is_conflict else ''}", expected
    if value_of(config, "markov_rank") and value_of(config, "selector_rank"):
        return "markov_rank", "a Markov head beside a candidate selector", "one of them"
    if conflicts and config.get("draft_vocab_size") not in (None, 0, config.get("vocab_size")):
        return "draft_vocab_size", f"{config['draft_vocab_size']} tokens beside {head}", "the target's vocabulary"
    return None
