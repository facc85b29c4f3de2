# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers: transformers' logits, and the same bits however a text is cut into steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.core.dims import ModelDims
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from speccompile.passes.base import run_pipeline
from speccompile.passes.pipelines import PACKED, onnxruntime_table
from tests.export.families import VOCAB
from tests.export.harness import Decoder, chain_parents, logits_of, lowered, make_checkpoint, with_fused_attention
from tests.export.hybrids import HYBRIDS

# Of the largest logit. Sums in another order differ by 1e-6, by 6e-5 after a node whose normed rows are nearly zero.
MAX_RELATIVE_DIFFERENCE = 1e-4
MAX_SEQ_LEN = 40
Exported = tuple[Any, ir.Model, ModelDims]


@pytest.fixture(scope="module", params=sorted(HYBRIDS))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """transformers' model, its neutral graph and its sizes."""
    from speccompile.export.decoder import export_decoder

    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(HYBRIDS[request.param], folder)
    return model, *export_decoder(folder, max_seq_len=MAX_SEQ_LEN)


def chain_step(
    decoder: Decoder, rows: Sequence[Sequence[int]], sure: Sequence[int], kept: Sequence[int]
) -> list[np.ndarray]:
    """One step with a chain for each slot, padded on the right; the logits of the real nodes of each slot.

    Args:
        decoder: runs it.
        rows: tokens of each slot.
        sure: nodes that are applied at once.
        kept: tokens that stay in the history afterwards.
    """
    width = max(map(len, rows))
    tokens = np.array([[*row, *([0] * (width - len(row)))] for row in rows], np.int64)
    parents = np.array([chain_parents(len(row), width) for row in rows])
    scored = np.tile(np.arange(width), (len(rows), 1))
    logits = decoder.step(tokens, parents, scored, sure)["logits"]
    for slot, row in enumerate(rows):
        decoder.history[slot] = [*decoder.history[slot], *row[: kept[slot]]]
    return [logits[slot, : len(row)] for slot, row in enumerate(rows)]


def texts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


# Attention without a norm of queries and keys, or without rope.
ATTENTION_OPS = {"granitemoehybrid": "RotaryQkvAttention", "nemotron_h": "QkvAttention"}
NUM_PACKED = {"qwen3_5_text": 13, "granitemoehybrid": 9, "nemotron_h": 11, "lfm2": 9}  # routers stay in float32


def compiled(graph: ir.Model, dims: ModelDims) -> list[Decoder]:
    """The graph under the reference evaluator; under ONNX Runtime lowered, with fused attention, with kernels."""
    fused = with_fused_attention(graph)
    sizes = {"dims": dims, "batch": 2, "max_seq": MAX_SEQ_LEN}
    return [
        Decoder(graph, **sizes),
        Decoder(lowered(graph), **sizes),
        Decoder(fused, **sizes),
        Decoder(fused, **sizes, has_kernels=True),
    ]


def test_logits_equal_transformers(exported):
    """A ragged prefill in two chunks, single steps, drafts of which some are accepted, and a step after them."""
    model, graph, dims = exported
    rng = np.random.default_rng(0)

    def tokens(*counts: int) -> list[list[int]]:
        return [rng.integers(3, VOCAB, n).tolist() for n in counts]

    steps = [
        (tokens(7, 3), (7, 3), (7, 3)),
        (tokens(2, 6), (2, 6), (2, 6)),
        (tokens(1, 1), (1, 1), (1, 1)),
        (tokens(4, 5), (0, 0), (2, 5)),
        (tokens(3, 1), (0, 0), (1, 1)),
        (tokens(1, 4), (1, 0), (1, 1)),
        (tokens(2, 2), (2, 2), (2, 2)),
    ]
    wanted = cache(lambda *sequence: logits_of(model, sequence))
    for decoder in compiled(graph, dims):
        for rows, sure, kept in steps:
            before = [list(history) for history in decoder.history]
            logits = chain_step(decoder, rows, sure, kept)
            for slot, row in enumerate(rows):
                for node in range(len(row)):
                    expected = wanted(*before[slot], *row[: node + 1])
                    difference = np.abs(logits[slot][node] - expected).max() / np.abs(expected).max()
                    assert difference < MAX_RELATIVE_DIFFERENCE, (rows, slot, node)


