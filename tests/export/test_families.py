# SPDX-License-Identifier: Apache-2.0
"""Every family's graph computes transformers' logits, node by node, over prefill, a tree and a rollback."""

from typing import Any

import numpy as np
import pytest

from speccompile.passes.edit import attentions_of
from tests.export.families import CONFIGS, VOCAB
from tests.export.harness import (
    Decoder,
    chain_parents,
    logits_after,
    lowered,
    make_checkpoint,
    paths_of,
    with_fused_attention,
)

# Logits are of order 1 (std 1.4 to 3.5); float32 sums of two implementations differ by 2e-6 to 1.2e-5 here.
MAX_ABS_DIFFERENCE = 2e-5
MAX_SEQ_LEN = 24
# A trace costs by layers. One has all kinds of layers of these; those with more are traced with two or three, and the
# sweep has two of every class.
ONE_LAYER = {
    *("llama2", "llama-linear", "llama-yarn", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3", "phi3-longrope"),
    *("granite", "olmo2", "starcoder2", "gpt-neox", "qwen3-moe", "mixtral"),
}


# Families whose Q, K and V are not columns of one product, or are scaled or normalised otherwise before the heads, or
# that have sinks.
UNFUSED = {"falcon", "gpt-neox", "gptj", "gpt-oss", "olmo2", "opt"}


def compare(decoder: Decoder, compiled: list[Decoder], model: Any, tokens: np.ndarray, parents: np.ndarray) -> float:
    """Run one step; the largest difference of a real node's logits from transformers on its path.

    The neutral graph and the compiled ones are all compared.
    """
    batch, nodes = tokens.shape
    # Not all nodes are scored, and not in order.
    scored = np.tile(np.arange(nodes)[::-1][: nodes - 1], (batch, 1)).copy()
    scored[:, -1] = 0
    logits = decoder.step(tokens, parents, scored)["logits"]
    every = [logits]
    for other in compiled:
        other.history = decoder.history
        every.append(other.step(tokens, parents, scored)["logits"])
    assert logits.shape == (batch, nodes - 1, VOCAB) and logits.dtype == np.float32
    paths = [paths_of(decoder.history[slot], tokens[slot], parents[slot]) for slot in range(batch)]
    each = [(slot, i) for slot in range(batch) for i, n in enumerate(scored[slot]) if n == 0 or parents[slot, n] >= 0]
    expected = logits_after(model, [paths[slot][scored[slot, index]] for slot, index in each])  # of no padding
    slots, columns = np.array(each).T
    return max(float(np.abs(got[slots, columns] - expected).max()) for got in every)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name, tmp_path):
    from speccompile.export.decoder import export_decoder

    config = {**CONFIGS[name], "num_hidden_layers": 1} if name in ONE_LAYER else CONFIGS[name]
    model = make_checkpoint(config, tmp_path)
    graph, dims = export_decoder(tmp_path, max_seq_len=MAX_SEQ_LEN)
    fused = with_fused_attention(graph)
    assert bool(attentions_of(fused)) == (name in UNFUSED)
    sizes = {"dims": dims, "batch": 2, "max_seq": MAX_SEQ_LEN}
    decoder = Decoder(graph, **sizes)
    compiled = [Decoder(g, **sizes) for g in (lowered(graph), fused)] + [Decoder(fused, **sizes, has_kernels=True)]
    rng = np.random.default_rng(0)

    # A ragged prefill: 7 and 3 tokens.
    tokens = rng.integers(3, VOCAB, (2, 7))
    assert (
        compare(decoder, compiled, model, tokens, np.array([chain_parents(7, 7), chain_parents(3, 7)]))
        < MAX_ABS_DIFFERENCE
    )
    decoder.history = [tokens[0].tolist(), tokens[1, :3].tolist()]

    # A tree for each slot; the keys of its own branch only.
    trees = np.array([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 1, 0, 4]])
    assert compare(decoder, compiled, model, rng.integers(3, VOCAB, (2, 6)), trees) < MAX_ABS_DIFFERENCE

    # Rolled back by 3 and 1: other tokens over the old rows.
    decoder.history = [decoder.history[0][:-3], decoder.history[1][:-1]]
    assert (
        compare(decoder, compiled, model, rng.integers(3, VOCAB, (2, 4)), np.array([[-1, 0, 1, 2]] * 2))
        < MAX_ABS_DIFFERENCE
    )
