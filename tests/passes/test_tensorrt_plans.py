# SPDX-License-Identifier: Apache-2.0
"""Every form of a lowered decoder becomes a plan, with the kernels and the weights that the lowering is for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.backends.base import CompileJob
from speccompile.backends.tensorrt.backend import LOWERED_FILE, PLAN_FILE, TensorRTBackend, predicted_weight_bytes
from speccompile.backends.tensorrt.config import Config
from speccompile.checkpoints.lora import Factors
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions, WeightCounts
from speccompile.core.specs import ADAPTER
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from speccompile.ops.grid import Grid
from speccompile.passes.attach_adapters import attach_adapters
from tests import store
from tests.backends.tensorrt.plan_bytes import read_kernels, read_weights_bytes
from tests.export.families import CONFIGS
from tests.passes.graphs import GridTable
from tests.rtx import load_rtx

pytestmark = pytest.mark.plan

load_rtx()

CONFIG: dict[str, Any] = {
    **CONFIGS["llama2"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
HEAD = CONFIG["vocab_size"] * CONFIG["hidden_size"]
FORMS = [(q, d) for q in ("none", "int8", "int4") for d in ("float16", "bfloat16")] + [("fp8", "float16")]
# Families whose form differs: a softcap; experts.
FAMILIES = ["gemma2", "mixtral"]


def export(config: dict[str, Any], folder: Path) -> tuple[ir.Model, ModelDims]:
    (folder / "config.json").write_text(json.dumps(config))
    return store.export_decoder(folder, weights="random", max_seq_len=48)


def compile_target(
    model: ir.Model,
    dims: ModelDims,
    dest: Path,
    quantization: str,
    dtype: str,
    plugins: str = "auto",
    grids: Any = None,
    adapters: bool = False,
) -> dict[str, Any]:
    config = Config(plugins=plugins, variant="tensorrt_rtx", keep_onnx=True)
    options = CompileOptions(dtype, 2, 56, 8, config, grids=grids)
    spec = verified_spec(decoder_spec("target", dims, adapters=adapters))
    return TensorRTBackend().compile(CompileJob(model.clone(), spec, dest, quantization=quantization, options=options))


def counts_of(model: ir.Model) -> WeightCounts:
    held = {v.name: v.const_value.size for v in model.graph.initializers.values()}
    linear = sum(held[n.inputs[1].name] for n in model.graph if n.op_type == "MatMul")
    return WeightCounts(sum(held.values()), linear, sum(held.values()) - linear)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[ir.Model, ModelDims]:
    return export(CONFIG, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("quantization", "dtype"), FORMS)
def test_every_form_builds_with_its_kernels_and_its_weights(llama, tmp_path, quantization, dtype):
    model, dims = llama
    report = compile_target(model, dims, tmp_path, quantization, dtype)
    assert report["tensorrt"]["plugin_layers"] == {"SpecVerify": 1, "KVRollback": 1}
    main = [k for k in read_kernels(tmp_path / PLAN_FILE) if any("mha" in name for name in k)]
    assert len(main) == len(report["tensorrt"]["profiles"]) == 2
    for kernels in main:
        # Fused attention in every layer, on kv heads: nothing repeats K or V, nothing copies a whole cache.
        assert sum(count for name, count in kernels.items() if "_gemm_mha" in name) == dims.num_layers
        # (Seen without the slice: __myl_Move, __myl_ReshReplReshMove and __myl_ReshReplReshMoveTran in each layer.)
        assert not [name for name in kernels if name == "__myl_Move" or name.startswith("__myl_ReshRepl")], kernels
        quantised = sum(count for name, count in kernels.items() if "MulCast" in name and "Fc" in name)
        # QKV in one, O, gate and up in one, down, and the LM head.
        assert quantised == (0 if quantization == "none" else 4 * dims.num_layers + 1), kernels
    lowered = ir.load(tmp_path / LOWERED_FILE)
    arithmetic = sum(v.const_value.nbytes for v in lowered.graph.initializers.values())
    assert report["tensorrt"]["lowered_weights_bytes"] == arithmetic
    held = read_weights_bytes(tmp_path / PLAN_FILE)
    assert held == pytest.approx(arithmetic, rel=0.05)
    predicted = predicted_weight_bytes(counts_of(model), quantization, dtype, num_head=HEAD)
    assert held == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize(("quantization", "dtype"), [("none", "float16"), ("int4", "bfloat16")])
def test_a_target_with_adapters_builds(llama, tmp_path, quantization, dtype):
    model, dims = llama
    work, source = model.clone(), np.random.default_rng(0)
    factors = {}
    for name, width in (("self_attn.q_proj", 256), ("self_attn.v_proj", 64), ("mlp.up_proj", 512)):
        a, b = (source.standard_normal((3, 4, size), np.float32) for size in (256, width))
        factors[f"model.layers.0.{name}"] = Factors(a, b, "adapter_model.safetensors")
    assert attach_adapters(work, factors) == 3
    report = compile_target(work, dims, tmp_path, quantization, dtype, adapters=True)
    assert report["op_histogram"]["after"]["speccompile::LowRank"] == 3
    assert ADAPTER in [value.name for value in ir.load(tmp_path / LOWERED_FILE).graph.inputs]


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_build(name, tmp_path):
    is_mixture = name == "mixtral"
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256} if is_mixture else {}
    model, dims = export({**CONFIGS[name], **sizes}, tmp_path)
    report = compile_target(model, dims, tmp_path, "int4" if is_mixture else "none", "bfloat16")
    if is_mixture:
        experts = {v.name: v.const_value.size for v in model.graph.initializers.values() if len(v.shape) == 3}
        lowered = ir.load(tmp_path / LOWERED_FILE).graph.initializers
        held = sum(
            lowered[f"{name}.{part}"].const_value.nbytes for name in experts for part in ("int4", "scale.bfloat16")
        )
        assert held <= 0.6 * sum(experts.values()) > 50_000
        # A few kilobytes of constants come on top: the experts are not widened.
        plan_bytes = read_weights_bytes(tmp_path / PLAN_FILE)
        assert 0 <= plan_bytes - report["tensorrt"]["lowered_weights_bytes"] < 32 << 10
    assert set(report["tensorrt"]["plugin_layers"]) == {"SpecVerify", "KVRollback"}
    plan = (tmp_path / PLAN_FILE).read_bytes()
    assert b"SpecVerify" in plan and b"KVRollback" in plan


class Grids(GridTable):
    """A checkpoint whose linears have random levels; by the name of the weights in the graph."""

    def __init__(self, model: ir.Model, bits: int, group: int, **values: Any) -> None:
        super().__init__({})
        rng = np.random.default_rng(0)
        for node in model.graph:
            if node.op_type == "MatMul" and node.inputs[1].const_value is not None:
                num_in, num_out = node.inputs[1].shape.numpy()
                levels = rng.integers(0, 1 << bits, (num_out, num_in)).astype(np.uint8)
                scales = rng.uniform(0.001, 0.01, (num_out, -(-num_in // group))).astype(np.float16)
                zero = 0 if "minimum" in values else 1 << (bits - 1)
                minimums = np.full_like(scales, values["minimum"]) if "minimum" in values else None
                grid = Grid(levels, scales, group, bits, zero, minimums)
                self.grids[node.inputs[1].name] = grid
                node.inputs[1].const_value = ir.tensor(grid.weight().T.copy(), name=node.inputs[1].name)


@pytest.mark.parametrize(
    ("bits", "group", "values", "form"),
    [
        (4, 32, {}, "int4"),
        (4, 128, {}, "int4"),
        (8, 1024, {}, "int8"),
        (8, 32, {}, "int8"),
        (4, 32, {"minimum": -0.01}, None),
    ],
)
def test_weights_that_come_quantised_stay_in_the_types_that_hold_them(llama, tmp_path, bits, group, values, form):
    model, dims = llama[0].clone(), llama[1]
    grids = Grids(model, bits, group, **values)
    report = compile_target(model, dims, tmp_path, "stored", "float16", grids=grids)
    held = report["weights"]
    assert held["num_float"] == 0 and held["num_widened"] == (0 if form else len(grids.grids))
    lowered = ir.load(tmp_path / LOWERED_FILE).graph.initializers
    built = [v.const_value.numpy() for name, v in lowered.items() if name.endswith((".int4", ".int8"))]
    signed = [(grid.levels.astype(np.int16) - grid.zero).astype(np.int8) for grid in grids.grids.values()]
    stored = {row.tobytes() for levels in signed for row in levels}
    rows = [row for levels in built for row in levels.astype(np.int8).T]
    assert {row.tobytes() for row in rows} == (stored if form else set())
    lowered_bytes = report["tensorrt"]["lowered_weights_bytes"]
    assert read_weights_bytes(tmp_path / PLAN_FILE) == pytest.approx(lowered_bytes, rel=0.05)
