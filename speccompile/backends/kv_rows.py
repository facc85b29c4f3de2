# SPDX-License-Identifier: Apache-2.0
"""How many cache rows a step works on: few distinct numbers, none much larger than what is needed."""

from __future__ import annotations


def bucket_rows(rows: int, max_rows: int) -> int:
    """Rows of the view that holds `rows`: steps of 128, from 1024 on of an eighth of the next power of two."""
    step = 128 if rows <= 1024 else max(128, 1 << (rows - 1).bit_length() - 3)
    return min(-(-rows // step) * step, max_rows)
