# SPDX-License-Identifier: Apache-2.0
"""Drafts that read masks with one fault each; see `tests.doctor.traps`."""

from __future__ import annotations

from tests.checkpoints import checkpoint_lab as lab
from tests.doctor.traps import Trap, config, tensors

MASK_TRAPS: dict[str, Trap] = {
    "a mask token beyond the embedding": Trap(
        lab.pard, "pard.token", r"\(pard_token\): got 40; expected a token below 40", config(pard_token=40)
    ),
    "a mask token as text": Trap(
        lab.pard, "pard.token", r"got '<mask>'; expected a token", config(pard_token="<mask>")
    ),
    "a draft model without a layer": Trap(
        lab.pard,
        "pard.model",
        "layer",
        tensors(lambda held: [held.pop(key) for key in list(held) if ".layers.3." in key]),
    ),
}
