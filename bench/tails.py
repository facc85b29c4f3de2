# SPDX-License-Identifier: Apache-2.0
"""Microseconds of the tails of target and draft: our CPU kernels beside the function bodies, interleaved.

    python bench/tails.py [--vocab 16384,128256] [--nodes 1,8] [--threads 2] [--seconds 20] [--library LIB.so]

`verify` is SpecVerify and FiniteToken over a chain whose drafts are all accepted, the longest walk there is; `drawn`
has draft distributions. `sample` is SampleToken (one node), `top` TopTokens with 8 candidates, `probs` NodeProbs.
Medians and minima are printed.
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
from speccompile.ops.op import DOMAIN, OPSET, VERSION
from speccompile.ops.registry import OPS, functions
from speccompile.ops.spec_verify import spec_verify

WARPS = {"greedy": (0.0, 0, 1.0), "sampled": (0.8, 0, 1.0), "top_k 50": (0.8, 50, 1.0), "top_p 0.9": (0.8, 0, 0.9)}
TAILS = {
    "verify": ("SpecVerify", "FiniteToken"),
    "sample": ("SampleToken",),
    "top": ("TopTokens",),
    "probs": ("NodeProbs",),
}
TAILS["drawn"] = TAILS["verify"]
TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    tail: str
    warp: str
    vocab: int
    nodes: int

    def is_sensible(self) -> bool:
        """Whether the tail has this form: TopTokens is not warped, SampleToken has one node, a greedy slot no draft."""
        if self.tail == "top":
            return self.warp == "greedy"
        if self.tail == "sample":
            return self.nodes == 1
        return self.tail == "verify" or (self.warp != "greedy" and (self.tail == "probs" or self.nodes > 1))


def open_tail(ops: tuple[str, ...], vocab: int, threads: int, library: Path | None) -> ort.InferenceSession:
    """Opens the ops of a tail in one graph, with the bodies that a build attaches."""
    inputs = {t.name: t for name in ops for t in OPS[name].inputs}
    outputs = {t.name: t for name in ops for t in OPS[name].outputs}
    nodes = [
        helper.make_node(
            name,
            [t.name for t in OPS[name].inputs],
            [t.name for t in OPS[name].outputs],
            domain=DOMAIN,
            **OPS[name].attributes,
        )
        for name in ops
    ]
    values = [
        [helper.make_tensor_value_info(t.name, TYPES[t.dtype], None) for t in side]
        for side in ([t for t in inputs.values() if t.name not in outputs], outputs.values())
    ]
    model = helper.make_model(
        helper.make_graph(nodes, ops[0], *values),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        functions=functions(ops, vocab),
        ir_version=11,
    )
    options = session_options({"threads": threads})
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feeds_of(row: Row) -> dict[str, np.ndarray]:
    """Returns inputs of one slot; peaked logits, as models give them."""
    rng = np.random.default_rng(0)
    temperature, top_k, top_p = WARPS[row.warp]
    shape = (1, row.nodes, row.vocab)
    logits = (rng.standard_normal(shape, dtype=np.float32) * 2.5).astype(np.float32)
    feeds = {
        "logits": logits,
        "tokens": np.zeros((1, row.nodes), np.int64),
        "parents": np.arange(-1, row.nodes - 1)[None],
        "draft_probs": np.zeros((1, row.nodes, 1), np.float32),
        "uniforms": np.full((1, row.nodes, 2), 0.3, np.float32),
        "temperature": np.array([temperature], np.float32),
        "top_k": np.array([top_k]),
        "top_p": np.array([top_p], np.float32),
    }
    for node in range(1, row.nodes):
        feeds["tokens"][0, node] = spec_verify(**feeds)[2][0]
    if row.tail == "drawn":
        feeds["draft_probs"] = np.full(shape, 1 / row.vocab, np.float32)
    if row.tail == "sample":
        feeds["uniforms"] = feeds["uniforms"][:, 0, 0]
    return feeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", default="16384,128256")
    parser.add_argument("--nodes", default="1,8")
    parser.add_argument("--tails", default=",".join(TAILS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, on a machine that others use too")
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1: waiting for other threads is CPU time too")
    clock: Callable[[], float] = time.process_time if args.cpu_time else time.perf_counter
    library = args.library or find_library()
    rows = [
        row
        for vocab in args.vocab.split(",")
        for tail in args.tails.split(",")
        for warp in WARPS
        for nodes in args.nodes.split(",")
        if (row := Row(tail, warp, int(vocab), int(nodes))).is_sensible()
    ]
    sessions = {
        (tail, vocab, kind): open_tail(TAILS[tail], vocab, args.threads, kind)
        for tail, vocab in {(row.tail, row.vocab) for row in rows}
        for kind in (None, library)
    }
    bindings = {}
    for row in rows:
        feeds = feeds_of(row)
        for kind in (None, library):
            session = sessions[row.tail, row.vocab, kind]
            binding = session.io_binding()
            for value in session.get_inputs():
                binding.bind_cpu_input(value.name, feeds[value.name])
            for value in session.get_outputs():
                binding.bind_output(value.name, "cpu")
            bindings[row, kind] = session, binding
    times: dict[tuple[Row, Path | None], list[float]] = {key: [] for key in bindings}
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        for key, (session, binding) in bindings.items():
            session.run_with_iobinding(binding)  # what ran before has other data in the caches
            for _ in range(3):
                start = clock()
                session.run_with_iobinding(binding)
                times[key].append((clock() - start) * 1e6)
    print(f"{library.name if library else 'no library'}, {args.threads} threads, us: median (minimum)")
    print("| vocab | tail | warp | nodes | bodies | kernels | ratio of medians |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        body, own = (times[row, kind] for kind in (None, library))
        cells = " | ".join(f"{statistics.median(t):.0f} ({min(t):.0f})" for t in (body, own))
        ratio = statistics.median(body) / statistics.median(own)
        print(f"| {row.vocab} | {row.tail} | {row.warp} | {row.nodes} | {cells} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
