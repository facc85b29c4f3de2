# SPDX-License-Identifier: Apache-2.0
"""API keys: where they come from, and what is refused as a key.

A blank key would accept requests without a key, and an unset variable or an empty secret easily gives one. So a blank
key stops the server before it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from speccompile.errors import RuntimeFault

VARIABLE = "SPECCOMPILE_API_KEY"
_BETWEEN = re.compile(r"[\s,]+")


def check_keys(keys: Iterable[str], where: str = "api_keys") -> None:
    """Refuses what cannot be the key of a request.

    Args:
        keys: each with neither white space nor commas, which part keys in the environment.

    Raises:
        RuntimeFault: one of them is blank, or may be several.
    """
    for key in keys:
        if not key.strip():
            todo = "Give a key, or leave the option away to ask for none. Is a variable or a secret empty?"
            raise RuntimeFault(where, "a blank API key", "a key that is not empty", todo)
        if _BETWEEN.search(key):
            todo = "Give each key by itself: --api-key ONE --api-key OTHER."
            raise RuntimeFault(where, "white space or a comma in an API key", "one key without them", todo)


def keys_from_environment(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the keys in `SPECCOMPILE_API_KEY`, between white space and commas; none where it is not set.

    Raises:
        RuntimeFault: it is set and holds no key.
    """
    text = environment.get(VARIABLE)
    if text is None:
        return ()
    keys = tuple(key for key in _BETWEEN.split(text) if key)
    if not keys:
        todo = f"Give one or more keys, or unset {VARIABLE} to ask for none. Is a secret empty?"
        raise RuntimeFault(VARIABLE, "no API key", "keys between spaces or commas", todo)
    return keys
