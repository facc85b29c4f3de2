# SPDX-License-Identifier: Apache-2.0
"""Weights in a model's files that are no part of it: modules that draft its next tokens. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Of Qwen3-Next, Qwen3.5 and others: in a tree of their own beside the model.
_BESIDE = re.compile(r"^(model\.)?(mtp\.|mtp_layers\.)")
# Of DeepSeek-V3 and GLM: numbered as further layers, each with this projection.
_NUMBERED = re.compile(r"^(.*\blayers\.(\d+)\.)eh_proj\.weight$")


def extra_keys(keys: Iterable[str], num_layers: int) -> set[str]:
    """Returns the keys of drafting modules among those of a model's weights."""
    held = list(keys)
    found = (_NUMBERED.match(key) for key in held)
    prefixes = tuple(match[1] for match in found if match is not None and int(match[2]) >= num_layers)
    return {key for key in held if _BESIDE.match(key) or key.startswith(prefixes)}
