# SPDX-License-Identifier: Apache-2.0
"""Recipe fields of plain decoding: none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Plain decoding has nothing to configure."""

    leaves_length = False
