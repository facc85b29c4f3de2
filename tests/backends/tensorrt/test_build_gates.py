# SPDX-License-Identifier: Apache-2.0
"""What TensorRT-RTX's builder says of our plans without a GPU: in-place caches, no host tensors, no own allocations."""

import json
import re
import subprocess
import sys

import onnx
import pytest

from speccompile.backends.base import CompileJob
from speccompile.backends.tensorrt import builder
from speccompile.backends.tensorrt.backend import TensorRTBackend
from speccompile.backends.tensorrt.config import Config
from speccompile.backends.tensorrt.plugin_names import KV_ROLLBACK, SPEC_VERIFY
from speccompile.core.jobs import CompileOptions
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from tests import store
from tests.backends.tensorrt import plugin_graphs as graphs
from tests.backends.tensorrt.lab import SETTINGS
from tests.export.families import CONFIGS
from tests.rtx import load_rtx

pytestmark = pytest.mark.plan

load_rtx()
ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")
# What runs inside the compiled region or is our plugin; every other layer that names a cache would move it.
OWN_LAYERS = ("Layer(Myelin):", "Layer(PluginV3):")


def answers(requests):
    """Returns what the builder says of each request: see gates_child."""
    command = [sys.executable, "-m", "tests.backends.tensorrt.gates_child"]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Answers by form of the plugins: the plan of a target, without plugins also that of its rollback."""
    folder, requests = tmp_path_factory.mktemp("gates"), {}
    (folder / "config.json").write_text(json.dumps({**CONFIGS["llama2"], "num_hidden_layers": 1}))
    model, dims = store.export_decoder(folder, weights="random", max_seq_len=48)
    spec = verified_spec(decoder_spec("target", dims))
    real = builder.build_plan
    with pytest.MonkeyPatch.context() as patch:
        for plugins in ("native", "none"):
            made = []

            def record(request, dest, progress=None, made=made):
                made.append(request.json_from_request(dest))
                return real(request, dest, progress)

            patch.setattr(builder, "build_plan", record)
            options = CompileOptions(
                "float16", 2, 64, 8, Config(plugins=plugins, variant="tensorrt_rtx", keep_onnx=True)
            )
            dest = folder / plugins
            dest.mkdir()
            TensorRTBackend().compile(CompileJob(model.clone(), spec, dest, options=options))
            if plugins == "none":
                (dest / "rollback").mkdir()
                TensorRTBackend().compile_rollback(dims, dest / "rollback", options=options)
            requests[plugins] = made
    flat = [request for made in requests.values() for request in made]
    told = iter(answers(flat))
    return {form: [next(told) for _ in made] for form, made in requests.items()}


def test_plans_build_though_they_may_allocate_nothing_at_run_time(built):
    assert [len(answer) for answer in built.values()] == [1, 2]
    assert all(answer["built"] for made in built.values() for answer in made)


def test_no_input_or_output_is_read_as_a_shape_on_the_host(built):
    assert [answer["shape"] for made in built.values() for answer in made] == [[]] * 3


def test_no_layer_copies_or_reformats_a_cache(built):
    for made in built.values():
        for answer in made:
            (table,) = [text for text in answer["lines"] if text.startswith("Engine Layer Information:")]
            layers = table.splitlines()[1:]
            assert any("cache" in layer for layer in layers)
            assert not [line for line in layers if "cache" in line and not line.startswith(OWN_LAYERS)]


def step_request(folder, rows, reads_compacted=False):
    """A request for caches of `rows` rows that are updated and compacted; `reads_compacted`: and then sorted."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "ROWS", rows)
        model = graphs.step_model("float16")
    if reads_compacted:  # control: what is computed from whole caches is seen
        for value in model.graph.output:
            if value.name.startswith("compacted."):
                name = value.name
                model.graph.node.append(onnx.helper.make_node("Softmax", [name], [f"{name}.soft"], axis=2))
                model.graph.node.append(
                    onnx.helper.make_node("TopK", [f"{name}.soft", "k"], [f"{name}.read", f"{name}.at"], axis=2)
                )
                value.name += ".read"
                value.type.tensor_type.shape.dim[2].dim_value = 4
        model.graph.initializer.append(onnx.helper.make_tensor("k", onnx.TensorProto.INT64, [1], [4]))
    onnx.save(model, folder / "step.onnx")
    dims = {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    shapes = {
        name: [[graphs.RANGES[d][i] if isinstance(d, str) else d for d in dim] for i in range(3)]
        for name, dim in dims.items()
    }
    settings = {**SETTINGS, "plugins": [SPEC_VERIFY, KV_ROLLBACK], "profiles": [shapes]}
    return {"onnx": str(folder / "step.onnx"), "variant": "tensorrt_rtx", "settings": settings}


def test_caches_of_any_length_take_no_scratch_memory(tmp_path):
    requests = [step_request(tmp_path / str(rows), rows) for rows in (32, 65536)]
    control = step_request(tmp_path / "read", 65536, reads_compacted=True)
    few, many, copied = (
        int(ACTIVATIONS.search("\n".join(answer["lines"]))[1]) for answer in answers([*requests, control])
    )
    batch = graphs.RANGES["batch"][2]
    one_cache = batch * graphs.HEADS * 65536 * graphs.HEAD_DIM * 2
    assert many == few < one_cache <= copied - few


def test_a_shape_that_is_an_input_would_be_seen(tmp_path):
    value = onnx.helper.make_tensor_value_info
    inputs = [value("x", onnx.TensorProto.FLOAT16, ["batch", 16]), value("wanted", onnx.TensorProto.INT64, [2])]
    node = onnx.helper.make_node("Reshape", ["x", "wanted"], ["y"])
    graph = onnx.helper.make_graph([node], "g", inputs, [value("y", onnx.TensorProto.FLOAT16, ["a", "b"])])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=11),
        tmp_path / "g.onnx",
    )
    shapes = {"x": [[1, 16], [2, 16], [4, 16]]}
    request = {
        "onnx": str(tmp_path / "g.onnx"),
        "variant": "tensorrt_rtx",
        "settings": {**SETTINGS, "profiles": [shapes]},
    }
    assert answers([request])[0]["shape"] == ["wanted"]
