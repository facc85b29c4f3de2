# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: transformers' logits with layers that share K and V; the same bits in chains, trees and single steps."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.checkpoints.checkpoint import check_checkpoint, read_dims
from speccompile.core.dims import LayerDims, ModelDims, dims_from_json, json_from_dims
from speccompile.errors import CheckpointError
from speccompile.graph_kinds.decoder import decoder_spec
from speccompile.ops.registry import attach_functions
from speccompile.passes.base import run_pipeline
from speccompile.passes.pipelines import PACKED, onnxruntime_table
from speccompile.recipe.predict import predict
from tests.export.families import GEMMA4, VOCAB
from tests.export.harness import Decoder, chain_parents, lowered, make_checkpoint, with_fused_attention
from tests.export.test_families import MAX_ABS_DIFFERENCE, compare

MAX_SEQ_LEN = 24
MAX_RELATIVE_DIFFERENCE = 1e-4
Exported = tuple[Any, ir.Model, ModelDims, Path]


@pytest.fixture(scope="module", params=sorted(GEMMA4))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """transformers' model, its neutral graph, its sizes and its folder."""
    from speccompile.export.decoder import export_decoder

    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(GEMMA4[request.param], folder)
    return model, *export_decoder(folder, max_seq_len=MAX_SEQ_LEN), folder


def test_logits_equal_transformers(exported):
    """A ragged prefill, a tree for each slot, and other tokens over their rows after a rollback."""
    model, graph, dims, _ = exported
    fused, sizes = with_fused_attention(graph), {"dims": dims, "batch": 2, "max_seq": MAX_SEQ_LEN}
    decoder = Decoder(graph, **sizes)
    compiled = [Decoder(g, **sizes) for g in (lowered(graph), fused)] + [Decoder(fused, **sizes, has_kernels=True)]
    rng = np.random.default_rng(0)

    def difference(parents: Sequence[Sequence[int]]) -> tuple[float, np.ndarray]:
        tokens = rng.integers(3, VOCAB, (2, len(parents[0])))
        return compare(decoder, compiled, model, tokens, np.array(parents)), tokens

    worst, tokens = difference([chain_parents(7, 7), chain_parents(3, 7)])
    assert worst < MAX_ABS_DIFFERENCE
    decoder.history = [tokens[0].tolist(), tokens[1, :3].tolist()]
    assert difference([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 1, 0, 4]])[0] < MAX_ABS_DIFFERENCE
    decoder.history = [decoder.history[0][:-3], decoder.history[1][:-1]]
    assert difference([[-1, 0, 1, 2]] * 2)[0] < MAX_ABS_DIFFERENCE


FORMS = [("none", "fp32"), ("none", PACKED), ("int8", PACKED), ("int4", PACKED)]


@pytest.mark.parametrize(("quantization", "form"), FORMS)
def test_paths_of_a_tree_and_chains_have_the_bits_of_single_steps(exported, quantization, form):
    """In every form that is built, with our kernels and, without them, by other nodes; after a rollback as well."""
    _, graph, dims, _ = exported
    work = graph.clone()
    spec = replace(decoder_spec("target", dims), max_rows=MAX_SEQ_LEN)
    run_pipeline(work, onnxruntime_table(spec, quantization, form))
    ops = Counter(node.op_type for node in work.graph)
    assert ops["SharedAttention"] == (len(dims.sources) if form == PACKED else 0)
    if form == PACKED:
        dense = sum(count for name, count in ops.items() if "PackedLinear" in name)
        assert dense >= 4 * dims.num_layers + 1
        assert sum(count for name, count in ops.items() if "ExpertLinear" in name) == (4 if "TopK" in ops else 0)
    attach_functions(work)
    tokens = np.random.default_rng(1).integers(3, VOCAB, (2, 9))

    def run(*steps: tuple[int, int, list[int]]) -> list[np.ndarray]:
        """Steps of (first token, end, parents); returns the logits of each."""
        decoder, logits = Decoder(work, dims, 2, MAX_SEQ_LEN, has_kernels=form == PACKED), []
        for start, end, parents in steps:
            decoder.history = [row[:start].tolist() for row in tokens]
            nodes = np.tile(np.arange(len(parents)), (2, 1))
            logits.append(decoder.step(tokens[:, start:end], np.array([parents] * 2), nodes)["logits"])
        return logits

    prompt, chain = (0, 5, chain_parents(5, 5)), (5, 9, chain_parents(4, 4))
    singles = [logits[:, 0] for logits in run(prompt, *((i, i + 1, [-1]) for i in range(5, 9)))[1:]]
    rejected = (5, 8, [-1, 0, 0])
    for steps in ((prompt, chain), (prompt, rejected, chain)):
        np.testing.assert_array_equal(run(*steps)[-1], np.stack(singles, 1))
    if form == PACKED:  # nodes 0, 1 and 3 of the tree are the chain's first three: node 2 is another child of the root
        order = [5, 6, 8, 7]
        tokens[:, 5:9] = tokens[:, order]
        tree = run(prompt, (5, 9, [-1, 0, 0, 1]))[-1]
        for node, single in zip((0, 1, 3), singles, strict=False):
            np.testing.assert_array_equal(tree[:, node], single)


