# SPDX-License-Identifier: Apache-2.0
"""What the tables do to small models, as text: a refactor shows an empty diff (`make golden` writes it anew)."""

import difflib
import json
import os
from pathlib import Path

import onnx_ir as ir
import pytest

from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import STORED
from speccompile.core.specs import GraphSpec
from speccompile.export.decoder import export_decoder
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, rollback_spec, verified_spec
from speccompile.passes.base import Pass, histogram_from_model, run_pipeline
from speccompile.passes.pipelines import ORT_QUANTIZATION, onnxruntime_table, reference_table, tensorrt_table
from speccompile.passes.rollback import build_rollback
from speccompile.passes.text import text_from_model

pytestmark = pytest.mark.export

FOLDER = Path(__file__).parent
CONFIG = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MODELS = {"llama": CONFIG, "gemma2": {**CONFIG, "num_hidden_layers": 2, "sliding_window": 8}}


def check(name: str, text: str) -> None:
    path = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    held = path.read_text() if path.exists() else ""
    diff = "".join(difflib.unified_diff(held.splitlines(True), text.splitlines(True), str(path), "now"))
    assert not diff, f"{diff}\nIf this is meant: make golden"


def text_from_trace(model: ir.Model, table: tuple[Pass, ...]) -> str:
    before = json.dumps(histogram_from_model(model))
    rows = [
        f"{t.name:30} {t.num_rewrites:3} rewrites  {t.num_nodes_before:4} -> {t.num_nodes_after:4} nodes"
        for t in run_pipeline(model, table)
    ]
    return "\n".join([f"before {before}", *rows, f"after {json.dumps(histogram_from_model(model))}"]) + "\n"


@pytest.fixture(scope="module", params=MODELS)
def neutral(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ir.Model, ModelDims]:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps({"model_type": request.param, **MODELS[request.param]}))
    model, dims = export_decoder(folder, weights="random", max_seq_len=64)
    return request.param, model, dims


def specs_of(dims: ModelDims) -> dict[str, GraphSpec]:
    return {
        "target": verified_spec(decoder_spec("target", dims)),
        "draft": candidate_spec(decoder_spec("draft", dims), 1, dists=True),
    }


def test_neutral_graph(neutral):
    name, model, _ = neutral
    check(f"{name}-neutral", text_from_model(model))


def test_onnxruntime_traces(neutral):
    name, model, dims = neutral
    text = ""
    for role, spec in specs_of(dims).items():
        for quantization, forms in ORT_QUANTIZATION.items():
            for form in forms if quantization != STORED else ():  # without a checkpoint's own weights, that of none
                work = model.clone()
                table = onnxruntime_table(spec, quantization, form)
                text += f"== {role} {quantization} {form}\n{text_from_trace(work, table)}"
                got = [(v.name, [str(d) for d in v.shape or ()]) for v in (*work.graph.inputs, *work.graph.outputs)]
                assert got == [(t.name, [str(d) for d in t.dims]) for t in (*spec.inputs, *spec.outputs)]
    check(f"{name}-onnxruntime", text)


def test_lowered_graph(neutral):
    name, model, dims = neutral
    work = model.clone()
    run_pipeline(work, onnxruntime_table(specs_of(dims)["target"], "none", "fp32"))
    check(f"{name}-onnxruntime-target", text_from_model(work))


def test_reference_trace(neutral):
    name, model, dims = neutral
    check(f"{name}-reference", text_from_trace(model.clone(), reference_table(specs_of(dims)["target"])))


def tensorrt_specs_of(dims: ModelDims) -> dict[str, tuple[GraphSpec, tuple[str, ...]]]:
    """By name: TensorRT's spec, and the plugins at hand."""
    plain = specs_of(dims)
    compacts = tensorrt_spec(plain["target"], "float16", 72, compacts=True)
    return {
        "target with plugins": (compacts, ("SpecVerify", "KVRollback")),
        "target with bodies": (tensorrt_spec(plain["target"], "float16", 72), ()),
        "draft": (tensorrt_spec(plain["draft"], "float16", 72), ()),
    }


def test_tensorrt_traces(neutral):
    name, model, dims = neutral
    text = ""
    for kind, (spec, plugins) in tensorrt_specs_of(dims).items():
        for quantization in ("none", "int8", "int4", "fp8"):
            table = tensorrt_table(spec, quantization, dtype="float16", plugins=plugins)
            text += f"== {kind} {quantization}\n{text_from_trace(model.clone(), table)}"
    check(f"{name}-tensorrt", text)


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_tensorrt_graph(neutral, quantization):
    name, model, dims = neutral
    spec, plugins = tensorrt_specs_of(dims)["target with plugins"]
    work = model.clone()
    run_pipeline(work, tensorrt_table(spec, quantization, dtype="float16", plugins=plugins))
    check(f"{name}-tensorrt-target-{quantization}", text_from_model(work))


def test_rollback_graph():
    check("rollback", text_from_model(build_rollback(rollback_spec(ModelDims("llama", 97, 64, 1, 4, 2, 16, 64)))))
