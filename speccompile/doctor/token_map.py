# SPDX-License-Identifier: Apache-2.0
"""A draft vocabulary in vLLM's layouts: `token_map` holds the target's token of each draft token. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from speccompile.doctor.findings import Finding
from speccompile.doctor.layouts import Case, Check, Row, Size, Sizes, finding

TOKEN_MAP = "token_map"
MAP_ROW = Row(TOKEN_MAP, ("num_mapped",), dtypes=("I64", "I32"), need="is_reduced")
IGNORED_MAP = rf"^{TOKEN_MAP}$"  # vLLM reads none where the vocabulary is whole
_HEADS = re.compile(r"^(lm_head|\d+\.\d+)\.weight$")  # in the canonical layouts


def map_sizes(lm_head: str, *keys: str) -> tuple[Size, ...]:
    stored = ((lm_head, 0), (r"^lm_head\.weight$", 0))
    return Size("num_mapped", keys, default=0), Size("head_rows", stored=stored, default=0)


def derive_map(sizes: Sizes) -> None:
    vocab, rows = sizes["vocab"], sizes.pop("head_rows")
    num = sizes["num_mapped"] = sizes["num_mapped"] or vocab
    sizes["is_reduced"] = int(num != vocab)
    sizes["draft_vocab"] = vocab if rows == vocab else num  # of a whole head the map's rows are taken


def cut_heads(config: Mapping[str, Any], tensors: dict[str, Any]) -> None:
    if (tokens := tensors.get(TOKEN_MAP)) is not None:
        whole = [name for name, t in tensors.items() if _HEADS.search(name) and len(t) != len(tokens)]
        tensors |= {name: tensors[name][tokens.long()] for name in whole}


def _check_map(case: Case) -> Iterator[Finding]:
    key, num, vocab = case.key_of(TOKEN_MAP), case.sizes["num_mapped"], case.sizes["vocab"]
    if key is None or vocab is None or case.files.headers[key].shape != (num,):
        return
    tokens = np.unique(case.files.array(key))
    if len(tokens) != num or tokens[0] < 0 or tokens[-1] >= vocab:
        got = f"a map to {len(tokens)} tokens from {tokens[0]} to {tokens[-1]}"
        todo = "The map is another model's: fetch the folder again."
        yield finding("error", case.where(key), got, f"{num} different tokens of the {vocab}", todo)


CHECK_MAP = Check("token_map", _check_map)
