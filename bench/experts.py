# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a step of a random mixture of experts by nodes: packed experts beside those that are gathered.

    python bench/experts.py [--shapes mixtral,qwen3_moe] [--threads 1] [--seconds 20] [--cpu-time]

`gathered` is the export as it comes: float32 experts, copied by the experts of each row, with every other linear in
the form beside. Tokens are drawn anew in every step, so that its rows choose different experts. Ways and numbers of
nodes take turns; medians are printed, and the time of 4 nodes over that of one.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from speccompile.backends.base import LoadJob
from speccompile.backends.onnxruntime.engine import OrtEngine, load_engine
from speccompile.backends.writing import lower_and_save
from speccompile.core import specs
from speccompile.core.specs import GraphSpec
from speccompile.export.decoder import export_decoder
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from speccompile.passes.pipelines import PACKED, onnxruntime_table

_COMMON = {"vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64,
           "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip
SHAPES = {
    "mixtral": {**_COMMON, "model_type": "mixtral", "intermediate_size": 1024, "num_local_experts": 8},
    "qwen3_moe": {**_COMMON, "model_type": "qwen3_moe", "moe_intermediate_size": 256, "num_experts": 64,
                  "num_experts_per_tok": 8, "decoder_sparse_step": 1},
}  # fmt: skip
NODES, LENGTH, MAX_ROWS = (1, 2, 4, 8), 64, 128
Way = tuple[str, bool]  # quantisation; whether experts are packed


def open_ways(shape: str, threads: int, folder: Path) -> dict[Way, OrtEngine]:
    """Exports the shape with random weights and opens it in every way, with our kernels."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    model, dims = export_decoder(folder, weights="random", max_seq_len=MAX_ROWS)
    spec: GraphSpec = verified_spec(decoder_spec("target", dims))
    engines = {}
    for quantization in ("none", "int8", "int4"):
        for is_packed in (False, True):
            path = folder / f"{quantization}-{is_packed}" / "graph.onnx"
            path.parent.mkdir()
            lower_and_save(model, onnxruntime_table(spec, quantization, PACKED, packs_experts=is_packed), path)
            settings = {"threads": threads}
            engines[quantization, is_packed] = load_engine(LoadJob(path, spec, max_rows=MAX_ROWS, tuning=settings))
    return engines


def measure(engines: dict[Way, OrtEngine], seconds: float, clock: Callable[[], float]) -> dict[Way, dict[int, float]]:
    """Returns median milliseconds by way and nodes."""
    rng = np.random.default_rng(0)
    times: dict[Way, dict[int, list[float]]] = {way: {nodes: [] for nodes in NODES} for way in engines}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for nodes in NODES:
            feeds = {specs.TOKENS: rng.integers(0, 32000, (1, nodes)), specs.LENGTHS: np.array([LENGTH])}
            for way, engine in engines.items():
                begin = clock()
                engine.run(feeds)
                times[way][nodes].append((clock() - begin) * 1e3)
    return {way: {nodes: statistics.median(ms[1:]) for nodes, ms in row.items()} for way, row in times.items()}


def main() -> None:
    """Prints one table a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--cpu-time", action="store_true", help="of the process: for a machine with other work")
    options = parser.parse_args()
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            engines = open_ways(shape, options.threads, Path(folder))
            clock = time.process_time if options.cpu_time else time.perf_counter
            rows = measure(engines, options.seconds, clock)
        print(f"\n{shape}, {options.threads} threads, milliseconds by nodes")
        print(f"{'linears':8}{'experts':>10}" + "".join(f"{n:>9}" for n in NODES) + f"{'4 / 1':>8}")
        for (quantization, is_packed), row in rows.items():
            told = "".join(f"{row[n]:9.2f}" for n in NODES)
            print(f"{quantization:8}{'packed' if is_packed else 'gathered':>10}{told}{row[4] / row[1]:8.2f}")


if __name__ == "__main__":
    main()
