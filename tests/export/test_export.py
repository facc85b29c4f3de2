# SPDX-License-Identifier: Apache-2.0
"""The form of an exported graph: its inputs and outputs, its few nodes, its weights."""

import gc
import json
import weakref
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from speccompile.core import specs
from speccompile.core.specs import GraphSpec, TensorSpec
from speccompile.export.trace import trace_module
from speccompile.graph_kinds.decoder import decoder_spec
from tests.export.families import CONFIGS, VOCAB
from tests.export.harness import Decoder, logits_of, make_checkpoint

ONNX_TYPES = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64, "bool": ir.DataType.BOOL}

# What one more Llama layer adds. A node more is a few microseconds more in every step of every draft.
LLAMA_LAYER = {
    "RMSNormalization": 2,
    "MatMul": 7,
    "Reshape": 4,
    "Transpose": 3,
    "RotaryEmbedding": 2,
    "CachedAttention": 1,
    "Sigmoid": 1,
    "Mul": 2,
    "Add": 2,
}
# Positions from lengths and depth, embedding, final norm, scored gather, LM head.
LLAMA_REST = {
    "Cast": 1,
    "ReduceSum": 1,
    "Sub": 1,
    "Unsqueeze": 2,
    "Add": 1,
    "Gather": 1,
    "RMSNormalization": 1,
    "GatherND": 1,
    "MatMul": 1,
}
GPT2_LAYER = {
    "LayerNormalization": 2,
    "MatMul": 4,
    "Split": 1,
    "Reshape": 4,
    "Transpose": 3,
    "CachedAttention": 1,
    "Gelu": 1,
    "Add": 6,
}


def count_ops(model: ir.Model) -> Counter[str]:
    return Counter(n.op_type for n in model.graph.all_nodes())


def dims_of(values: list[ir.Value]) -> list[tuple[str, tuple[str | int, ...], ir.DataType]]:
    return [(v.name, tuple(d if isinstance(d, int) else str(d) for d in v.shape), v.dtype) for v in values]


def declared(tensors: tuple[specs.TensorSpec, ...]) -> list[tuple[str, tuple[str | int, ...], ir.DataType]]:
    return [(t.name, t.dims, ONNX_TYPES[t.dtype]) for t in tensors]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    from speccompile.export.decoder import export_decoder

    folder = tmp_path_factory.mktemp("llama3")
    reference = make_checkpoint(CONFIGS["llama3"], folder)
    stages: list[str] = []
    model, dims = export_decoder(folder, max_seq_len=16, hidden=True, hidden_layers=(1, 0), progress=stages.append)
    return model, dims, reference, stages, folder


def test_inputs_and_outputs_are_the_specs(llama):
    model, dims, *_ = llama
    spec = decoder_spec("decoder", dims, hidden=True, hidden_layers=(1, 0))
    assert dims_of(model.graph.inputs) == declared(spec.inputs)
    assert dims_of(model.graph.outputs) == declared(spec.outputs)
    assert model.opset_imports == {"": 24, "speccompile": 1}


def test_nodes_of_a_llama(llama):
    model, dims, *_ = llama
    expected = Counter(LLAMA_REST)
    for _ in range(dims.num_layers):
        expected.update(LLAMA_LAYER)
    assert count_ops(model) == expected


def test_nodes_of_a_gpt2_layer(tmp_path):
    from speccompile.export.decoder import export_decoder

    counts = []
    for layers in (1, 2):
        make_checkpoint({**CONFIGS["gpt2"], "n_layer": layers}, tmp_path)
        counts.append(count_ops(export_decoder(tmp_path, max_seq_len=16)[0]))
    assert counts[1] - counts[0] == Counter(GPT2_LAYER)
    assert not counts[0] - counts[1]


