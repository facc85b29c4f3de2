# SPDX-License-Identifier: Apache-2.0
"""Graphs of a few nodes, requests to build them, and faulty children."""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper as h
from onnx import numpy_helper

from speccompile.backends.tensorrt.builder import BuildRequest
from speccompile.core.specs import GraphSpec, TensorSpec

SETTINGS = {
    "flags": [],
    "cleared_flags": [],
    "compute_capabilities": [],
    "workspace_gib": "auto",
    "optimization_level": "auto",
    "plugins": [],
}
ROWS = (1, 2, 4)  # the profile of dim "batch"


def linear_request(folder, *, op="MatMul", domain="", dtype=np.float16, shapes=None, **settings):
    """x [batch, 16] times a weight, then `op` (when it is another); built for 1 to 4 rows."""
    kind = h.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = numpy_helper.from_array(np.ones((16, 16), dtype), "weight")
    nodes = [h.make_node("MatMul", ["x", "weight"], ["y" if op == "MatMul" else "z"], name="linear")]
    if op != "MatMul":
        nodes.append(h.make_node(op, ["z"], ["y"], name="odd", domain=domain))
    value = {name: h.make_tensor_value_info(name, kind, ["batch", 16]) for name in "xy"}
    graph = h.make_graph(nodes, "g", [value["x"]], [value["y"]], [weight])
    opsets = [h.make_opsetid("", 24), h.make_opsetid("speccompile", 1)]
    folder.mkdir(exist_ok=True)
    onnx.save(h.make_model(graph, opset_imports=opsets, ir_version=11), folder / "g.onnx")
    dims, name = ("batch", 16), np.dtype(dtype).name
    spec = GraphSpec("tiny", (TensorSpec("x", dims, name),), (TensorSpec("y", dims, name),))
    shapes = shapes or [{"x": [[n, 16] for n in ROWS]}]
    return BuildRequest(folder / "g.onnx", spec, "tensorrt_rtx", {**SETTINGS, "profiles": shapes, **settings})


def misbehaving(code):
    """A command line that runs `code` instead of the builder's child, with `send(event)` defined."""
    prelude = (
        "import json, os, signal, sys, time\n"
        "request = json.load(sys.stdin)\n"
        "stream = os.fdopen(int(sys.argv[1]), 'w', buffering=1)\n"
        "send = lambda event: print(json.dumps(event), file=stream)\n"
    )
    return [sys.executable, "-c", prelude + code]


def leftovers(folder: Path):
    """Files in a folder besides the graph."""
    return sorted(f.name for f in folder.iterdir() if f.name != "g.onnx")
