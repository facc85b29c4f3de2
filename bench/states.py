# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a Gated DeltaNet layer's recurrence and convolution: our CPU kernels beside the function bodies.

    python bench/states.py [--sizes 0.8b,4b] [--threads 1] [--seconds 20] [--library LIB.so] [--cpu-time]

Sizes are those of Qwen3.5. A step is written `owed + nodes`: accepted rows of the step before, which are applied first,
and nodes that are drafts; `sure` nodes are applied at once (a plain step, a chunk of a prompt). States are bound in
place, and a dozen layers with states of their own take turns. `LinearAttention` is ONNX Runtime's operator over as
many rows: it keeps no state to go back to, and has no trees. Medians and minima are printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from speccompile.backends.onnxruntime.engine import session_options
from speccompile.backends.onnxruntime.kernel_library import find_library
from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES, TREE_MASK
from speccompile.core.tree import TokenTree, chain_mask
from speccompile.ops.gated_delta import pending_width
from speccompile.ops.op import DOMAIN, OPSET, VERSION
from speccompile.ops.registry import OPS, functions

HEADS = {"0.8b": (16, 16), "4b": (16, 32), "27b": (16, 48)}  # of keys, of values
DIM, KERNEL, PENDING, LAYERS = 128, 4, 8, 12
STEPS = {"1 sure": (0, 1, True), "0 + 1": (0, 1, False), "1 + 2": (1, 2, False), "2 + 4": (2, 4, False),
         "4 + 8": (4, 8, False), "4 + tree of 8": (4, 8, False), "64 sure": (0, 64, True)}  # fmt: skip
TREE = (-1, 0, 0, 0, 1, 1, 2, 4)  # parents: three children, of which two have children
IN_PLACE = {"state": "state_updated", "pending": "pending_updated", "rows": "rows_updated", "past": "present"}
TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Form:
    """One way to compute an op.

    Args:
        name: in the table.
        op: op type.
        domain: its domain.
        library: with our kernels, where there is a file.
    """

    name: str
    op: str
    domain: str = DOMAIN
    library: Path | None = None


def inputs_of(form: Form, size: str, step: str) -> Arrays:
    """Returns the inputs of one layer, in order."""
    (key_heads, value_heads), (owed, nodes, is_sure) = HEADS[size], STEPS[step]
    rng, channels = np.random.default_rng(0), (2 * key_heads + value_heads) * DIM
    if form.domain != DOMAIN:
        nodes += owed

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal((1, *shape)) * 0.1).astype(np.float32)

    q, k, v = (normal(nodes, heads * DIM) for heads in (key_heads, key_heads, value_heads))
    g, beta = -np.abs(normal(nodes, value_heads)), np.abs(normal(nodes, value_heads))
    state = normal(value_heads, DIM, DIM)
    if form.domain != DOMAIN:
        return {"q": q, "k": k, "v": v, "past": state, "g": g, "beta": beta}
    counts = {LENGTHS: 20, STATE_LENGTHS: 20 - owed, SURE_NODES: nodes * is_sure}
    tree = np.array([TREE])
    mask = TokenTree(tree, tree, np.array([nodes])).mask() if "tree" in step else chain_mask(1, nodes)
    held = {**{name: np.array([count]) for name, count in counts.items()}, TREE_MASK: mask}
    if form.op == "ConvRows":
        weights = {"weight": normal(channels, KERNEL)[0], "bias": normal(channels)[0]}
        return {"x": normal(nodes, channels), **weights, "rows": normal(KERNEL - 1 + PENDING, channels), **held}
    pending = -np.abs(normal(PENDING, pending_width(key_heads, value_heads, DIM, DIM)))
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state, "pending": pending, **held}


def open_form(form: Form, size: str, threads: int) -> ort.InferenceSession:
    """Opens the op with dims that are not known."""
    key_heads, value_heads = HEADS[size]
    names = inputs_of(form, size, "1 sure")
    if form.domain == DOMAIN:
        outputs = [tensor.name for tensor in OPS[form.op].outputs]
        heads = {"num_key_heads": key_heads, "num_value_heads": value_heads, "scale": DIM**-0.5}
        attributes = {**OPS[form.op].attributes, **(heads if form.op == "GatedDelta" else {"activation": 1})}
    else:
        outputs, attributes = ["out", "present"], {"q_num_heads": key_heads, "kv_num_heads": value_heads}
    values = [
        [helper.make_tensor_value_info(n, TYPES[str(a.dtype)], [None] * a.ndim) for n, a in names.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
    ]
    node = helper.make_node(form.op, list(names), outputs, domain=form.domain, **attributes)
    model = helper.make_model(
        helper.make_graph([node], form.op, *values),
        opset_imports=[helper.make_opsetid(*opset) for opset in (("", OPSET), (DOMAIN, VERSION), ("com.microsoft", 1))],
        functions=functions([form.op]) if form.domain == DOMAIN else [],
        ir_version=11,
    )
    options = session_options({"threads": threads})
    if form.library is not None:
        options.register_custom_ops_library(str(form.library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bindings_of(session: ort.InferenceSession, layers: list[Arrays]) -> list[ort.IOBinding]:
    """Returns a binding of each layer, whose states are updated in place."""
    bindings = []
    for arrays in layers:
        binding = session.io_binding()
        for name, array in arrays.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            if name in IN_PLACE:
                binding.bind_output(IN_PLACE[name], "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        binding.bind_output("out", "cpu")
        bindings.append(binding)
    return bindings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.8b,4b")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, on a machine that others use too")
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1: waiting for other threads is CPU time too")
    clock: Callable[[], float] = time.process_time if args.cpu_time else time.perf_counter
    library = args.library or find_library()
    forms = [Form("body", "GatedDelta"), Form("LinearAttention", "LinearAttention", "com.microsoft")]
    forms += [Form("body", "ConvRows")]
    if library is not None:
        forms += [Form("kernel", op, library=library) for op in ("GatedDelta", "ConvRows")]
    runs, kept = {}, []
    for size in args.sizes.split(","):
        for form in forms:
            session = open_form(form, size, args.threads)
            for step in STEPS:
                layers = [inputs_of(form, size, step) for _ in range(LAYERS)]
                kept.append(layers)  # the bindings refer to their memory
                runs[size, form, step] = session, bindings_of(session, layers)
    times: dict[tuple[str, Form, str], list[float]] = {key: [] for key in runs}
    end = time.monotonic() + args.seconds
    while time.monotonic() < end or not all(times.values()):
        for key, (session, bindings) in runs.items():
            start = clock()
            for binding in bindings:
                session.run_with_iobinding(binding)
            times[key].append((clock() - start) * 1e3 / LAYERS)
    print(f"{library.name if library else 'no library'}, {args.threads} threads, ms a layer: median (minimum)")
    print("| size | op | | " + " | ".join(STEPS) + " |")
    print("|---|---|---|" + "---|" * len(STEPS))
    for size in args.sizes.split(","):
        for form in sorted(forms, key=lambda form: form.op != "ConvRows"):
            cells = [times[size, form, step] for step in STEPS]
            row = " | ".join(f"{statistics.median(found):.3f} ({min(found):.3f})" for found in cells)
            print(f"| {size} | {form.op} | {form.name} | {row} |")


if __name__ == "__main__":
    main()