def test_rope_tables_are_shared(llama):
    model, dims, *_ = llama
    rotary = [n for n in model.graph if n.op_type == "RotaryEmbedding"]
    assert len({(n.inputs[1].name, n.inputs[2].name, n.inputs[3].name) for n in rotary}) == 1
    assert tuple(rotary[0].inputs[1].shape) == (16, dims.head_dim // 2)


def test_weights_keep_their_names_and_their_memory(llama):
    model, _, reference, _, _ = llama
    held = model.graph.initializers
    names = dict(reference.named_parameters())
    # Tied embeddings: one memory, read by rows as embedding and as its transposed view by the LM head.
    assert set(names) <= set(held)
    assert set(held) - set(names) >= {"model.embed_tokens.weight.transposed"}
    rows = held["model.embed_tokens.weight"].const_value.numpy()
    columns = held["model.embed_tokens.weight.transposed"].const_value.numpy()
    assert np.shares_memory(rows, columns) and columns.shape == (rows.shape[1], rows.shape[0])
    for name, parameter in names.items():
        array = held[name].const_value.numpy()
        value = parameter.detach().numpy()
        is_linear = value.ndim == 2 and "embed" not in name
        np.testing.assert_array_equal(array, value.T if is_linear else value)
        if is_linear:
            assert array.flags.f_contiguous and not array.flags.owndata, f"{name} was copied to be transposed"


def test_hidden_states_are_what_transformers_has(llama):
    import torch

    model, dims, reference, _, _ = llama
    decoder = Decoder(model, dims, batch=1, max_seq=16)
    tokens = np.array([[5, 9, 40, 3]])
    outputs = decoder.step(tokens, np.array([[-1, 0, 1, 2]]), np.array([[3]]))
    with torch.no_grad():
        own = reference(torch.tensor(tokens), output_hidden_states=True, use_cache=False)
    # transformers' last entry is after the final norm, as the LM head reads it.
    tolerance = 1e-5  # float32 sums of about 50 terms of order 1
    np.testing.assert_allclose(outputs[specs.hidden_name(0)], own.hidden_states[1], atol=tolerance)
    np.testing.assert_allclose(outputs[specs.HIDDEN], own.hidden_states[-1], atol=tolerance)
    normed_last = reference.model.norm(torch.tensor(outputs[specs.hidden_name(1)])).detach()
    np.testing.assert_allclose(normed_last, own.hidden_states[-1], atol=tolerance)
    np.testing.assert_allclose(outputs[specs.LOGITS][0, 0], logits_of(reference, tokens[0]), atol=2e-5)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_hidden_states_of_other_families(name, tmp_path):
    import torch

    from speccompile.export.decoder import export_decoder

    reference = make_checkpoint(CONFIGS[name], tmp_path)
    model, dims = export_decoder(tmp_path, max_seq_len=16, hidden_layers=(0,))
    decoder = Decoder(model, dims, batch=1, max_seq=16)
    tokens = np.array([[5, 9, 40, 3]])
    outputs = decoder.step(tokens, np.array([[-1, 0, 1, 2]]), np.array([[3]]))
    with torch.no_grad():
        own = reference(torch.tensor(tokens), output_hidden_states=True, use_cache=False)
    np.testing.assert_allclose(outputs[specs.hidden_name(0)], own.hidden_states[1], atol=1e-5)
    assert specs.HIDDEN not in outputs


def test_stages_are_reported(llama):
    stages = llama[3]
    assert stages[:4] == ["check weights", "load weights", "compare attention", "trace"]
    assert "fuse_rope" in stages


def test_nothing_of_this_machine_is_in_the_graph(llama):
    model = llama[0]
    assert b"site-packages" not in ir.to_proto(model).SerializeToString()


def test_onnx_accepts_the_graph(llama):
    from speccompile.ops.registry import attach_functions

    work = llama[0].clone()
    attach_functions(work)
    onnx.checker.check_model(ir.to_proto(work), full_check=True)


def test_random_weights_need_a_config_alone_and_graph_and_weights_are_the_same_every_time(tmp_path):
    from speccompile.export.decoder import export_decoder

    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    first, dims = export_decoder(tmp_path, weights="random", max_seq_len=16)
    second, _ = export_decoder(tmp_path, weights="random", max_seq_len=16)
    describe = [(n.op_type, [v and v.name for v in n.inputs], [v.name for v in n.outputs]) for n in second.graph]
    assert describe == [(n.op_type, [v and v.name for v in n.inputs], [v.name for v in n.outputs]) for n in first.graph]
    for name, value in first.graph.initializers.items():
        array = value.const_value.numpy()
        np.testing.assert_array_equal(array, second.graph.initializers[name].const_value.numpy())
        assert np.isfinite(array).all()
    # Buffers that no checkpoint holds are computed, not left as they came from the allocator.
    cos = first.graph.initializers["rope.cos"].const_value.numpy()
    np.testing.assert_allclose(cos[:, 0], np.cos(np.arange(16)), atol=1e-6)
    weight = first.graph.initializers["model.layers.0.mlp.gate_proj.weight"].const_value.numpy()
    assert 0.01 < weight.std() < 0.03, "initializer_range is 0.02"
    matrices = sum(v.const_value.size for n, v in first.graph.initializers.items() if n.endswith("_proj.weight"))
    norms = 5 * 32 + 4 * 12
    assert dims.num_params == matrices + 2 * 32 * VOCAB + norms


def test_half_precision_checkpoints_are_widened(tmp_path):
    import torch

    from speccompile.export.decoder import export_decoder

    reference = make_checkpoint({**CONFIGS["llama2"], "num_hidden_layers": 1}, tmp_path)
    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    model, _ = export_decoder(tmp_path, max_seq_len=16)
    weight = model.graph.initializers["model.norm.weight"].const_value.numpy()
    assert weight.dtype == np.float32
    np.testing.assert_array_equal(weight, reference.model.norm.weight.float().detach().numpy())


class Halves(nn.Module):
    """A linear whose result is cut into halves: onnxscript has a rule for that, which visits slices alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.cat((-y[:, 4:], y[:, :4]), 1)


def test_weights_are_freed_with_the_graph():
    module = Halves().eval()
    held = [weakref.ref(parameter) for parameter in module.parameters()]
    x, y = (TensorSpec(name, ("batch", 8), "float32") for name in "xy")
    spec = GraphSpec("halves", (x,), (y,))
    model = trace_module(module, (torch.zeros(3, 8),), ({0: torch.export.Dim("batch", min=1)},), spec, "halves")
    assert len(model.graph.initializers) >= 2
    del module, model
    gc.collect()
    assert [parameter() for parameter in held] == [None, None]
