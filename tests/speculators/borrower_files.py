# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of drafts on the tiny target's caches, trained on its texts in a second or two each."""

from pathlib import Path

import torch
from torch.nn import functional

from speccompile.export.heads_file import write_heads
from speccompile.speculators.early_exit.model import ExitHead, ExitSizes
from speccompile.speculators.glide.config import GlideDims
from speccompile.speculators.glide.model import Glide
from tests.speculators.eagle_lab import HIDDEN, VOCAB, texts_of

NUM_EXIT_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 4, 2, 8  # heads of `eagle_lab.write_target`


def write_exit(folder: Path, target: Path) -> None:
    """Returns a head after the fourth of seven layers, briefly trained on the target's texts."""
    from safetensors.torch import load_file

    texts, states = texts_of(target)
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    stream = torch.cat([held[NUM_EXIT_LAYERS][0, :-1] for held in states])
    labels = torch.cat([text[0, 1:] for text in texts])
    torch.manual_seed(7)
    head = ExitHead(ExitSizes(HIDDEN, VOCAB, NUM_EXIT_LAYERS, 96))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        functional.cross_entropy(head(stream) @ lm_head.T, labels).backward()
        optimizer.step()
    folder.mkdir()
    write_heads(folder, head.sizes.config_from_sizes(), head.state_dict())


def write_glide(folder: Path, target: Path) -> None:
    """Returns a drafter with a table of successors; its attention has a small influence.

    As wide as the vocabulary, its embeddings can be one-hot and its LM head a table of successors.
    """
    texts, _ = texts_of(target)
    counts = torch.zeros(VOCAB, VOCAB)
    for text in texts:
        for token, follows in zip(text[0, :-1].tolist(), text[0, 1:].tolist(), strict=True):
            counts[follows, token] += 1
    sizes = GlideDims(
        "glide", VOCAB, VOCAB, 1, 2, 1, 20, 0, intermediate_size=48, target_hidden_size=HIDDEN,
        target_heads=NUM_HEADS, target_kv_heads=NUM_KV_HEADS, target_head_dim=HEAD_DIM, is_tied=False,
    )  # fmt: skip
    torch.manual_seed(8)
    drafter = Glide(sizes)
    with torch.no_grad():
        drafter.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        drafter.model.layers[0].cross_attn.o_proj.weight.normal_(0, 0.02)
    tensors = {**drafter.state_dict(), "lm_head.weight": counts / (1 + counts.sum(0))}
    folder.mkdir()
    write_heads(folder, sizes.config(), tensors)
