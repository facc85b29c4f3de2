# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of all linears of a model by number of rows: our CPU kernels beside ONNX Runtime's, interleaved.

    python bench/kernels.py [--shapes padded] [--rows 1,2,4,8,16] [--threads 2] [--seconds 30] [--library LIB.so]

The shapes are those of the example target, `unpadded` 16M and `padded` 110M parameters, and of SmolLM2 135M. Every form
has weights of its own, mapped from files, and is measured in turns in one process; medians and minima are printed, with
the bytes that a run reads and the GB/s of one row. `--library` takes a library that was compiled for another
instruction set.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from speccompile.backends.onnxruntime.engine import session_options
from speccompile.backends.onnxruntime.kernel_library import find_library
from speccompile.backends.onnxruntime.linear_cases import random_grid
from speccompile.ops.registry import attach_functions
from speccompile.passes.attach_grids import attach_grids, linears_of
from speccompile.passes.base import Pass
from speccompile.passes.edit import Editor, sizes_of
from speccompile.passes.pack_linears import pack_linears_pass
from speccompile.passes.quantize_blocks import quantize_blocks_pass
from speccompile.passes.save import save_model

# Layers, hidden, Q with K and V, inner, vocabulary.
SHAPES = {
    "unpadded": (8, 384, 640, 1024, 8192),
    "padded": (8, 384, 640, 11200, 8192),
    "smollm2": (30, 576, 960, 1536, 49152),
}


def attach_minimums(model: ir.Model) -> int:
    """Gives every linear random 4-bit weights with a scale and a minimum for 32."""
    weights = {str(value.name): value.const_value for _, value in linears_of(model)}
    dims = {name: sizes_of(weight) for name, weight in weights.items() if weight is not None}
    grids = {n: random_grid("Int4Min", *size, 0, group=32, dtype="float16") for n, size in dims.items()}
    return attach_grids(model, grids)


PASSES: dict[str, tuple[Pass, ...]] = {
    "ort fp32": (),
    "own F32": (pack_linears_pass("float"),),
    "own Bf16": (pack_linears_pass("float"),),
    "ort int8": (quantize_blocks_pass(8),),
    "own Int8": (pack_linears_pass("int8"),),
    "ort int4": (quantize_blocks_pass(4),),
    "own Int4": (pack_linears_pass("int4"),),
    "own Int4Min": (Pass("attach_minimums", attach_minimums), pack_linears_pass("stored")),
}


@dataclass
class Stack:
    """All linears of a model in one form, as a session with outputs that ONNX Runtime allocates."""

    name: str
    session: ort.InferenceSession
    num_bytes: int
    bindings: dict[int, ort.IOBinding]

    def time_ms(self, rows: int, clock: Callable[[], float]) -> float:
        """Returns the milliseconds of one run."""
        start = clock()
        self.session.run_with_iobinding(self.bindings[rows])
        return (clock() - start) * 1e3


def make_model(shapes: str, *, is_bfloat16: bool) -> ir.Model:
    """Returns the linears side by side, each with random weights of its own."""
    layers, hidden, qkv, inner, vocab = SHAPES[shapes]
    rng = np.random.default_rng(0)
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}, name="linears"), ir_version=11)
    inputs = {}
    for size in sorted({hidden, inner}):
        inputs[size] = ir.Value(
            name=f"x{size}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, "rows", size])
        )
        model.graph.inputs.append(inputs[size])
    layer = [(hidden, qkv), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
    for index, (num_in, num_out) in enumerate([*layer * layers, (hidden, vocab)]):
        weight = rng.standard_normal((num_in, num_out), dtype=np.float32) * np.float32(0.05)
        if is_bfloat16:
            weight = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        edit = Editor(model)
        out = edit.op("MatMul", inputs[num_in], edit.const(weight, f"w{index}"))
        out.name, out.type, out.shape = f"y{index}", inputs[num_in].type, ir.Shape([1, "rows", num_out])
        model.graph.outputs.append(out)
    return model


def open_stack(name: str, shapes: str, rows: list[int], threads: int, library: Path | None, folder: Path) -> Stack:
    model = make_model(shapes, is_bfloat16=name == "own Bf16")
    for entry in PASSES[name]:
        entry(model)
    attach_functions(model)
    path = folder / name.replace(" ", "-") / "graph.onnx"
    save_model(model, path)
    options = session_options({"threads": threads})
    if library is not None and name.startswith("own"):
        options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    bindings, rng = {}, np.random.default_rng(1)
    for count in rows:
        binding = session.io_binding()
        for value in session.get_inputs():
            binding.bind_cpu_input(value.name, rng.standard_normal((1, count, value.shape[2]), dtype=np.float32))
        for value in session.get_outputs():
            binding.bind_output(value.name, "cpu")
        bindings[count] = binding
    return Stack(name, session, (path.parent / "graph.onnx.data").stat().st_size, bindings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="padded")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--forms", default=",".join(PASSES))
    parser.add_argument("--library", type=Path)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, on a machine that others use too")
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1: waiting for other threads is CPU time too")
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows, library = [int(count) for count in args.rows.split(",")], args.library or find_library()
    with tempfile.TemporaryDirectory() as folder:
        stacks = [
            open_stack(name, args.shapes, rows, args.threads, library, Path(folder)) for name in args.forms.split(",")
        ]
        times: dict[tuple[str, int], list[float]] = {(stack.name, count): [] for stack in stacks for count in rows}
        end = time.monotonic() + args.seconds
        while time.monotonic() < end or not all(times.values()):
            for stack in stacks:
                stack.time_ms(rows[0], clock)  # the caches hold another form's weights
                for count in rows:
                    times[stack.name, count] += [stack.time_ms(count, clock) for _ in range(2)]
    print(f"{library.name if library else 'no library'}, {args.threads} threads, {args.shapes}, ms: median (minimum)")
    print("| form | MB | GB/s | " + " | ".join(str(count) for count in rows) + " |")
    print("|---|---|---|" + "---|" * len(rows))
    for stack in stacks:
        found = [times[stack.name, count] for count in rows]
        cells = " | ".join(f"{statistics.median(t):.2f} ({min(t):.2f})" for t in found)
        speed = stack.num_bytes / statistics.median(found[0]) / 1e6
        print(f"| {stack.name} | {stack.num_bytes / 1e6:.0f} | {speed:.1f} | {cells} |")


if __name__ == "__main__":
    main()
