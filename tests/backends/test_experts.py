# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on ONNX Runtime's CPU: small weights, and the same bits in chains as in single steps."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.backends.distance import compare, distance_from_rows
from speccompile.backends.onnxruntime import kernel_library
from speccompile.backends.onnxruntime.backend import OnnxRuntimeBackend
from speccompile.backends.onnxruntime.engine import load_engine
from speccompile.core import specs
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import STORED
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from speccompile.passes.pipelines import ORT_QUANTIZATION
from speccompile.recipe.predict import predict
from tests import store
from tests.cpu import least_rows
from tests.export.families import CONFIGS as FAMILIES
from tests.export.families import VOCAB
from tests.export.harness import make_checkpoint
from tests.plugins.cpu_lab import needs_compiler

pytestmark = pytest.mark.export

MAX_SEQ, NUM_TOKENS = 32, 19
_ROUTED = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 40, "decoder_sparse_step": 1}
_SIZES = {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 2, "num_hidden_layers": 1}  # layers are alike
_OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 72, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"norm_topk_prob": True, **_ROUTED},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 8},
    "qwen2_moe": {"shared_expert_intermediate_size": 48, **_ROUTED},
}
CONFIGS = {name: {**FAMILIES["llama2"], **_SIZES, "model_type": name, **own} for name, own in _OWN.items()}
QUANTIZATIONS = {q: forms for q, forms in ORT_QUANTIZATION.items() if q != STORED}
FORMS = [(q, form) for q, forms in QUANTIZATIONS.items() for form in forms]
# All forms of one family; of the others those of our kernels, and the float32 that others are measured against.
CASES = [("mixtral", *form) for form in FORMS]
CASES += [(name, q, "packed") for name in ("qwen3_moe", "olmoe") for q in QUANTIZATIONS]
CASES += [("qwen3_moe", "none", "fp32"), ("qwen2_moe", "int8", "packed")]


@pytest.fixture(scope="module")
def neutral(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ir.Model, ModelDims]]:
    """The exported graph of each config."""
    made = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        make_checkpoint(config, folder)
        made[name] = store.export_decoder(folder, max_seq_len=MAX_SEQ)
    return made


def compiled(graph: tuple[ir.Model, ModelDims], dest: Path, quantization: str, form: str | None) -> dict[str, Any]:
    """Lowers a target with logits; returns the report."""
    model, dims = graph
    spec = verified_spec(decoder_spec("target", dims), keep_logits=True)
    return OnnxRuntimeBackend().compile(CompileJob(model, spec, dest, quantization=quantization, form=form))


def logits_of(path: Path, dims: ModelDims, tokens: np.ndarray, step: int, threads: int = 1) -> np.ndarray:
    """The logits [tokens, vocab] of a text that is read `step` tokens at a time."""
    spec = verified_spec(decoder_spec("target", dims), keep_logits=True)
    engine = load_engine(LoadJob(path, spec, max_rows=MAX_SEQ, tuning={"threads": threads}))
    rows = []
    for at in range(0, len(tokens), step):
        feeds = {specs.TOKENS: tokens[None, at : at + step], specs.LENGTHS: np.array([at], np.int64)}
        rows.append(np.array(engine.run(feeds)[specs.LOGITS])[0])
    return np.concatenate(rows)


def assert_chains_are_single_steps(path: Path, dims: ModelDims, least: int = 1) -> None:
    """With `least` 2, steps of two tokens stand in for single ones."""
    num = NUM_TOKENS // least * least
    tokens = np.random.default_rng(3).integers(3, VOCAB, num)
    single = logits_of(path, dims, tokens, least)
    assert np.isfinite(single).all()
    for step, threads in ((least, 2), (2, 1), (3, 2), (5, 1), (8, 2), (num, 1)):
        got = logits_of(path, dims, tokens, step, threads)
        assert np.array_equal(got.view(np.int32), single.view(np.int32)), f"steps of {step}, {threads} threads"


@needs_compiler
@pytest.mark.parametrize(("name", "quantization", "form"), CASES)
def test_a_chain_has_the_bits_of_single_steps(name, quantization, form, neutral, tmp_path):
    report = compiled(neutral[name], tmp_path, quantization, form)
    kinds = Counter(report["op_histogram"]["after"])
    is_packed = form == "packed" or quantization != "none"
    assert sum(count for op, count in kinds.items() if "ExpertLinear" in op) == (2 if is_packed else 0)
    assert kinds["Gemm"] == 1  # the router
    assert_chains_are_single_steps(tmp_path / "graph.onnx", neutral[name][1], least_rows(quantization, form))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_without_our_kernels_the_bodies_keep_the_bits(quantization, neutral, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    compiled(neutral["mixtral"], tmp_path, quantization, "blocks32")
    least = least_rows(quantization, "blocks32")
    assert_chains_are_single_steps(tmp_path / "graph.onnx", neutral["mixtral"][1], least)


@needs_compiler
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_distances_to_float32_are_those_of_the_weights(name, neutral, tmp_path):
    """Unquantised within rounding, int8 near, int4 farther: nothing else differs."""
    dims, files = neutral[name][1], {}
    for quantization, form in (("none", "fp32"), ("none", "packed"), ("int8", "packed"), ("int4", "packed")):
        compiled(neutral[name], tmp_path / quantization / form, quantization, form)
        files[f"{quantization}/{form}"] = tmp_path / quantization / form / "graph.onnx"
    tokens = np.random.default_rng(3).integers(3, VOCAB, NUM_TOKENS)
    rows = {key: logits_of(path, dims, tokens, NUM_TOKENS).astype(np.float64) for key, path in files.items()}
    wanted = rows["none/fp32"]
    kl = {key: distance_from_rows([compare(wanted, row, tokens)]).kl for key, row in rows.items()}
    assert kl["none/packed"] <= 1e-6  # only the order of sums differs
    assert kl["int8/packed"] < kl["int4/packed"]
    assert kl["int8/packed"] < 0.05


# The sizes of Mixtral, an eighth as wide and one layer deep.
_MIXTRAL = {**FAMILIES["mixtral"], "vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64,
            "num_attention_heads": 8, "num_local_experts": 8, "num_hidden_layers": 1}  # fmt: skip
_BYTES_OF_A_WEIGHT = {"int4": 0.6, "int8": 1.1}  # at most, scales included


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[ir.Model, ModelDims]]:
    """A random Mixtral: its folder and its graph."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps(_MIXTRAL))
    return folder, store.export_decoder(folder, weights="random", max_seq_len=64)


@needs_compiler
@pytest.mark.parametrize("quantization", _BYTES_OF_A_WEIGHT)
def test_quantised_experts_are_small_and_as_large_as_predicted(quantization, wide, tmp_path):
    _, graph = wide
    compiled(graph, tmp_path, quantization, "packed")
    model = ir.load(tmp_path / "graph.onnx")
    experts = [node for node in model.graph if "ExpertLinear" in node.op_type]
    assert len(experts) == 2
    num_bytes = sum(v.const_value.nbytes for node in experts for v in node.inputs if v is not None and v.const_value)
    num_weights = 8 * 3 * 512 * 1024
    assert num_bytes <= _BYTES_OF_A_WEIGHT[quantization] * num_weights
    written = (tmp_path / "graph.onnx.data").stat().st_size
    predicted = predict(_MIXTRAL, graph[1], quantization, slots=1, rows=64, backend=OnnxRuntimeBackend())
    assert written == pytest.approx(predicted.least_file_bytes, rel=0.01)
