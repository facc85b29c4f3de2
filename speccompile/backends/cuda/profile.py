# SPDX-License-Identifier: Apache-2.0
"""The shapes that a compiled step accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """One optimization profile: the shapes that it accepts."""

    index: int
    bounds: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def find_fault(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Returns None where all shapes fit, otherwise the first that does not."""
        for name, shape in shapes.items():
            low, high = self.bounds[name]
            if len(shape) != len(low) or any(not a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
                return f"{name} {list(shape)} (profile {self.index} takes {list(low)} to {list(high)})"
        return None
