# SPDX-License-Identifier: Apache-2.0
"""Drafts that read masks, a head of two products, and stored tables, with one fault each; see `tests.doctor.traps`."""

from pathlib import Path

import torch

from tests.checkpoints import checkpoint_lab as lab
from tests.doctor.traps import Trap, config, put, tensors


def untrained_embeddings(folder: Path) -> None:
    """Gives a drafter embeddings that are not those of the target beside it."""
    lab.write_tables(folder.parent / "target")
    lab.edit(folder, lambda held: held.update({"embed_tokens.weight": torch.eye(lab.VOCAB, lab.HIDDEN).bfloat16()}))


MASK_TRAPS: dict[str, Trap] = {
    "a head of two products without its first": Trap(
        lab.eagle3_low_rank,
        "keys.missing",
        r"\(lm_head_down\.weight\): got no such key; expected BF16 \[4, 16\]",
        tensors(lambda held: held.pop("lm_head_down.weight")),
    ),
    "a head of two products of different ranks": Trap(
        lab.eagle3_low_rank,
        "keys.shape",
        r"lm_head_down\.weight\): got \[3, 16\]; expected \[4, 16\] = head_rank x hidden",
        put("lm_head_down.weight", lambda t: t[:3].contiguous()),
    ),
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
    "masks without their states": Trap(
        lab.peagle_ours,
        "keys.missing",
        r"\(mask_hidden\): got no such key; expected BF16 \[1, 1, 48\]",
        tensors(lambda held: held.pop("mask_hidden")),
    ),
    "a mask token alone, without states": Trap(
        lab.eagle3_ours, "keys.missing", r"\(mask_hidden\): got no such key", config(mask_token_id=3)
    ),
    "states of masks of another target": Trap(
        lab.peagle_ours,
        "keys.shape",
        r"mask_hidden\): got \[1, 1, 32\]; expected \[1, 1, 48\]",
        put("mask_hidden", lambda t: t[:, :, :32].contiguous()),
    ),
    "no token of masks": Trap(
        lab.peagle_speculators,
        "eagle3.mask",
        r"\(ptd_token_id or pard_token or mask_token_id\): got nothing; expected the token of masks",
        config(mask_token_id=None),
    ),
    "neither token nor states of masks": Trap(
        lab.peagle_speculators,
        "eagle3.mask",
        "got nothing; expected the token of masks",
        lambda folder: (config(mask_token_id=None)(folder), tensors(lambda held: held.pop("mask_hidden"))(folder)),
    ),
    "a mask of P-EAGLE beyond the embedding": Trap(
        lab.peagle_ours, "eagle3.mask", "got 40; expected a token below 40", config(ptd_token_id=40)
    ),
    "a mask of P-EAGLE as text": Trap(
        lab.peagle_numbered,
        "config.sizes",
        r"\(pard_token\): got '<mask>'",
        config(pard_token="<mask>"),
        also=("eagle3.mask",),
    ),
    "a window without the kinds of layers": Trap(
        lab.eagle3_ours, "eagle3.windows", "layer_types None and sliding_window 8", config(sliding_window=8)
    ),
    "kinds of layers of another model": Trap(
        lab.eagle3_ours,
        "eagle3.windows",
        "expected 1 of full_attention and sliding_attention",
        config(layer_types=["sliding_attention"] * 6, sliding_window=8),
    ),
    "layers that slide without a window": Trap(
        lab.eagle3_ours, "eagle3.windows", "sliding_window None", config(layer_types=["sliding_attention"])
    ),
    "P-EAGLE by another algorithm": Trap(
        lab.peagle_speculators,
        "eagle3.config",
        "got 'eagle3'; expected 'peagle'",
        config(speculators_config__algorithm="eagle3"),
    ),
    "embeddings that were never trained": Trap(
        lab.eagle3_ours,
        "target.tables",
        r"\(embed_tokens\.weight\): got a table unlike the target's embeddings: mean cosine of their rows -?0\.0",
        untrained_embeddings,
        severity="warning",
    ),
}
