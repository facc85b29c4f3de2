# SPDX-License-Identifier: Apache-2.0
"""Quantises the linears of a target over calibration text: see `passes.compensation`. Its LM head has 8 bits.

A process of its own (`calibrate` starts it) maps the float32 weights and collects the sums of x x^T of the inputs x of
linears in groups of at most half of the available memory, or `MIN_GROUP_BYTES`, or one input. For each group the text
is read again, up to its last linear. A thread needs another 20 in^2 bytes while it factorises.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.backends.feeds import neutral_value, shape_from_dims
from speccompile.backends.machine import available_memory, num_usable_cores, read_peak_rss
from speccompile.checkpoints.texts import TextSample
from speccompile.core import specs
from speccompile.core.specs import GraphSpec, all_sure, spec_from_json
from speccompile.errors import BuildError
from speccompile.ops.grid import Grid
from speccompile.passes.compensation import compensated_grid, factor_of
from speccompile.passes.quantize_blocks import grid_from_weight

MIN_GROUP_BYTES = 2 << 30  # of the sums of a group
_SUM_BYTES = 4  # float32: the damping is far above its rounding
PIECE = 256  # tokens of a text that are read at once
NUM_TOKENS = 6144  # of interest; with the prompts about 8000. On the example target twice as many lower KL by 8 %.


@dataclass(frozen=True)
class Calibrated:
    """The quantised linears of a target."""

    grids: Mapping[str, Grid]
    num_tokens: int
    peak_rss_bytes: int


@dataclass(frozen=True)
class Linear:
    """A product with constant weights."""

    weights: str
    source: str
    num_in: int


def calibrate(graph: Path, spec: GraphSpec, sample: TextSample, scratch: Path) -> Calibrated:
    """Quantises all linears of a lowered float32 graph in a child process.

    Args:
        scratch: a new folder for the quantised weights, which stay mapped from it.

    Raises:
        BuildError: the child died, or an input of a linear is not finite.
    """
    scratch.mkdir()
    request = {"graph": str(graph), "spec": spec.json_from_spec(), "sample": asdict(sample), "scratch": str(scratch)}
    command = [sys.executable, "-m", "speccompile.backends.onnxruntime.calibration"]
    # Threads take one linear each: products of one thread do not depend on the number of cores.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        got = f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
        todo = "See the message; target.calibration: none rounds the weights instead."
        raise BuildError(f"calibration of {spec.name}", got, "quantised weights", todo)
    answer = json.loads(done.stdout.splitlines()[-1])
    grids = {name: read_grid(scratch / str(index), facts) for index, (name, facts) in enumerate(answer["weights"])}
    return Calibrated(grids, answer["num_tokens"], answer["peak_rss_bytes"])


_ARRAYS = ("levels", "scales", "minimums")


def write_grid(folder: Path, grid: Grid) -> dict[str, int]:
    """Writes the arrays of a grid to a new folder; returns its numbers."""
    folder.mkdir()
    for name in _ARRAYS:
        if (array := getattr(grid, name)) is not None:
            np.save(folder / f"{name}.npy", array)
    return {"group": grid.group, "bits": grid.bits, "zero": grid.zero}


def read_grid(folder: Path, facts: Mapping[str, Any]) -> Grid:
    files = {name: folder / f"{name}.npy" for name in _ARRAYS}
    arrays = {name: np.load(file, mmap_mode="r") for name, file in files.items() if file.exists()}
    return Grid(arrays["levels"], arrays["scales"], **facts, minimums=arrays.get("minimums"))


def group_bytes() -> int:
    """Returns the bytes that the sums of a group may take."""
    return max(MIN_GROUP_BYTES, available_memory() // 2)


def groups_of(linears: Sequence[Linear], limit_bytes: int) -> list[list[str]]:
    """Returns the inputs of linears in groups whose sums fit the limit, in the order of the graph."""
    groups: list[list[str]] = [[]]
    total = 0
    for source, num_in in {linear.source: linear.num_in for linear in linears}.items():
        size = _SUM_BYTES * num_in**2
        if groups[-1] and total + size > limit_bytes:
            groups.append([])
            total = 0
        groups[-1].append(source)
        total += size
    return groups


class Collector:
    """Sums x x^T over the inputs x of linears. `graph`: the lowered float32 graph."""

    def __init__(self, graph: Path, spec: GraphSpec) -> None:
        import onnx_ir as ir

        from speccompile.backends.onnxruntime.engine import open_session
        from speccompile.passes.attach_grids import linears_of
        from speccompile.passes.edit import sizes_of
        from speccompile.passes.round_linears import head_of

        model = ir.load(graph)
        self._spec = spec
        self._weights = {str(value.name): value.const_value for _, value in linears_of(model)}
        self.linears = []
        for node, value in linears_of(model):
            source, weight = node.inputs[0], value.const_value
            assert source is not None and weight is not None
            if not source.is_graph_output():
                model.graph.outputs.append(source)
            self.linears.append(Linear(str(value.name), str(source.name), sizes_of(weight)[0]))
        self.head = head_of(model)
        # Its weights are those in the file of `graph`, beside which it is written.
        extended = graph.with_name("calibration.onnx")
        ir.save(model, extended)
        self._session = open_session(extended, {"threads": num_usable_cores(), "prepack": False})

    def weight(self, name: str) -> NDArray[np.float32]:
        """Returns weights [in, out], mapped from the file."""
        tensor = self._weights[name]
        assert tensor is not None
        return tensor.numpy()

    def sums(
        self, sources: Sequence[str], pieces: Sequence[NDArray[np.int64]], pool: ThreadPoolExecutor
    ) -> dict[str, NDArray[np.float32]]:
        """Returns [in, in] float32 by input, over all tokens of the pieces."""
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.only_execute_path_to_fetches = True
        totals: dict[str, NDArray[np.float32]] = {}

        def add(source: str, values: NDArray[np.float32]) -> None:
            rows = values.reshape(-1, values.shape[-1])
            if not np.isfinite(rows).all():
                raise BuildError(
                    f"calibration, {source}", "numbers that are not finite", "finite", "Check the weights."
                )
            product = rows.T @ rows
            if source in totals:
                totals[source] += product
            else:
                totals[source] = product

        for piece in pieces:
            list(pool.map(add, sources, self._session.run(list(sources), self._feeds(piece), options)))
        return totals

    def _feeds(self, piece: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        num = len(piece)
        sizes = {dim: num for tensor in self._spec.inputs for dim in tensor.dims if isinstance(dim, str)}
        sizes |= {"batch": 1, "draft_vocab": 1}
        feeds = {t.name: neutral_value(t.name, shape_from_dims(t, sizes), t.dtype) for t in self._spec.inputs}
        feeds |= {name: np.zeros(shape, np.float32) for name, shape in self._spec.state_shapes(1).items()}
        return {**feeds, **all_sure(self._spec, 1, num), specs.TOKENS: piece[None]}


def pieces_of(texts: Sequence[Sequence[int]], max_rows: int) -> list[NDArray[np.int64]]:
    """Cuts texts into pieces of at most `PIECE` tokens, or as many as the caches hold where that is less."""
    length = min(PIECE, max_rows or PIECE)
    return [np.array(text[i : i + length], np.int64) for text in texts for i in range(0, len(text), length)]


def quantise(
    collector: Collector, pieces: Sequence[NDArray[np.int64]], scratch: Path
) -> list[tuple[str, dict[str, int]]]:
    """Quantises all linears and writes them to folders 0, 1, ...; returns the names of their weights, and numbers."""
    names = list(dict.fromkeys(linear.weights for linear in collector.linears))
    facts: dict[str, dict[str, int]] = {}

    def write(name: str, grid: Grid) -> None:
        facts[name] = write_grid(scratch / str(names.index(name)), grid)

    body = [linear for linear in collector.linears if linear.weights != collector.head]
    if collector.head is not None:
        write(collector.head, grid_from_weight(collector.weight(collector.head), 8))
    with ThreadPoolExecutor(num_usable_cores()) as pool:
        for sources in groups_of(body, group_bytes()):
            sums = collector.sums(sources, pieces, pool)

            def compensate(source: str, sums: dict[str, NDArray[np.float32]] = sums) -> None:
                factor = factor_of(sums.pop(source))
                for name in dict.fromkeys(linear.weights for linear in body if linear.source == source):
                    write(name, compensated_grid(collector.weight(name), factor))

            list(pool.map(compensate, sources))
    return [(name, facts[name]) for name in names]


def main() -> None:
    """Child process: a request as JSON on standard input, the result as the last line of standard output."""
    from speccompile.backends.onnxruntime.answers import texts_of
    from speccompile.backends.onnxruntime.fidelity import sample_from_json

    request = json.load(sys.stdin)
    graph, spec = Path(request["graph"]), spec_from_json(request["spec"])
    texts = texts_of(graph, spec, sample_from_json(request["sample"]), NUM_TOKENS, measures=False)
    pieces = pieces_of([text.tokens for text in texts], spec.max_rows)
    names = quantise(Collector(graph, spec), pieces, Path(request["scratch"]))
    answer = {"weights": names, "num_tokens": sum(map(len, pieces)), "peak_rss_bytes": read_peak_rss()}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
