# SPDX-License-Identifier: Apache-2.0
"""polygraphy reads every kind of graph that is exported, and its lint reports only expected findings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("polygraphy", reason="polygraphy is in the extra [dev]")
pytest.importorskip("onnx_graphsurgeon", reason="polygraphy's lint needs onnx-graphsurgeon, in the extra [dev]")

from speccompile.backends.tensorrt.plugin_names import PLUGIN_OPS
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.backends.writing import lower_and_save, save_rollback
from speccompile.core.specs import GraphSpec
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, rollback_spec, verified_spec
from speccompile.ops.registry import attach_functions
from speccompile.passes.pipelines import onnxruntime_table, tensorrt_table
from speccompile.passes.rollback import build_rollback
from speccompile.passes.save import save_model
from tests import store
from tests.export.families import CONFIGS

pytestmark = pytest.mark.export

CONFIG = {**CONFIGS["llama2"], "hidden_size": 64, "num_key_value_heads": 2, "num_hidden_layers": 1}
ROWS = 40
# ONNX Runtime copies a cache that is not bound to one address, as the engine binds it.
COPIED = "TensorScatter: in-place optimization not activated, copying past_cache to present_cache"
# No body is written for a node over several caches: the plugin is the only form.
PLUGIN = "Fatal error: speccompile:KVRollback(-1) is not a registered function/op"
TARGET = {"Attention": 1, "TensorScatter": 2, "SpecVerify": 1}
DRAFT = {"Attention": 1, "TensorScatter": 2, "TopTokens": 1, "NodeProbs": 1}
# By name: required operators, and allowed findings of lint.
KINDS = {
    "onnxruntime-target": (TARGET, COPIED),
    "onnxruntime-draft": (DRAFT, COPIED),
    "onnxruntime-rollback": ({"KVRollback": 2}, COPIED),
    "tensorrt-target": ({**TARGET, "KVRollback": 1}, PLUGIN),
    "tensorrt-target-bodies": (TARGET, COPIED),
    "tensorrt-draft": ({**DRAFT, "DequantizeLinear": 5}, COPIED),
    "tensorrt-rollback": ({"KVRollback": 2}, COPIED),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model, dims = store.export_decoder(folder, weights="random", max_seq_len=ROWS)
    target = verified_spec(decoder_spec("target", dims))
    draft = candidate_spec(decoder_spec("draft", dims), 1, dists=True)

    def half(spec: GraphSpec, compacts: bool = False) -> GraphSpec:
        return tensorrt_spec(spec, "float16", ROWS, compacts=compacts)

    def save(name: str, spec: GraphSpec, quantization: str = "none", plugins: tuple[str, ...] = ()) -> None:
        table = tensorrt_table(spec, quantization, dtype="float16", plugins=plugins)
        lower_and_save(model, table, folder / f"{name}.onnx", dialect="tensorrt")

    lower_and_save(model, onnxruntime_table(target, "none", "fp32"), folder / "onnxruntime-target.onnx")
    lower_and_save(model, onnxruntime_table(draft, "int4", "blocks32"), folder / "onnxruntime-draft.onnx")
    save_rollback(dims, folder / "onnxruntime-rollback.onnx")
    save("tensorrt-target", half(target, compacts=True), plugins=PLUGIN_OPS)
    save("tensorrt-target-bodies", half(target))
    save("tensorrt-draft", half(draft), "int4")
    rollback = build_rollback(half(rollback_spec(dims)))
    attach_functions(rollback, "tensorrt")
    save_model(rollback, folder / "tensorrt-rollback.onnx")
    return folder


# All command lines in one process, which imports ONNX Runtime once.
CHILD = """
import contextlib, io, json, sys
from polygraphy.tools import main
said = {}
for name, arguments in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as text:
        status = main(arguments)
    said[name] = (status, text.getvalue())
print(json.dumps(said))
"""


def run_polygraphy(commands: dict[str, list[str]]) -> dict[str, str]:
    """Returns the output of each `polygraphy ARGUMENTS`."""
    environment = {**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(commands), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said and all(status == 0 for status, _ in said.values()), {n: t[-500:] for n, (s, t) in said.items() if s}
    return {name: text for name, (_, text) in said.items()}


@pytest.fixture(scope="module")
def inspected(exported: Path) -> dict[str, str]:
    return run_polygraphy({n: ["inspect", "model", str(exported / f"{n}.onnx"), "--show", "layers"] for n in KINDS})


@pytest.fixture(scope="module")
def linted(exported: Path) -> Path:
    # ONNX Runtime's graphs have caches of any length; lint would run them with caches of one row.
    sizes = [f"{cache}:[1,2,{ROWS},16]" for cache in ("k_cache.0", "v_cache.0")]
    files = {name: (str(exported / f"{name}.onnx"), str(exported / f"{name}.json")) for name in KINDS}
    run_polygraphy({n: ["check", "lint", g, "--input-shapes", *sizes, "-o", out] for n, (g, out) in files.items()})
    return exported


@pytest.mark.parametrize("name", KINDS)
def test_inspect_model_reads_inputs_outputs_and_nodes(inspected, name):
    said = inspected[name]
    for op, count in KINDS[name][0].items():
        assert said.count(f"[Op: {op}]") == count, op
    dtype, rows = ("float16", str(ROWS)) if name.startswith("tensorrt") else ("float32", "'max_seq'")
    assert f"k_cache.0 [dtype={dtype}, shape=('batch', 2, {rows}, 16)]" in said


@pytest.mark.parametrize("name", KINDS)
def test_lint_finds_nothing_but_what_is_meant(linted, name):
    found = json.loads((linted / f"{name}.json").read_text())
    assert found["summary"]["failing"] == [] and found["summary"]["passing"]
    for entry in found["lint_entries"]:
        assert entry["level"] == "warning" and entry["message"].startswith(KINDS[name][1]), entry
