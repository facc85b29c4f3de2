# SPDX-License-Identifier: Apache-2.0
"""Measures this machine in under a minute: products of our kernels by precision, rows and size, and a launch.

The weights are random and of no model, in the proportions of a gated decoder layer, as kernels have other speeds for
other shapes: stacks of 3, 13 and 56 million weights, which come from nearer and further caches or from memory.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from speccompile.backends.machine import num_usable_cores
from speccompile.backends.onnxruntime.tune import cpu_name
from speccompile.bundle.format import digest_from_json
from speccompile.common.cache_root import cache_root, make_cache_folder
from speccompile.errors import BuildError
from speccompile.planner.machine import BITS, THIS, Machine
from speccompile.version import VERSION

if TYPE_CHECKING:
    import onnxruntime

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_STACKS = (2, 384), (2, 768), (5, 1024)  # layers and hidden size
_LAYER = ((3, 5), (3, 3), (3, 16), (8, 3))  # inputs and outputs of its linears, in thirds of the hidden size
_LAUNCHES = ((32, 32),) * 64
# Of `pack_linears_pass`; weights that are those of bfloat16 are packed so.
_FORMS: dict[str, Any] = {"float32": "float", "bf16": "float", "int8": "int8", "int4": "int4"}
_SECONDS = 0.12  # of all repeats of one number of rows, three at least
FOLDER = "machines"  # of the cache


def kept_machine(threads: int) -> Machine | None:
    """Returns what was measured on this machine with so many threads; None: nothing was, or by another version."""
    path = cache_root() / FOLDER / _name(threads)
    return machine_from_json(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _name(threads: int) -> str:
    return digest_from_json({"cpu": cpu_name(), "threads": threads, "version": VERSION, "rows": ROWS})[:16] + ".json"


def measure_machine(
    threads: int,
    progress: Callable[[str], None] = lambda what: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Machine:
    """Returns this machine with so many threads, and keeps it in the cache.

    Args:
        clock: seconds; the process's CPU time says more of a single thread beside other work.

    Raises:
        BuildError: there is no library of CPU kernels.
    """
    from speccompile.backends.onnxruntime.kernel_library import find_library
    from speccompile.bundle.files import write_file

    if find_library() is None:
        got, todo = "no library of CPU kernels", "Install a C++ compiler: docs/explanation/kernels.md#the-library."
        raise BuildError("plan --measure", got, "our kernels, whose speed is asked for", todo)
    measured = {}
    for precision in BITS:
        progress(precision)
        sizes = []
        for layers, hidden in _STACKS:
            shapes = [(hidden * a // 3, hidden * b // 3) for a, b in _LAYER] * layers
            num = sum(a * b for a, b in shapes)
            times = _time_stack(shapes, precision, threads, ROWS, clock)
            sizes.append([num * BITS[precision] / 8, [[rows, s / num] for rows, s in times.items()]])
        measured[precision] = sizes
    progress("launches")
    launch_s = _time_stack(_LAUNCHES, "float32", threads, (1,), clock)[1] / len(_LAUNCHES)
    points: Any = measured["float32"][1][1]
    found = {
        "name": THIS,
        "kind": "cpu",
        "num_units": threads,
        "memory_bytes": _memory_bytes(),
        "bandwidth": BITS["float32"] / 8 / points[0][1],
        "launch_s": launch_s,
        "source": f"measured on {cpu_name()}, {threads} threads of {num_usable_cores()}",
        "measured": measured,
    }
    write_file(make_cache_folder(FOLDER) / _name(threads), json.dumps(found, indent=1) + "\n")
    return machine_from_json(found)


def machine_from_json(record: Mapping[str, Any]) -> Machine:
    measured = {
        key: tuple((size, tuple((int(n), s) for n, s in points)) for size, points in sizes)
        for key, sizes in record["measured"].items()
    }
    return Machine(**{**record, "measured": measured})


def _memory_bytes() -> float:
    import os

    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _time_stack(
    shapes: Sequence[tuple[int, int]],
    precision: str,
    threads: int,
    rows: Sequence[int],
    clock: Callable[[], float],
) -> dict[int, float]:
    """Returns the seconds of a run of all linears side by side, by rows: a low quantile, as noise only adds."""
    with tempfile.TemporaryDirectory() as folder:
        session = _open_stack(shapes, precision, threads, Path(folder))
        return {count: _time_session(session, count, clock) for count in rows}


def _open_stack(
    shapes: Sequence[tuple[int, int]], precision: str, threads: int, folder: Path
) -> onnxruntime.InferenceSession:
    import onnx_ir as ir
    import onnxruntime

    from speccompile.backends.onnxruntime.engine import session_options
    from speccompile.ops.registry import attach_functions
    from speccompile.passes.edit import Editor
    from speccompile.passes.pack_linears import pack_linears_pass
    from speccompile.passes.save import save_model

    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="linears"), ir_version=11)
    rng, sources = np.random.default_rng(0), {}
    for num_in in sorted({num_in for num_in, _ in shapes}):
        of_type, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, "rows", num_in])
        sources[num_in] = ir.Value(name=f"x{num_in}", type=of_type, shape=shape)
        model.graph.inputs.append(sources[num_in])
    for index, (num_in, num_out) in enumerate(shapes):
        weight = rng.standard_normal((num_in, num_out), dtype=np.float32) * np.float32(0.05)
        if precision == "bf16":
            weight = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        edit = Editor(model)
        out = edit.op("MatMul", sources[num_in], edit.const(weight, f"w{index}"))
        out.name, out.type, out.shape = f"y{index}", sources[num_in].type, ir.Shape([1, "rows", num_out])
        model.graph.outputs.append(out)
    pack_linears_pass(_FORMS[precision]).run(model)
    attach_functions(model)
    path = folder / "graph.onnx"
    save_model(model, path)
    return onnxruntime.InferenceSession(str(path), session_options({"threads": threads}), ["CPUExecutionProvider"])


def _time_session(session: onnxruntime.InferenceSession, rows: int, clock: Callable[[], float]) -> float:
    binding, rng = session.io_binding(), np.random.default_rng(1)
    for value in session.get_inputs():
        binding.bind_cpu_input(value.name, rng.standard_normal((1, rows, value.shape[2]), dtype=np.float32))
    for value in session.get_outputs():
        binding.bind_output(value.name, "cpu")
    session.run_with_iobinding(binding)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < _SECONDS and len(times) < 200):
        start = clock()
        session.run_with_iobinding(binding)
        times.append(clock() - start)
    return float(np.quantile(times, 0.05))
