# SPDX-License-Identifier: Apache-2.0
"""SpecVerify and KVRollback on a GPU: against their numpy twins, and their GB/s beside a device copy of the same run.

    python -m bench.gpu_check.kernels > kernels.json

Needs cuda-python, numpy, and nvcc or NVRTC. Integers must be equal, except where a draw or top_p lies so near to a
decision that float sums in another order decide otherwise; such cases are counted, one in a hundred at most.
Logits are read cold: launches take turns among buffers that together are larger than the GPU's cache. What is demanded
is a share of a large copy's bandwidth; a copy of as few bytes as the demanded cases read or move, timed like them,
stands beside it, since for a few megabytes the start of a kernel counts.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu_check import report
from speccompile.backends.cuda.device import Device, Memory, open_device
from speccompile.backends.tensorrt.kernels import launch_rollback, launch_verify
from speccompile.backends.tensorrt.launches import DTYPES, SpecVerifyArgs, verify_workspace_bytes
from speccompile.ops.kv_rollback import kv_rollback
from speccompile.ops.spec_verify import spec_verify

VOCABS, BATCHES, NODES = (32000, 128256, 256000), (1, 8, 64), (1, 8, 16)
MODES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
DEMANDED = (128256, 8, 8)  # where a share of the copy's bandwidth is promised
DEMANDED_MOVES = 2 * 80 * 16 * 8 * 7 * 256  # bytes read and written: caches, slots, heads, rows moved, bytes of a row
VERIFY_SHARE, ROLLBACK_SHARE = 0.60, 0.70
MARGIN = 1e-6  # as near to a decision as float32 sums may err
COLD_BYTES = 1 << 30
ROUNDS, LAUNCHES = 7, 20
Case = dict[str, NDArray[Any]]
Verify = Callable[[Case, str], Sequence[NDArray[Any]]]


def logits_rows(rng: np.random.Generator, rows: int, vocab: int) -> NDArray[np.float32]:
    """Returns logits like a language model's: a broad floor, some tens of likely tokens. [rows, vocab] float32."""
    made = rng.normal(scale=2.0, size=(rows, vocab)).astype(np.float32)
    for row in made:
        row[rng.integers(0, vocab, 40)] += rng.uniform(4, 14, 40).astype(np.float32)
    return made


