# SPDX-License-Identifier: Apache-2.0
"""Token ids that a checkpoint's configs name: where a text begins and ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccompile.checkpoints.checkpoint import MAX_SIZE
from speccompile.checkpoints.text_towers import text_config
from speccompile.common.json_reader import read_json_object, shown, whole_number
from speccompile.errors import CheckpointError


def special_tokens(source: Path) -> tuple[list[int], int | None]:
    """Returns (end-of-sequence ids, beginning-of-sequence id) of generation_config.json, else of config.json.

    Raises:
        CheckpointError: one of them is not a JSON object, or has other values than token ids there.
    """
    eos: list[int] = []
    bos: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = source / name
        if path.exists():
            data = text_config(read_json_object(path, CheckpointError, "Download the file again."))
            eos = eos if data.get("eos_token_id") is None else token_ids(path, data, "eos_token_id")
            bos = bos if data.get("bos_token_id") is None else token_ids(path, data, "bos_token_id")
    return eos, bos[0] if bos else None


def token_ids(path: Path, config: Mapping[str, Any], key: str) -> list[int]:
    """Returns the token ids of a key of a config, given as one number or as a list; [] for null.

    Raises:
        CheckpointError: another value.
    """
    given = config.get(key)
    rows = given if isinstance(given, list) else [] if given is None else [given]
    ids = [whole_number(row, 0, MAX_SIZE) for row in rows]
    found = [i for i in ids if i is not None]
    if len(found) != len(ids):
        expected = "a token id, or a list of them"
        raise CheckpointError(f"{path} ({key})", shown(given), expected, "Correct it, or download the file again.")
    return found
