# SPDX-License-Identifier: Apache-2.0
"""Block drafters with one fault each; see `tests.doctor.traps`."""

import torch

from tests.checkpoints import checkpoint_lab as lab
from tests.doctor.traps import Trap, config, put, tensors

RANKS = "lilicorr.rank_embedding"
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
    "a head of another kind": Trap(
        lab.dflash_one,
        "dflash.variant",
        "got other: a head of another kind; expected dflash, dspark, lilicorr or domino",
        config(dflash_config__projector_type="other"),
    ),
    "Domino without its keys": Trap(
        lab.dflash_one,
        "dflash.path",
        r"\(projector_type\): got domino; expected a DFlash drafter, as its keys say",
        config(dflash_config__projector_type="domino"),
    ),
    "Domino's keys in a DFlash drafter": Trap(
        lab.domino,
        "dflash.path",
        r"\(projector_type\): got a DFlash drafter; expected domino, as its keys say",
        config(dflash_config__projector_type=None),
    ),
    "Domino that does not say which token a row drafts": Trap(
        lab.domino,
        "dflash.path",
        r"\(shift_label\): got nothing; expected true or false",
        config(dflash_config__shift_label=None),
        severity="warning",
    ),
    "Domino that says it twice": Trap(
        lab.domino,
        "dflash.path",
        r"got True and False; expected the same: both say whether the root's row drafts",
        config(dflash_config__sample_from_anchor=False),
    ),
    "Domino without the number of plain slots": Trap(
        lab.domino,
        "dflash.path",
        r"\(pure_draft_prefix_len\): got nothing; expected how many first slots are not corrected, 0 to 3",
        config(dflash_config__pure_draft_prefix_len=None),
    ),
    "Domino with a table of its own": Trap(
        lab.domino,
        "dflash.path",
        r"\(lm_head.weight\): got a table of its own; expected none: paths are embedded as the target's tokens",
        put("lm_head.weight", torch.ones(lab.VOCAB, lab.HIDDEN, dtype=torch.bfloat16)),
    ),
    "Domino whose inner layer reads states alone": Trap(
        lab.domino,
        "keys.shape",
        r"embed_proj.0.weight\): got \[6, 10\]; expected \[6, 26\] = path_width x path_inputs",
        put("embed_proj.0.weight", lambda t: t[:, :10].clone()),
    ),
    "a gated Markov head": Trap(
        lab.dspark,
        "dflash.variant",
        "got a gated Markov head",
        put("markov_head.gate_proj.weight", torch.ones(4, 20, dtype=torch.bfloat16)),
        also=("keys.extra",),
    ),
    "LiLiCorr without the scale of its scores": Trap(
        lab.lilicorr,
        "dflash.corrector",
        r"\(lilicorr_logit_scale\): got nothing; expected a number, 1e-06 or more \(logit_scale\). Ask its author",
        config(dflash_config__lilicorr_logit_scale=None),
    ),
    "LiLiCorr with an endless MLP": Trap(
        lab.lilicorr,
        "dflash.corrector",
        r"\(lilicorr_mlp_ratio\): got inf; expected a number, 0.001 or more",
        config(dflash_config__lilicorr_mlp_ratio=float("inf")),
    ),
    "LiLiCorr without its least length": Trap(
        lab.lilicorr,
        "dflash.corrector",
        r"\(lilicorr_vector_eps\): got 0; expected a number, 1e-12 or more",
        config(dflash_config__lilicorr_vector_eps=0),
    ),
    "LiLiCorr with heads that do not divide it": Trap(
        lab.lilicorr,
        "dflash.corrector",
        r"\(lilicorr_num_heads\): got 5; expected a divisor of the width 12",
        config(dflash_config__lilicorr_num_heads=5),
        also=("keys.shape",),
    ),
    "LiLiCorr with an MLP of another width": Trap(
        lab.lilicorr,
        "dflash.corrector",
        r"\(lilicorr_mlp_ratio\): got 4.0; expected 1.5, as stored",
        config(dflash_config__lilicorr_mlp_ratio=4.0),
    ),
    "LiLiCorr's keys in a DFlash drafter": Trap(
        lab.lilicorr,
        "dflash.corrector",
        r"\(lilicorr_enabled\): got a DFlash drafter; expected LiLiCorr, as its keys say",
        config(dflash_config__lilicorr_enabled=False),
    ),
    "LiLiCorr without its keys": Trap(
        lab.lilicorr,
        "dflash.corrector",
        r"got LiLiCorr; expected a DFlash drafter, as its keys say",
        tensors(lambda held: [held.pop(k) for k in list(held) if k.startswith("lilicorr.")]),
    ),
    "LiLiCorr with a table of its own": Trap(
        lab.lilicorr,
        "dflash.corrector",
        r"\(embed_tokens.weight\): got a table of its own; expected none: candidates are the target's LM head's",
        put("embed_tokens.weight", torch.ones(lab.VOCAB, lab.HIDDEN, dtype=torch.bfloat16)),
    ),
    "LiLiCorr of a number of candidates that others refuse": Trap(
        lab.lilicorr,
        "dflash.corrector",
        r"\(lilicorr_candidate_topk\): got 6; expected a power of two up to 16",
        lambda folder: (
            lab.set_config(folder, dflash_config__lilicorr_candidate_topk=6),
            lab.edit(folder, lambda held: held.update({RANKS: held[RANKS][:, :, :, :6].clone().contiguous()})),
        ),
        severity="warning",
    ),
    "LiLiCorr of another block": Trap(
        lab.lilicorr,
        "keys.shape",
        r"lilicorr.slot_embedding\): got \[1, 1, 6, 1, 12\]; expected \[1, 1, 3, 1, 12\]",
        put("lilicorr.slot_embedding", lambda t: torch.cat((t, t), 2)),
    ),
    "LiLiCorr with slots from the root's": Trap(
        lab.lilicorr,
        "dflash.variant",
        "got True: a root's row that drafts beside LiLiCorr; expected slots after the root's",
        config(dflash_config__sample_from_anchor=True),
    ),
    "LiLiCorr with scaled logits": Trap(
        lab.lilicorr,
        "dflash.variant",
        "got 0.5: scaled logits beside LiLiCorr; expected the LM head's own logits",
        config(dflash_config__output_multiplier=0.5),
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
