# SPDX-License-Identifier: Apache-2.0
"""Block drafters with one fault each; see `tests.doctor.traps`."""

from __future__ import annotations

import torch

from tests.checkpoints import checkpoint_lab as lab
from tests.doctor.traps import Trap, config, put, tensors

DFLASH_TRAPS: dict[str, Trap] = {
    "layers counted from one": Trap(
        lab.dflash_one,
        "dflash.layers",
        r"got \[2, 3, 4\]; expected \[1, 2, 3\], the published choice for this depth. .*aux_hidden_state_layer_ids",
        config(dflash_config__target_layer_ids=[2, 3, 4]),
        severity="warning",
    ),
    "layers counted from zero": Trap(
        lab.dflash_speculators,
        "dflash.layers",
        r"got \[1, 2, 3\]; expected \[2, 3, 4\], the published choice for this depth. .*target_layer_ids",
        config(aux_hidden_state_layer_ids=[1, 2, 3]),
        severity="warning",
    ),
    "a layer after the last": Trap(
        lab.dflash_one,
        "dflash.layers",
        r"got \[1, 3, 6\]; expected numbers from 0 to 5: outputs of these layers",
        config(dflash_config__target_layer_ids=[1, 3, 6]),
    ),
    "the embeddings as a layer": Trap(
        lab.dflash_speculators,
        "dflash.layers",
        "expected numbers from 1 to 6: states before these layers",
        config(aux_hidden_state_layer_ids=[0, 3, 6]),
    ),
    "fewer layers than fc reads": Trap(
        lab.dflash_one,
        "dflash.layers",
        "expected 3 different layers, as fc reads",
        config(dflash_config__target_layer_ids=[1, 3]),
    ),
    "no layers": Trap(
        lab.dflash_one,
        "dflash.layers",
        "got nothing; expected 3 layers of the target",
        config(dflash_config__target_layer_ids=None),
        severity="warning",
    ),
    "a multiplier left out": Trap(
        lab.dflash_two,
        "dflash.numbers",
        "got nothing; expected how its logits are scaled: the target's config has logits_scaling",
        target={"logits_scaling": 8.0},
        severity="warning",
    ),
    "two block sizes": Trap(
        lab.dflash_one, "dflash.numbers", "got 16 at the top and 4 in dflash_config", config(block_size=16)
    ),
    "a mask outside the vocabulary": Trap(
        lab.dflash_one, "dflash.numbers", "got 40; expected a token below 40", config(dflash_config__mask_token_id=40)
    ),
    "codebooks with a suffix": Trap(
        lab.dflash_two,
        "dflash.codebooks",
        "got codebooks stored as `.weight`",
        tensors(lambda held: held.update({f"{k}.weight": held.pop(k) for k in list(held) if k.endswith("_codebook")})),
        severity="warning",
    ),
    "one codebook": Trap(
        lab.dflash_two,
        "keys.missing",
        "candidate_selector.successor_codebook",
        tensors(lambda held: held.pop("candidate_selector.successor_codebook")),
    ),
    "a head with a state": Trap(
        lab.dflash_one,
        "dflash.variant",
        "got domino: a head whose state",
        config(dflash_config__projector_type="domino"),
    ),
    "a gated Markov head": Trap(
        lab.dspark,
        "dflash.variant",
        "got a gated Markov head",
        put("markov_head.gate_proj.weight", torch.ones(4, 20, dtype=torch.bfloat16)),
        also=("keys.extra",),
    ),
    "a reduced vocabulary without its map": Trap(
        lab.dflash_speculators,
        "dflash.tables",
        "no such key; expected the d2t of 12 draft tokens",
        tensors(lambda held: [held.pop("d2t"), held.pop("t2d")]),
    ),
    "a map of token ids": Trap(
        lab.dflash_speculators,
        "dflash.tables",
        "got offsets that lead to",
        put("d2t", lambda t: t + torch.arange(len(t)) * 2),
    ),
}
