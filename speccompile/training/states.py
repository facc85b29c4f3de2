# SPDX-License-Identifier: Apache-2.0
"""The target's outputs on windows of text: computed for each batch, or once and kept on disk in shards."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speccompile.bundle.stage_cache import cache_limit_bytes
from speccompile.bundle.staging import disk_faults
from speccompile.errors import BuildError
from speccompile.training.target import KEPT_PROBS, Target
from speccompile.training.windows import SHARD_WINDOWS, Windows
from speccompile.training_contract import TargetNeeds, TrainingBatch

_RUN_TOKENS = {"cpu": 4096, "cuda": 65536}  # most tokens of one forward of the target
_LOGIT_BYTES = 8 << 30  # most memory of their logits in 16 bits
_SPARE_BYTES = 2 << 30  # kept free on the disk


class LiveStates:
    """Runs the target for every batch."""

    def __init__(self, target: Target, needs: TargetNeeds) -> None:
        self.target, self.needs = target, needs

    def read(self, split: str, rows: Sequence[int], tokens: np.ndarray) -> dict[str, torch.Tensor]:
        del split, rows
        return run_in_parts(self.target, torch.from_numpy(tokens.astype(np.int64)), self.needs)


class CachedStates:
    """Reads shards that `write_states` wrote."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, tuple(names)
        self._open: dict[Path, np.ndarray] = {}

    def read(self, split: str, rows: Sequence[int], tokens: np.ndarray) -> dict[str, torch.Tensor]:
        """Returns the outputs of windows, cut to the length of `tokens` [rows, nodes]."""
        held = {name: torch.stack([self._row(name, split, row) for row in rows]) for name in self.names}
        return {name: first_nodes(name, value, tokens.shape[1]) for name, value in held.items()}

    def _row(self, name: str, split: str, row: int) -> torch.Tensor:
        path = _shard(self.folder, name, split, row // SHARD_WINDOWS)
        if path not in self._open:
            self._open[path] = np.load(path, mmap_mode="r")
        return _tensor_from_array(name, np.array(self._open[path][row % SHARD_WINDOWS]))


def run_in_parts(target: Target, tokens: torch.Tensor, needs: TargetNeeds) -> dict[str, torch.Tensor]:
    parts = [target.run(part, needs) for part in tokens.split(run_windows(target, tokens.shape[1]))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def run_windows(target: Target, nodes: int) -> int:
    """Returns how many windows of `nodes` tokens the target reads at once."""
    most = min(_RUN_TOKENS[torch.device(target.device).type], _LOGIT_BYTES // (2 * target.dims.vocab_size))
    return max(1, most // nodes)


def first_nodes(name: str, value: torch.Tensor, nodes: int) -> torch.Tensor:
    """Returns the first positions of an output of the target, by its name in `TrainingBatch`."""
    return value[:, :, :nodes] if name in ("k_cache", "v_cache") else value[:, :nodes]


def batch_from_outputs(
    tokens: torch.Tensor,
    held: dict[str, torch.Tensor],
    seed: int,
    device: str = "cpu",
    is_label: torch.Tensor | None = None,
) -> TrainingBatch:
    """Returns a batch of `Target.run`'s outputs by name, floats in float32; `is_label` is [batch, nodes] bool."""
    held = {n: v.to(device, torch.float32 if v.is_floating_point() else v.dtype) for n, v in held.items()}
    layers = {int(name.partition(".")[2]): value for name, value in held.items() if name.startswith("layer.")}
    plain = {name: value for name, value in held.items() if not name.startswith("layer.")}
    mask = None if is_label is None else is_label.to(device)
    return TrainingBatch(tokens=tokens.to(device), layers=layers, seed=seed, is_label=mask, **plain)


def output_names(needs: TargetNeeds) -> tuple[str, ...]:
    names = [f"layer.{i}" for i in needs.layers] + ["k_cache", "v_cache"] * needs.caches + ["hidden"] * needs.hidden
    return (*names, "dist_tokens", "dist_probs")


def missing_names(folder: Path, windows: Windows, names: Sequence[str]) -> list[str]:
    shards = [(split, i) for split in windows.counts for i in range(windows.num_shards(split))]
    return [n for n in names if not all(_shard(folder, n, split, i).is_file() for split, i in shards)]


def write_states(
    folder: Path, target: Target, windows: Windows, needs: TargetNeeds, progress: Callable[[int, int], None]
) -> None:
    """Computes and stores missing shards in `folder`, which methods share; `progress` gets windows done and all."""
    names, done, total = output_names(needs), 0, sum(windows.counts.values())
    for split, count in windows.counts.items():
        for shard in range(windows.num_shards(split)):
            done += min(SHARD_WINDOWS, count - shard * SHARD_WINDOWS)
            absent = [n for n in names if not _shard(folder, n, split, shard).is_file()]
            if absent:
                tokens = torch.from_numpy(windows.read(split, shard).tokens.astype(np.int64))
                held = run_in_parts(target, tokens, needs)
                for name in absent:
                    _save(_shard(folder, name, split, shard), _array_from_tensor(name, held[name]))
            progress(done, total)


def choose(
    folder: Path, target: Target, windows: Windows, needs: TargetNeeds, passes: float, wish: str
) -> tuple[bool, dict[str, Any]]:
    """Returns whether to keep the target's outputs on disk (where faster, within the cache's limit), and measurements.

    One forward, one write and a read in every pass compete with a forward in each of `passes`; stored ones cost reads.

    Raises:
        BuildError: they are wanted on disk and do not fit.
    """
    names = output_names(needs)
    absent = missing_names(folder, windows, names)
    if wish == "live" or not absent:
        return wish != "live", {"wish": wish, "missing": absent}
    with disk_faults(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        room = min(cache_limit_bytes(), _free_bytes(folder.parent) - _SPARE_BYTES)
    disk_bytes = sum(windows.counts.values()) * windows.seq_len * token_bytes(target, needs)
    fits = disk_bytes < room
    if wish == "disk":
        if not fits:
            got, expected = f"{_gib(disk_bytes)} of the target's outputs", f"at most {_gib(room)}"
            todo = "Write states: live, train on fewer tokens, or raise $SPECCOMPILE_CACHE_GIB where the disk has room."
            raise BuildError(f"training.states ({folder.parent})", got, expected, todo)
        return True, {"wish": wish, "missing": absent, "disk_bytes": disk_bytes}
    with disk_faults(folder):
        forward, write, read = _time_outputs(folder.parent, target, windows, needs)
    times = {"forward_ms": forward, "write_ms": write, "read_ms": read}  # of a window
    facts = {**times, "passes": passes, "disk_bytes": disk_bytes, "fits": fits}
    return fits and forward + write + passes * read < passes * forward, facts


def token_bytes(target: Target, needs: TargetNeeds) -> int:
    """Returns the size on disk of the outputs of a token: 16 bits a number, and 32 a token of a distribution."""
    dims, last = target.dims, target.dims.per_layer[-1]
    streams = (len(needs.layers) + needs.hidden) * dims.hidden_size
    caches = 2 * needs.caches * last.num_kv_heads * last.head_dim
    return 2 * (streams + caches) + 6 * min(KEPT_PROBS, dims.vocab_size)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _time_outputs(folder: Path, target: Target, windows: Windows, needs: TargetNeeds) -> tuple[float, float, float]:
    """Returns the milliseconds of a forward, a write and a read of a window."""
    rows = windows.read("train", 0).tokens[: run_windows(target, windows.seq_len)]
    tokens = torch.from_numpy(rows.astype(np.int64))
    target.run(tokens[:1], needs)
    start = time.perf_counter()
    held = target.run(tokens, needs)
    forward = time.perf_counter() - start
    arrays = {name: _array_from_tensor(name, held[name]) for name in output_names(needs)}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        start = time.perf_counter()
        for name, array in arrays.items():
            _save(Path(scratch, f"{name}.npy"), array)
        write = time.perf_counter() - start
        start = time.perf_counter()
        for name in arrays:
            np.load(Path(scratch, f"{name}.npy"))
        read = time.perf_counter() - start
    scale = 1e3 / len(tokens)
    return forward * scale, write * scale, read * scale


def _free_bytes(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def digest_record(target: Target, files: dict[str, str], windows_digest: str, dtype: str) -> dict[str, Any]:
    held = {"dims": asdict(target.dims), "files": files, "windows": windows_digest, "dtype": dtype}
    return held if target.form == "weights" else {**held, "form": target.form}


def _shard(folder: Path, name: str, split: str, shard: int) -> Path:
    return folder / f"{name}-{split}-{shard:05d}.npy"


def _save(path: Path, array: np.ndarray) -> None:
    with disk_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                np.save(file, array)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _array_from_tensor(name: str, tensor: torch.Tensor) -> np.ndarray:
    if name == "dist_tokens":
        return np.asarray(tensor.to(torch.int32).cpu().numpy())
    return np.asarray(tensor.to(torch.bfloat16).cpu().contiguous().view(torch.uint16).numpy())


def _tensor_from_array(name: str, array: np.ndarray) -> torch.Tensor:
    plain = torch.from_numpy(array)
    if name == "dist_tokens":
        return plain.to(torch.int64)
    value = plain.view(torch.bfloat16)
    return value.float() if name == "dist_probs" else value
