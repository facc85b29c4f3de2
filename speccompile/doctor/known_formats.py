# SPDX-License-Identifier: Apache-2.0
"""Speculators that are recognised but not supported yet, so that they get a precise error. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from speccompile.doctor.layouts import lookup


@dataclass(frozen=True)
class KnownFormat:
    """A layout that is recognised by name only."""

    name: str
    label: str
    marks: tuple[str, ...] = ()
    config_marks: tuple[str, ...] = ()
    config_values: tuple[tuple[str, tuple[str, ...]], ...] = ()


KNOWN = (
    KnownFormat("mimo", "MiMo: layers of multi-token prediction in a list of their own", (r"^model\.mtp_layers\.",)),
    KnownFormat(
        "hydra",
        "Hydra: heads that depend on each other's tokens",
        (r"^hydra_mlp\.", r"^hydra_lm_head\.", r"^hydra_head\."),
        ("hydra_num_heads",),
    ),
    KnownFormat(
        "redrafter",
        "ReDrafter: a recurrent drafter",
        (r"(^|\.)rnn_[uw](\.|$)", r"^lm_head\.\d+\.linear\."),
        (),
        (("model_type", ("redrafter", "recurrent_drafting")),),
    ),
)


def known_format(config: Mapping[str, Any], keys: Iterable[str]) -> KnownFormat | None:
    """Returns the layout of a checkpoint that is not supported yet; None when it is none of these."""
    names = list(keys)
    for known in KNOWN:
        if any(config.get(key) is not None for key in known.config_marks):
            return known
        if any(lookup(config, key) in values for key, values in known.config_values):
            return known
        if any(re.search(mark, key) for mark in known.marks for key in names):
            return known
    return None
