# SPDX-License-Identifier: Apache-2.0
"""Number of cache rows of a step: few distinct values, none much larger than needed."""

from __future__ import annotations


def bucket_rows(rows: int, max_rows: int) -> int:
    """Returns the rows of the view for `rows`: multiples of 128, from 1024 on of an eighth of the next power of two."""
    step = 128 if rows <= 1024 else max(128, 1 << (rows - 1).bit_length() - 3)
    return min(-(-rows // step) * step, max_rows)