def run_whole(decoder: Decoder, texts: Sequence[Sequence[int]], size: int, drafts: bool) -> list[np.ndarray]:
    """The logits of two texts in steps of `size` tokens, applied at once or, as drafts, one step later."""
    found: list[list[np.ndarray]] = [[], []]
    for start in range(0, len(texts[0]), size):
        rows = [text[start : start + size] for text in texts]
        counts = [len(row) for row in rows]
        for slot, logits in enumerate(chain_step(decoder, rows, [0, 0] if drafts else counts, counts)):
            found[slot].append(logits)
    return [np.concatenate(rows) for rows in found]


@pytest.mark.parametrize("has_kernels", [False, True])
def test_steps_of_any_size_have_the_bits_of_single_steps(exported, has_kernels):
    _, graph, dims = exported
    loaded = Decoder(with_fused_attention(graph), dims, 2, MAX_SEQ_LEN, has_kernels=has_kernels)
    texts = texts_of(1, 24, 24)

    def run(size: int, drafts: bool) -> tuple[list[np.ndarray], Decoder]:
        """Returns the logits, and the decoder after one more step, so that it has applied all drafts."""
        decoder = loaded.fresh()
        logits = run_whole(decoder, texts, size, drafts)
        chain_step(decoder, [[5], [6]], [1, 1], [0, 0])
        return logits, decoder

    single, last = run(1, False)
    for size, drafts in ((1, True), (2, True), (3, True), (8, True), (4, False), (24, False)):
        logits, decoder = run(size, drafts)
        for slot in range(2):
            np.testing.assert_array_equal(logits[slot], single[slot])
        for name, held in last.states.items():
            if name.startswith("state."):
                np.testing.assert_array_equal(decoder.states[name], held)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_a_rejected_draft_leaves_no_trace(exported, has_kernels):
    """After any number of accepted nodes the next step has the bits of a fresh prefill, in a ragged batch."""
    _, graph, dims = exported
    loaded = Decoder(with_fused_attention(graph), dims, 2, MAX_SEQ_LEN, has_kernels=has_kernels)
    texts = texts_of(2, 9, 5)
    drafts, after = texts_of(3, 6, 4), texts_of(4, 3, 3)

    def fresh(prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        decoder = loaded.fresh()
        counts = [len(prompt) for prompt in prompts]
        chain_step(decoder, prompts, counts, counts)
        return chain_step(decoder, after, (0, 0), (0, 0))

    for accepted in ((1, 4), (2, 3), (3, 1), (5, 2), (6, 4)):
        decoder = loaded.fresh()
        chain_step(decoder, texts, (9, 5), (9, 5))
        chain_step(decoder, drafts, (0, 0), accepted)
        got = chain_step(decoder, after, (0, 0), (0, 0))
        prompts = [[*text, *draft[:n]] for text, draft, n in zip(texts, drafts, accepted, strict=True)]
        for slot, expected in enumerate(fresh(prompts)):
            np.testing.assert_array_equal(got[slot], expected)
        # The step that was scored is not kept: it can be run again.
        for slot, again in enumerate(chain_step(decoder, after, (0, 0), (0, 0))):
            np.testing.assert_array_equal(got[slot], again)


TREES = np.array([[-1, 0, 0, 2, 1, 2, 5], [-1, 0, 0, 0, 3, -1, -1]])  # parents; the second one is padded
PATHS = ([0, 2, 5, 6], [0, 3, 4])  # none is the first nodes


@pytest.mark.parametrize("has_kernels", [False, True])
def test_a_path_of_a_tree_is_the_chain_of_its_tokens(exported, has_kernels):
    """Scored, and after it was accepted: in bits with our kernels, whose attention adds in one order."""
    _, graph, dims = exported
    loaded = Decoder(with_fused_attention(graph), dims, 2, MAX_SEQ_LEN, has_kernels=has_kernels)
    texts, after = texts_of(5, 9, 5), texts_of(6, 3, 3)
    tokens, scored = np.array(texts_of(7, 7, 7)), np.tile(np.arange(7), (2, 1))

    def prompted() -> Decoder:
        decoder = loaded.fresh()
        chain_step(decoder, texts, (9, 5), (9, 5))
        return decoder

    trees, chains = prompted(), prompted()
    drafts = [tokens[slot, path].tolist() for slot, path in enumerate(PATHS)]
    logits = trees.step(tokens, TREES, scored, [0, 0])["logits"]
    wanted = chain_step(chains, drafts, (0, 0), (4, 3))
    keep_paths(trees, drafts)
    pairs = [(logits[slot, path], wanted[slot]) for slot, path in enumerate(PATHS)]
    for rows, sure in ((after, (0, 0)), (texts, (9, 5))):  # the second one after the first was not accepted
        pairs += zip(chain_step(trees, rows, sure, (0, 0)), chain_step(chains, rows, sure, (0, 0)), strict=True)
    for got, chain in pairs:
        if has_kernels:
            np.testing.assert_array_equal(got, chain)
        else:
            np.testing.assert_allclose(got, chain, rtol=0, atol=MAX_RELATIVE_DIFFERENCE * np.abs(chain).max())


def keep_paths(decoder: Decoder, drafts: Sequence[Sequence[int]]) -> None:
    """Moves the cache rows and the pending rows of PATHS to the front, as engines do."""
    for slot, path in enumerate(PATHS):
        first = len(decoder.history[slot])
        for held in decoder.caches.values():
            held[slot, :, first : first + len(path)] = held[slot][:, [first + node for node in path]]
        for name, held in decoder.states.items():
            begin = {"pending": 0, "conv_rows": held.shape[1] - decoder.max_pending}.get(name.partition(".")[0])
            if begin is not None:
                held[slot, begin : begin + len(path)] = held[slot, [begin + node for node in path]]
        decoder.history[slot] = [*decoder.history[slot], *drafts[slot]]


def test_softplus():
    import torch

    from speccompile.export.delta_layers import softplus

    x = torch.cat((torch.linspace(-80, 80, 20001), torch.randn(4000)))
    exact = torch.nn.functional.softplus(x.double(), threshold=100)
    assert float((softplus(x) / exact - 1).abs().max()) < 5e-7


def test_wide_heads_keep_the_epsilon_of_their_norm(tmp_path):
    """Over 128 columns the mean's epsilon is below 1e-8: as a scalar it is lost in the trace, and a zero row is NaN."""
    from speccompile.export.decoder import export_decoder

    width = 128
    config = {**HYBRIDS["qwen3.5"], "linear_key_head_dim": width, "num_hidden_layers": 1}
    make_checkpoint({**config, "layer_types": ["linear_attention"]}, tmp_path)
    graph, _ = export_decoder(tmp_path, max_seq_len=16)
    norms = [node for node in graph.graph if node.op_type == "RMSNormalization"]
    over_heads = [node.attributes["epsilon"].as_float() for node in norms if tuple(node.inputs[1].shape) == (width,)]
    assert over_heads == pytest.approx([1e-6 / width] * 2)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_compiled_graph_has_our_kernels_ops(exported, quantization):
    """One attention op a layer, with the norm and rope that it has; every dense linear is packed."""
    _, graph, dims = exported
    spec = replace(decoder_spec("target", dims, max_pending=8), max_rows=MAX_SEQ_LEN)
    work = graph.clone()
    run_pipeline(work, onnxruntime_table(verified_spec(spec), quantization, PACKED))
    ops = Counter(node.op_type for node in work.graph)
    attention = ATTENTION_OPS.get(dims.model_type, "NormRotaryQkvAttention")
    assert ops[attention] == len(dims.attention_layers) and not ops["CachedAttention"]
    assert ops["ConvRows"] == len(dims.recurrent_layers)
    assert ops["GatedDelta"] == (0 if dims.model_type == "lfm2" else len(dims.recurrent_layers))
    # One product for all projections of a layer's input, one for its output; the LM head.
    packed = sum(count for name, count in ops.items() if "PackedLinear" in name)
    if dims.model_type in NUM_PACKED:
        assert packed == NUM_PACKED[dims.model_type]
    else:
        assert packed >= 2 * dims.num_layers + 1
    if dims.model_type in NUM_PACKED and not any("ExpertLinear" in name for name in ops):
        assert not ops["MatMul"]