def test_layers_without_keys_have_no_cache(exported):
    dims = exported[2]
    spec = decoder_spec("target", dims)
    assert [spec.input(name).dims[1::2] for name in spec.caches] == [
        (layer.num_kv_heads, layer.head_dim) for layer in dims.per_layer for _ in range(layer.num_caches)
    ]
    assert dims_from_json(ModelDims, json_from_dims(dims)) == dims
    if dims.sources:
        assert dims.sources == {3: 2, 4: 1}
        assert [n for n in spec.caches if n.startswith("k")] == ["k_cache.0", "k_cache.1", "k_cache.2"]
    else:
        assert dims.per_layer == (LayerDims(2, 8), LayerDims(1, 12))


def test_the_number_of_weights_is_predicted(exported):
    import json

    model, _, dims, folder = exported
    config = json.loads((folder / "config.json").read_text())
    predicted = predict(config, dims, "none", 1, MAX_SEQ_LEN).num_params
    assert predicted == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.05)


def test_a_lost_part_of_a_layer_is_noticed(exported, tmp_path):
    from safetensors.numpy import load_file, save_file

    *_, dims, folder = exported
    tensors = load_file(folder / "model.safetensors")
    check_checkpoint(folder, dims)
    del tensors["model.layers.0.self_attn.q_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    if dims.sources:  # layers 0 and 2 are alike, in others nothing can be compared
        with pytest.raises(CheckpointError, match=r"layer 0 without self_attn\.q_norm\.weight"):
            check_checkpoint(tmp_path, dims)


def _without_v_norm(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "v_norm"):
            module.v_norm.forward = lambda x: x


def _one_plus(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += 1


def _without_scalars(model: Any) -> None:
    for layer in model.model.layers:
        layer.layer_scalar.fill_(1.0)


def _scaled_scores(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5


def _keep(model: Any) -> None:
    pass


MUTANTS: dict[str, tuple[dict[int, int], Callable[[Any], None]]] = {
    "no norm of V": ({}, _without_v_norm),
    "norms by 1 + weight": ({}, _one_plus),
    "K and V of another layer of that kind": ({3: 0}, _keep),
    "no factor of the layer": ({}, _without_scalars),
    "scores scaled": ({}, _scaled_scores),
}


def difference(folder: Path, own: Any, sources: dict[int, int], change: Callable[[Any], None]) -> float:
    """The largest difference from transformers' logits over the largest logit, of a prefill and steps after it."""
    import torch

    from speccompile.export import attention, decoder
    from speccompile.export.masks import read_windows
    from speccompile.export.weights import load_model
    from speccompile.export.wrapper import DecoderGraph

    dims = read_dims(folder)
    layers = [replace(layer, source=sources.get(i, layer.source)) for i, layer in enumerate(dims.per_layer)]
    dims = replace(dims, layer_dims=tuple(layers))
    attention.register()
    model = load_model(folder, "checkpoint")
    windows = read_windows(model, attention.IMPLEMENTATION, dims.num_layers, MAX_SEQ_LEN, "gemma4_text")
    assert windows == tuple(0 if kind == "full_attention" else 4 for kind in model.config.layer_types)
    change(model)
    tokens = (torch.arange(decoder.NUM_TOKENS) * 7 + 3).remainder(dims.vocab_size)[None]
    with torch.no_grad():
        ours = decoder._run_cached(DecoderGraph(model, dims, False, (), windows), tokens, dims)
        expected = own(tokens, use_cache=False).logits
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_noticed(exported, name):
    model, _, dims, folder = exported
    if not dims.sources:
        pytest.skip("the other config has all of it")
    assert difference(folder, model, {}, _keep) < MAX_RELATIVE_DIFFERENCE
    assert difference(folder, model, *MUTANTS[name]) > 100 * MAX_RELATIVE_DIFFERENCE
