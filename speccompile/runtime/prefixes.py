# SPDX-License-Identifier: Apache-2.0
"""Kept caches of finished requests by slot, and the one that shares the longest prefix with a new prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

MIN_SHARED = 16  # tokens; reading fewer is as fast as moving a cache
_BLOCK = 64  # tokens compared at once: slices of lists compare fast


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the common prefix of two sequences."""
    most = min(len(first), len(second))
    for start in range(0, most, _BLOCK):
        end = min(start + _BLOCK, most)
        if first[start:end] != second[start:end]:
            return next(i for i in range(start, end) if first[i] != second[i])
    return most


def best_match(
    prompt: Sequence[int],
    held: Iterable[tuple[int, Sequence[int]]],
    reusable: Callable[[int, int], int] = lambda slot, num: num,
) -> tuple[int, int]:
    """Returns the slot that shares the longest prefix with a prompt.

    Args:
        reusable: of a slot and a number of its first tokens: how many of them a sequence can go on from.

    Returns:
        The slot index and the number of tokens; (-1, 0) where none shares at least `MIN_SHARED`. The prompt's last two
        tokens are never shared: the root is not in a cache, and the state of the token before it must be computed.
    """
    best, most, start = -1, MIN_SHARED - 1, prompt[:MIN_SHARED]
    for slot, tokens in held:
        if tokens[:MIN_SHARED] == start:
            num = reusable(slot, min(num_shared(prompt, tokens), len(prompt) - 2))
            if num > most:
                best, most = slot, num
    return (best, most) if best >= 0 else (-1, 0)


class Kept:
    """Caches of finished requests by slot, the least recently used first."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}  # in the order of their last use

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, slot: int) -> bool:
        return slot in self._tokens

    def items(self) -> Iterable[tuple[int, list[int]]]:
        """Returns slot indices with the tokens whose rows are in the target's cache."""
        return self._tokens.items()

    def put(self, slot: int, tokens: list[int]) -> None:
        self._tokens[slot] = tokens

    def drop(self, slot: int) -> list[int]:
        return self._tokens.pop(slot)

    def use(self, slot: int) -> None:
        self._tokens[slot] = self._tokens.pop(slot)

    def rename(self, source: int, dest: int) -> None:
        """Records that the cache of slot `source` was moved to `dest`; its age stays the same."""
        self._tokens = {dest if slot == source else slot: tokens for slot, tokens in self._tokens.items()}

    def oldest(self) -> int:
        return next(iter(self._tokens))

    def clear(self) -> None:
        self._tokens.clear()