def tree_parents(nodes: int, is_chain: bool) -> list[int]:
    """Returns a chain, or a tree of which every inner node has two children."""
    return [node - 1 if is_chain else (node - 1) // 2 for node in range(nodes)]


def make_case(
    rng: np.random.Generator, batch: int, nodes: int, vocab: int, *, is_chain: bool, has_probs: bool, **warp: float
) -> Case:
    """Returns a call of SpecVerify; logits that float16 and bfloat16 hold exactly, half of the drafts likely."""
    logits = logits_rows(rng, batch * nodes, vocab).reshape(batch, nodes, vocab)
    logits = (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float16).astype(np.float32)
    parents = tree_parents(nodes, is_chain)
    parents[0] = -1
    best = np.take_along_axis(logits.argmax(-1), np.maximum([parents] * batch, 0), axis=1)
    tokens = np.where(rng.random((batch, nodes)) < 0.7, best, rng.integers(0, vocab, (batch, nodes)))
    dists = np.zeros((batch, nodes, 1), np.float32)
    if has_probs:
        dists = rng.random((batch, nodes, vocab)).astype(np.float32) ** 8
        np.put_along_axis(dists, tokens[..., None], dists.sum(-1, keepdims=True), axis=-1)
        dists /= dists.sum(-1, keepdims=True)
    return {
        "logits": logits,
        "tokens": tokens,
        "parents": np.array([parents] * batch, dtype=np.int64),
        "draft_probs": dists,
        "uniforms": rng.random((batch, nodes, 2)).astype(np.float32),
        "temperature": np.full(batch, warp.get("temperature", 1.0), np.float32),
        "top_k": np.full(batch, int(warp.get("top_k", 0)), np.int64),
        "top_p": np.full(batch, warp.get("top_p", 1.0), np.float32),
    }


def check_cases(vocabs: Sequence[int] = VOCABS, batches: Sequence[int] = (1, 5)) -> Iterator[tuple[str, Case]]:
    """Cases that are compared with the twin, with their names."""
    rng = np.random.default_rng(17)
    for vocab, batch, nodes, mode in itertools.product(vocabs, batches, (1, 8), MODES):
        for is_chain, has_probs in ((True, False), (False, True)):
            name = f"vocab {vocab}, batch {batch}, {nodes} nodes, {mode}, {'chain' if is_chain else 'tree with dists'}"
            yield name, make_case(rng, batch, nodes, vocab, is_chain=is_chain, has_probs=has_probs, **MODES[mode])


def is_same(one: Sequence[NDArray[Any]], other: Sequence[NDArray[Any]]) -> bool:
    """Returns whether two verdicts are equal."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def is_at_boundary(case: Case) -> bool:
    """Returns whether a shift of draws or of top_p by MARGIN changes the twin's verdict."""
    here = spec_verify(**case)
    for sign in (-1, 1):
        draws = np.clip(case["uniforms"].astype(np.float64) + sign * MARGIN, 0, 1 - 2**-24).astype(np.float32)
        masses = np.where(case["top_p"] < 1, np.clip(case["top_p"] + sign * MARGIN, 1e-6, 1), 1).astype(np.float32)
        if not is_same(spec_verify(**{**case, "uniforms": draws}), here):
            return True
        if not is_same(spec_verify(**{**case, "top_p": masses}), here):
            return True
    return False


def check_verify(verify: Verify, cases: Iterator[tuple[str, Case]]) -> list[dict[str, Any]]:
    """Returns the rows of the report: verdicts equal to the twin's, by dtype of the logits."""
    total, near, wrong = 0, 0, []
    for name, case, got, wanted in _verdicts(verify, cases):
        total += 1
        if not is_same(got, wanted):
            if is_at_boundary(case):
                near += 1
            else:
                wrong.append(name)
    counts = f"{total - near - len(wrong)} of {total} equal, {near} at a boundary" + "".join(
        f"; {w}" for w in wrong[:5]
    )
    is_right = total > 0 and not wrong and near <= max(1, total // 100)
    return [report.row("SpecVerify against the numpy twin", counts, "all equal, boundaries at most 1 %", is_right)]


def _verdicts(verify: Verify, cases: Iterator[tuple[str, Case]]) -> Iterator[tuple[str, Case, Any, Any]]:
    """Yields name, case, verdict, the twin's: in threads, as numpy sorts 256,000 logits a row for it."""
    pending: deque[tuple[str, Case, Any, Future[Any]]] = deque()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (name, case), dtype in zip(cases, itertools.cycle(DTYPES), strict=False):
            twin = pool.submit(spec_verify, **case)
            pending.append((f"{name}, {dtype}", case, verify(case, dtype), twin))
            if len(pending) > (os.cpu_count() or 1):  # a case takes up to 80 MB
                *made, twin = pending.popleft()
                yield (*made, twin.result())
        for *made, twin in pending:
            yield (*made, twin.result())


def bits_from_floats(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns the values in `dtype`; bfloat16 as its bits, uint16. They must be exact there."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(np.float16 if dtype == "float16" else np.float32)


@dataclass
class Bench:
    """Arrays on a device, and times on it.

    Args:
        device: where.
    """

    device: Device
    kept: list[Memory] = field(default_factory=list)

    def upload(self, array: NDArray[Any]) -> int:
        """Returns the address of a copy that lives until `clear`."""
        array = np.ascontiguousarray(array)
        memory = self.device.allocate(array.nbytes)
        self.device.copy(memory.address, array.ctypes.data, array.nbytes)
        self.device.synchronize()
        self.kept.append(memory)
        return memory.address

    def reserve(self, num_bytes: int, fill: int = 0xA5) -> int:
        """Returns the address of memory full of garbage."""
        memory = self.device.allocate(num_bytes)
        self.device.call("cudaMemsetAsync", memory.address, fill, num_bytes, self.device.stream)
        self.kept.append(memory)
        return memory.address

    def download(self, address: int, like: NDArray[Any]) -> NDArray[Any]:
        """Returns a copy of an array of that form."""
        array = np.empty_like(like)
        self.device.copy(array.ctypes.data, address, array.nbytes)
        self.device.synchronize()
        return array

    def clear(self) -> None:
        """Free all."""
        self.device.synchronize()
        self.kept.clear()

    def time_ms(self, work: Sequence[Callable[[], None]]) -> float:
        """Returns the median milliseconds of one call, LAUNCHES of them in turn as one captured graph."""
        work[0]()  # compiles and loads the kernel outside of the capture
        self.device.synchronize()
        graph = self.device.capture(lambda: [work[i % len(work)]() for i in range(LAUNCHES)] and None)
        start, end = (self.device.call("cudaEventCreate") for _ in range(2))
        times = []
        for _ in range(ROUNDS):
            graph.launch()  # the GPU is busy with it while the CPU launches the one that is timed
            self.device.call("cudaEventRecord", start, self.device.stream)
            graph.launch()
            self.device.call("cudaEventRecord", end, self.device.stream)
            self.device.synchronize()
            times.append(float(self.device.call("cudaEventElapsedTime", start, end)) / LAUNCHES)
        for event in (start, end):
            self.device.call("cudaEventDestroy", event)
        return statistics.median(times)


def _verify_args(bench: Bench, case: Mapping[str, NDArray[Any]], logits: int, dtype: str, vocab: int) -> SpecVerifyArgs:
    batch, nodes = case["tokens"].shape
    return SpecVerifyArgs(
        logits=logits,
        **{name: bench.upload(array) for name, array in case.items() if name != "logits"},
        **{name: bench.reserve(8 * size) for name, size in _verdict_sizes(batch, nodes).items()},
        workspace=bench.reserve(verify_workspace_bytes(batch, nodes, vocab)),
        batch=batch,
        nodes=nodes,
        vocab=vocab,
        draft_vocab=case["draft_probs"].shape[-1],
        dtype=DTYPES.index(dtype),
    )


def _verdict_sizes(batch: int, nodes: int) -> dict[str, int]:
    return {"path": batch * nodes, "num_accepted": batch, "next_token": batch}


def verify_on(bench: Bench) -> Verify:
    """SpecVerify on the device, for `check_verify`."""

    def verify(case: Case, dtype: str) -> list[NDArray[Any]]:
        batch, nodes, vocab = case["logits"].shape
        args = _verify_args(bench, case, bench.upload(bits_from_floats(case["logits"], dtype)), dtype, vocab)
        launch_verify(args, bench.device.stream)
        shapes = {"path": (batch, nodes), "num_accepted": (batch,), "next_token": (batch,)}
        got = [bench.download(getattr(args, n), np.empty(shape, np.int64)) for n, shape in shapes.items()]
        bench.clear()
        return got

    return verify


def check_rollback(bench: Bench) -> list[dict[str, Any]]:
    """Returns the rows of the report: caches equal to the twin's."""
    rng, wrong, total = np.random.default_rng(5), 0, 0
    for kv_heads, head_dim, dtype in ((8, 128, "float16"), (3, 64, "float32"), (5, 33, "float16"), (2, 80, "float16")):
        batch, max_seq, depth = 5, 96, 12
        kind = np.float32 if dtype == "float32" else np.float16
        caches = [rng.normal(size=(batch, kv_heads, max_seq, head_dim)).astype(kind) for _ in range(6)]
        path = np.full((batch, depth), -1, np.int64)
        for slot in range(1, batch):  # slot 0 keeps nothing
            kept = np.flatnonzero(rng.random(depth) < 0.6)
            path[slot, : len(kept)] = kept
        lengths = rng.integers(0, max_seq - depth, batch)
        addresses = [bench.upload(cache) for cache in caches]
        shape = caches[0].shape
        stream = bench.device.stream
        launch_rollback(addresses, shape, dtype, bench.upload(lengths), bench.upload(path), depth, stream)
        for address, cache in zip(addresses, caches, strict=True):
            total += 1
            wrong += not np.array_equal(bench.download(address, cache), kv_rollback(cache, lengths, path)[0])
        bench.clear()
    return [report.row("KVRollback against the numpy twin", f"{total - wrong} of {total} caches", "all", wrong == 0)]


def measure_copy(bench: Bench, num_bytes: int = COLD_BYTES) -> float:
    """GB/s read and written by copies from device memory to device memory, cold ones also where they are small."""
    source, dest = bench.reserve(COLD_BYTES), bench.reserve(COLD_BYTES)
    starts = range(0, COLD_BYTES - num_bytes + 1, num_bytes)[:LAUNCHES]
    ms = bench.time_ms([partial(bench.device.copy, dest + at, source + at, num_bytes) for at in starts])
    bench.clear()
    return 2 * num_bytes / ms / 1e6


def measure_verify(bench: Bench, copy: float) -> list[dict[str, Any]]:
    """Returns the rows of the report: GB/s of logits, float16, by vocabulary, batch, nodes and mode."""
    rows, rng = [], np.random.default_rng(3)
    for vocab in VOCABS:
        pool = bits_from_floats(logits_rows(rng, 61, vocab), "float16")
        for batch, nodes in itertools.product(BATCHES, NODES):
            num_bytes = 2 * batch * nodes * vocab
            turns = min(max(1, COLD_BYTES // num_bytes), LAUNCHES)
            base = bench.upload(pool)
            buffers = [bench.reserve(num_bytes) for _ in range(turns)]
            for turn, row in itertools.product(range(turns), range(batch * nodes)):
                source = base + 2 * vocab * ((7 * turn + row) % len(pool))
                bench.device.copy(buffers[turn] + 2 * vocab * row, source, 2 * vocab)
            for mode, warp in MODES.items():
                case = make_case(
                    rng, batch, nodes, 64, is_chain=True, has_probs=False, **warp
                )  # small logits, not used
                calls = [_verify_args(bench, case, buffer, "float16", vocab) for buffer in buffers]
                ms = bench.time_ms([partial(launch_verify, args, bench.device.stream) for args in calls])
                share = num_bytes / ms / 1e6 / copy
                is_promised = (vocab, batch, nodes) == DEMANDED and mode in ("greedy", "sampled")
                rows.append(
                    report.row(
                        f"SpecVerify, vocab {vocab}, batch {batch}, {nodes} nodes, {mode}",
                        f"{1000 * ms:.1f} us, {num_bytes / ms / 1e6:.0f} GB/s, {share:.0%} of copy",
                        f"{VERIFY_SHARE:.0%} of copy" if is_promised else "",
                        share >= VERIFY_SHARE if is_promised else None,
                    )
                )
            bench.clear()
    return rows


def measure_rollback(bench: Bench, copy: float) -> list[dict[str, Any]]:
    """Returns the rows of the report: GB/s moved in 80 float16 caches (40 layers) of 8 heads of 128."""
    rows = []
    for batch, nodes in ((1, 16), (8, 8), (8, 16), (16, 16)):
        shape, depth = (batch, 8, 1024, 128), nodes // 2
        addresses = [bench.reserve(2 * int(np.prod(shape)), fill=0) for _ in range(80)]
        path = np.tile(2 * np.arange(depth), (batch, 1))
        turns = [bench.upload(np.full(batch, 16 * turn + 5, np.int64)) for turn in range(32)]
        for name, kept, num_moved in (("every second node", path, depth - 1), ("a chain", path // 2, 0)):
            moves = partial(launch_rollback, addresses, shape, "float16")
            uploaded, stream = bench.upload(kept), bench.device.stream
            ms = bench.time_ms([partial(moves, lengths, uploaded, depth, stream) for lengths in turns])
            moved = 2 * 80 * batch * 8 * num_moved * 256
            share = moved / ms / 1e6 / copy
            is_promised = num_moved > 0 and (batch, nodes) == (16, 16)
            rows.append(
                report.row(
                    f"KVRollback, 80 caches, batch {batch}, {depth} kept, {name}",
                    f"{1000 * ms:.1f} us, {moved / ms / 1e6:.0f} GB/s, {share:.0%} of copy",
                    f"{ROLLBACK_SHARE:.0%} of copy" if is_promised else "",
                    share >= ROLLBACK_SHARE if is_promised else None,
                )
            )
        bench.clear()
    return rows


def run() -> dict[str, Any]:
    """Check, then measure; see `report` for the form of the result."""
    bench = Bench(open_device(0))
    rows = [*check_verify(verify_on(bench), check_cases()), *check_rollback(bench)]
    copy = measure_copy(bench)
    rows.append(report.row("device copy, read and written", f"{copy:.0f} GB/s"))
    vocab, batch, nodes = DEMANDED
    for name, num_bytes in (("SpecVerify reads", 2 * batch * nodes * vocab), ("KVRollback moves", DEMANDED_MOVES)):
        small = measure_copy(bench, num_bytes // 2)  # half read, half written
        what = f"device copy of the {num_bytes / 1e6:.1f} MB that {name}"
        rows.append(report.row(what, f"{small:.0f} GB/s, {small / copy:.0%} of copy"))
    rows += [*measure_verify(bench, copy), *measure_rollback(bench, copy)]
    return report.result(rows, copy_gb_s=copy)


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
