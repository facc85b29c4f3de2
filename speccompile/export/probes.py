# SPDX-License-Identifier: Apache-2.0
"""What the probes of several methods share: chains over a whole text, and weights under another convention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from speccompile.doctor.doctor import canonical_from_case
from speccompile.doctor.layouts import Case
from speccompile.doctor.probe import Convention
from speccompile.errors import CheckpointError
from speccompile.export.chains import Advance, Mask, chain_features, register

Weights = dict[str, torch.Tensor]
HALVES, INTERLEAVED = "halves", "interleaved"  # which dims of a head a rotary position turns together
AFTER, BEFORE = "after_norm", "before_norm"  # which state of the target is read
_ROTATED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight")


def read_case(case: Case) -> tuple[dict[str, Any], Weights]:
    """Returns config and weights of a checkpoint in our layout, floats in float32."""
    config, tensors = canonical_from_case(case)
    return config, {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}


@torch.no_grad()
def chain_drafts(
    advance: Advance,
    token_of: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    features: torch.Tensor,
    roots: torch.Tensor,
    num: int,
    mask: Mask | None = None,
) -> torch.Tensor:
    """Returns the drafts of chains over a text, [starts, num]; each draft follows the text's own tokens.

    Up to the first draft that is not the text's token they are those of drafting step by step. `advance`, `features`
    and `mask` are as in `chain_features`.

    Args:
        token_of: own features [1, starts, hidden] -> the token with the highest score [1, starts].
        tokens: [1, nodes] int64.
        roots: [starts] int64, positions of 1 or more.
    """
    register()
    own = chain_features(advance, tokens, features, (roots - 1)[None], num, mask)
    return torch.cat([token_of(features) for features in own]).T


def rotary_convention(case: Case) -> Convention:
    todo = "Reorder the rows of its q_proj and k_proj: {value} is what they are stored for."
    return Convention("rotary", str(case.folder), HALVES, (INTERLEAVED,), todo)


def base_convention(case: Case, config: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[Convention, ...]:
    """Returns the convention of the base of rotary positions: as stated, as the target's, or Llama's default."""
    stated = rope_base(config)
    others = tuple(v for v in dict.fromkeys((rope_base(target), 10000.0)) if v != stated)
    todo = "Correct rope_theta in config.json: {value}."
    return (Convention("rope_theta", case.where_in_config("rope_theta"), stated, others, todo),) if others else ()


def rope_base(config: Mapping[str, Any]) -> float:
    """Returns the base of rotary positions of a config, as its layers take it; Llama's default where it gives none."""
    held = config.get("rope_parameters")
    nested = held.get("rope_theta") if isinstance(held, Mapping) else None
    return float(nested or config.get("rope_theta") or 10000.0)


def with_base(config: Mapping[str, Any], base: float) -> dict[str, Any]:
    held = config.get("rope_parameters")
    nested = {"rope_parameters": {**held, "rope_theta": base}} if isinstance(held, Mapping) else {}
    return {**config, "rope_theta": base, **nested}


def halved_heads(weights: Mapping[str, torch.Tensor], head_dim: int) -> Weights:
    """Returns weights whose heads turn dims 2i and 2i + 1 together as those that turn i and i + head_dim / 2."""
    order = torch.arange(head_dim).view(-1, 2).T.flatten()

    def reordered(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)

    return {name: reordered(t) if name.endswith(_ROTATED) else t for name, t in weights.items()}


def swapped_inputs(weights: Mapping[str, torch.Tensor], names: Iterable[str]) -> Weights:
    """Returns weights whose matrices `names` read the halves of their input in the other order."""
    return {**weights, **{n: torch.cat(weights[n].chunk(2, 1)[::-1], 1) for n in names}}


def ids_as_offsets(weights: Mapping[str, torch.Tensor]) -> Weights:
    """Returns weights whose `d2t` holds offsets in the place of token ids."""
    ids = weights["d2t"].to(torch.int64)
    return {**weights, "d2t": ids - torch.arange(len(ids))}


def other_layers(stated: Sequence[int], num_layers: int, published: Sequence[int] | None) -> tuple[list[int], ...]:
    """Returns what a list of the target's layers, from 0, could have meant: one more or less, reversed, `published`."""
    held = list(stated)
    choices = [[i - 1 for i in held], [i + 1 for i in held], held[::-1], list(published or held)]
    return tuple(c for i, c in enumerate(choices) if c != held and c not in choices[:i] and _is_in(c, num_layers))


def _is_in(layers: Sequence[int], num_layers: int) -> bool:
    return min(layers) >= 0 and max(layers) < num_layers


def hidden_convention(case: Case) -> Convention:
    """Returns the convention of the target's state that heads read: after its final norm, or before."""
    todo = "Its heads read the state {value}, which their builds do not: train or convert them for the other."
    return Convention("target_hidden", str(case.folder), AFTER, (BEFORE,), todo)


def hidden_of(text: Any, name: str, num_layers: int) -> torch.Tensor:
    """Returns the target's states [1, nodes, hidden]: `AFTER` or `BEFORE` its final norm."""
    held: torch.Tensor = text.hidden if name == AFTER else text.layers[num_layers - 1]
    return held.float()


def check_windows(folder: Path, windows: Sequence[int] | None, most: int) -> None:
    """Refuses attention that does not see all of a text. Raises CheckpointError: a window is below `most` tokens."""
    if windows is not None and any(0 < window < most for window in windows):
        got, expected = f"windows of {list(windows)} tokens", f"at least the {most} tokens of the probe's longest text"
        raise CheckpointError(f"{folder / 'config.json'} (sliding_window)", got, expected, "Give shorter --prompts.")
