# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that a request chooses: those that are low-rank changes of linears alone, and their stacked factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speccompile.checkpoints.lora import CONFIG, LoraAdapter, digests_from_lora, find_lora, open_lora
from speccompile.core.jobs import GraphJob
from speccompile.errors import CheckpointError

_TODO = "Merge it into a bundle of its own (target.lora), or train the adapter without it."
_MERGED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_ALONE = "a change of rank r of linear layers alone, chosen by request"


@dataclass(frozen=True)
class Factors:
    """Factors of all adapters for one linear; number 0 is no adapter."""

    a: np.ndarray  # [adapters + 1, rank, in] float32
    b: np.ndarray  # [adapters + 1, rank, out] float32, scaled
    file: str  # of the first adapter that has some, for messages


def open_adapters(job: GraphJob) -> tuple[LoraAdapter, ...]:
    """Opens the adapters of a job. Raises CheckpointError: one has more than low-rank changes of linears."""
    opened = tuple(open_lora(folder) for _, folder in job.adapters)
    for adapter in opened:
        _check_low_rank(adapter)
    return opened


def _check_low_rank(adapter: LoraAdapter) -> None:
    if adapter.config.get("fan_in_fan_out"):
        where = f"{adapter.folder / CONFIG} (fan_in_fan_out)"
        raise CheckpointError(where, "true", _ALONE, _TODO)
    if adapter.replaced:
        where = f"{adapter.file} ({next(iter(adapter.replaced))})"
        raise CheckpointError(where, "a whole parameter (modules_to_save, bias)", _ALONE, _TODO)
    for change in adapter.changes.values():
        kinds = {"DoRA": change.magnitude, "lora_bias": change.bias, "an embedding": change.is_embedding or None}
        got = next((kind for kind, value in kinds.items() if value is not None), None)
        if got is not None:
            raise CheckpointError(f"{adapter.file} ({change.module})", got, _ALONE, _TODO)


def stack_factors(adapters: Sequence[LoraAdapter]) -> dict[str, Factors]:
    """Returns the factors of all adapters by module; lower ranks end with zeros, and number 0 is zeros."""
    made: dict[str, Factors] = {}
    for module in sorted({name for adapter in adapters for name in adapter.changes}):
        held = [(number, one, one.changes[module]) for number, one in enumerate(adapters, 1) if module in one.changes]
        rank, (num_out, num_in) = max(change.rank for *_, change in held), held[0][2].shape
        a, b = (np.zeros((len(adapters) + 1, rank, width), np.float32) for width in (num_in, num_out))
        for number, adapter, change in held:
            adapter.expect_shape(module, change.shape, (num_out, num_in))
            first, second = (adapter.array(key) for key in change.factors)
            a[number, : change.rank], b[number, : change.rank] = first, np.float32(change.scale) * second.T
        made[module] = Factors(a, b, held[0][1].file)
    return made


def bytes_of_factors(job: GraphJob) -> int:
    """Predicts the float32 bytes of a job's factors in a graph; parts of a merged linear have ranks of their own."""
    adapters, merged = open_adapters(job), dict[str, list[tuple[int, int, int]]]()
    for module in {name for adapter in adapters for name in adapter.changes}:
        held = [adapter.changes[module] for adapter in adapters if module in adapter.changes]
        parent, _, end = module.rpartition(".")
        merged.setdefault(f"{parent}.{_MERGED.get(end, end)}", []).append((max(c.rank for c in held), *held[0].shape))
    sizes = (sum(rank for rank, *_ in rows) * (sum(out for _, out, _ in rows) + rows[0][2]) for rows in merged.values())
    return 4 * (len(adapters) + 1) * sum(sizes)


def digests_of_adapters(job: GraphJob) -> dict[str, str]:
    """Returns the SHA-256 of the adapters' files, by "adapters/", number and name."""
    found: dict[str, str] = {}
    for number, (_, folder) in enumerate(job.adapters, 1):
        digests = digests_from_lora(find_lora(folder))
        found |= {f"adapters/{number}/{name}": digest for name, digest in digests.items()}
    return found
