# SPDX-License-Identifier: Apache-2.0
"""The rows of a checkpoint's grids, found by their float32 numbers.

An export permutes, joins and pads outputs of linears and mixes no inputs: each is a row of the checkpoint, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speccompile.core.jobs import STORED, CompileOptions
from speccompile.ops.grid import Array, Grid, GridKind, GridSource, common_kind

ZEROS, UNKNOWN = -1, -2  # in the place of a tensor: an output of zeros; one that no grid has
_MAX_GROWTH = 1.25  # of a common kind of several tensors: with more bytes their products stay apart
_MAX_PARTS = 8  # products into which a linear is cut
_MAX_NAMED = 8  # names in a record

Found = NDArray[np.int64]  # [out, 2]: tensor and row of each output


@dataclass(frozen=True)
class Part:
    """Neighbouring outputs of a linear."""

    found: Found
    kind: GridKind | None  # of their grid; None: their numbers stay float32

    @property
    def num_out(self) -> int:
        return len(self.found)


@dataclass
class StoredRows:
    """The table. Rows are read again when they are asked for.

    Args:
        attached: kinds of the weights to which grids were attached, by name; None in the place of a kind: float32.
        widened: sizes of the weights with a grid that the backend's types do not hold, by name.
    """

    source: GridSource
    attached: dict[str, list[tuple[GridKind | None, int]]] = field(default_factory=dict)
    unheld: list[str] = field(default_factory=list)  # tensors of few bits whose numbers no grid has
    widened: dict[str, int] = field(default_factory=dict)
    _keys: list[str] = field(default_factory=list)
    _kinds: list[GridKind] = field(default_factory=list)
    _rows: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.source.grid_keys:
            grid = self.source.grid(key)
            # No kernel has groups of another size.
            if grid is None or (grid.group % 16 and grid.group < grid.levels.shape[1]):
                self.unheld.append(key)
                continue
            for row, digest in enumerate(_digests(grid.weight())):
                self._rows.setdefault(digest, (len(self._keys), row))
            self._keys.append(key)
            self._kinds.append(grid.kind)

    @property
    def has_minimums(self) -> bool:
        return any(kind.has_minimums for kind in self._kinds)

    def find(self, weight: Array) -> Found:
        """Returns where the outputs of a weight [out, in] float32 come from."""
        zeros = next(_digests(np.zeros((1, weight.shape[1]), np.float32)))
        unknown = (UNKNOWN, 0)
        found = [(ZEROS, 0) if d == zeros else self._rows.get(d, unknown) for d in _digests(weight)]
        return np.array(found, np.int64).reshape(-1, 2)

    def parts(self, found: Found, num_in: int) -> list[Part]:
        """Returns the outputs of a linear as one part where its grids have a kind in common, else as several."""
        if (whole := self._joined(found, num_in)) is not None:
            return [whole]
        parts: list[Part] = []
        for run in _runs(found):
            last = self._joined(np.concatenate([parts[-1].found, run]), num_in) if parts else None
            if last is not None:
                parts[-1] = last
            else:
                parts.append(self._joined(run, num_in) or Part(run, None))
        if len(parts) <= _MAX_PARTS:
            return parts
        return [self.whole(found, num_in)]

    def whole(self, found: Found, num_in: int) -> Part:
        """Returns outputs as one part, whatever it takes; its kind is None where grids have none in common."""
        return self._joined(found, num_in, max_growth=math.inf) or Part(found, None)

    def _joined(self, found: Found, num_in: int, max_growth: float = _MAX_GROWTH) -> Part | None:
        tensors, counts = np.unique(found[:, 0], return_counts=True)
        if (tensors == UNKNOWN).any():
            return Part(found, None) if (tensors < 0).all() else None
        held = [(self._kinds[t], int(n)) for t, n in zip(tensors, counts, strict=True) if t >= 0]
        if not held:
            return Part(found, None)
        kind = common_kind([kind for kind, _ in held])
        if kind is None:
            return None
        apart = sum(own.num_bytes(num, num_in) for own, num in held)
        together = kind.num_bytes(sum(num for _, num in held), num_in)
        return Part(found, kind) if together <= max_growth * apart else None

    def record(self) -> dict[str, Any]:
        """Returns how many weights are held in which kind, and which are floats, JSON-ready."""
        kinds: Counter[str] = Counter()
        floats = {name: sum(size for kind, size in held if kind is None) for name, held in self.attached.items()}
        for held in self.attached.values():
            for kind, size in held:
                if kind is not None:
                    kinds[str(kind)] += size
        floats = {name.removesuffix(".transposed"): size for name, size in floats.items() if size}
        return {
            "grids": dict(kinds.most_common()),
            "floats": sum(floats.values()),
            "float_names": list(floats)[:_MAX_NAMED],
            "num_float": len(floats),
            "unheld": self.unheld[:_MAX_NAMED],
            "num_widened": len(self.widened),
            "widened": sum(self.widened.values()),
        }

    def grid(self, part: Part) -> Grid:
        """Reads the grid of a part's outputs."""
        kind, grids = part.kind, dict[int, Grid]()
        assert kind is not None
        for tensor in np.unique(part.found[:, 0]):
            if tensor >= 0:
                held = self.source.grid(self._keys[tensor])
                assert held is not None
                grids[int(tensor)] = held.take(part.found[part.found[:, 0] == tensor, 1]).to(kind)
        first = next(iter(grids.values()))
        whole = first.take(np.full(part.num_out, -1))
        for tensor, held in grids.items():
            at = part.found[:, 0] == tensor
            whole.levels[at], whole.scales[at] = held.levels, held.scales
            if whole.minimums is not None and held.minimums is not None:
                whole.minimums[at] = held.minimums
        return whole


def stored_rows(quantization: str, options: CompileOptions | None) -> StoredRows | None:
    """Returns the rows of the checkpoint that a graph is compiled from; None where its weights are not kept."""
    if quantization != STORED or options is None or options.grids is None:
        return None
    return StoredRows(options.grids)


def shared_rows(quantization: str, options: CompileOptions | None) -> StoredRows | None:
    """Returns the rows that a quantised draft keeps as its target has them; None: its own form is as good."""
    if quantization not in ("int4", "int8") or options is None or options.grids is None:
        return None
    return StoredRows(options.grids)


def _digests(weight: Array) -> Iterator[bytes]:
    for row in np.ascontiguousarray(weight, np.float32):
        yield hashlib.sha256(row).digest()


def _runs(found: Found) -> list[Found]:
    tensors = found[:, 0].copy()
    for i in range(1, len(tensors)):
        if tensors[i] == ZEROS:
            tensors[i] = tensors[i - 1]
    cuts = np.flatnonzero(np.diff(tensors)) + 1
    return [np.asarray(run) for run in np.split(found, cuts)]
