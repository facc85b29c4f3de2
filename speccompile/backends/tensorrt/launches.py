# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of the plugins' kernels: arguments, grids, shared memory, workspace, as `plugins/*/plugin.cpp`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

from speccompile.errors import RuntimeFault

CHUNK = 256
CHUNKS_IN_FLIGHT = 4
SCAN_THREADS = 256
RESOLVE_THREADS = 512
ROLLBACK_THREADS = 128
WARP = 32
MAX_VOCAB = 2048 * CHUNK
MAX_NODES = 256
MAX_CACHES = 480

DTYPES = ("float32", "float16", "bfloat16")  # in the order of the kernels' enum
SUFFIXES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_CELL_BYTES, _DIST_BYTES, _OUTCOME_BYTES = 8, 24, 8


class SpecVerifyArgs(ctypes.Structure):
    """`SpecVerifyParams` of plugins/spec_verify/layout.cuh: pointers to the tensors, then sizes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "tokens", "parents", "draft_probs", "uniforms")),
        *((name, ctypes.c_void_p) for name in ("temperature", "top_k", "top_p", "d2t")),
        *((name, ctypes.c_void_p) for name in ("path", "num_accepted", "next_token", "workspace")),
        *((name, ctypes.c_int) for name in ("batch", "nodes", "vocab", "draft_vocab", "dtype")),
    )


class KVRollbackArgs(ctypes.Structure):
    """`KVRollbackParams` of plugins/kv_rollback/kernel.cuh."""

    _fields_ = (
        ("caches", ctypes.c_void_p * MAX_CACHES),
        ("lengths", ctypes.c_void_p),
        ("path", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("depth", "kv_heads", "max_seq", "row_vectors")),
    )


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0


def _check(where: str, name: str, got: int, most: int) -> None:
    if not 1 <= got <= most:
        raise RuntimeFault(
            f"{where}.{name}",
            str(got),
            f"1 to {most}",
            "Build with engine.plugins: none, whose bodies have no such limit.",
        )


def num_chunks(vocab: int) -> int:
    return -(-vocab // CHUNK)


def verify_workspace_bytes(batch: int, nodes: int, vocab: int, has_map: bool = False) -> int:
    """Returns the bytes of SpecVerify's workspace: chunk cells, distributions, outcomes, counters, inverse of d2t."""
    rows = batch * nodes
    cells = rows * num_chunks(vocab)
    return cells * _CELL_BYTES + rows * (_DIST_BYTES + _OUTCOME_BYTES) + 4 * batch + (4 * vocab if has_map else 0)


def _final_shared_bytes(vocab: int) -> int:
    return num_chunks(vocab) * (8 + 4)


def verify_launches(batch: int, nodes: int, vocab: int, dtype: str) -> tuple[Launch, Launch]:
    """Returns the two launches of SpecVerify, in order."""
    _check("SpecVerify", "nodes", nodes, MAX_NODES)
    _check("SpecVerify", "vocab", vocab, MAX_VOCAB)
    tasks = batch * nodes * -(-num_chunks(vocab) // CHUNKS_IN_FLIGHT)
    scan_blocks = max(-(-tasks * WARP // SCAN_THREADS), -(-batch // SCAN_THREADS))
    return (
        Launch(f"spec_verify_scan_{SUFFIXES[dtype]}", (scan_blocks, 1, 1), SCAN_THREADS),
        Launch("spec_verify_resolve", (batch * nodes, 1, 1), RESOLVE_THREADS, _final_shared_bytes(vocab)),
    )


def rollback_vector_bytes(head_dim: int, dtype: str, pointers: Sequence[int]) -> int:
    """Returns the widest unit, 16, 4 or 2 bytes, that divides a cache row and every cache's address."""
    step = math.gcd(head_dim * _DTYPE_BYTES[dtype], *pointers)
    return next(unit for unit in (16, 4, 2) if step % unit == 0)


def rollback_launches(
    pointers: Sequence[int], batch: int, kv_heads: int, head_dim: int, dtype: str
) -> list[tuple[Launch, Sequence[int]]]:
    """Returns the launches of KVRollback and the caches of each: one per MAX_CACHES caches."""
    unit = rollback_vector_bytes(head_dim, dtype, pointers)
    columns = kv_heads * head_dim * _DTYPE_BYTES[dtype] // unit
    groups = [pointers[i : i + MAX_CACHES] for i in range(0, len(pointers), MAX_CACHES)]
    blocks = -(-columns // ROLLBACK_THREADS)
    return [(Launch(f"kv_rollback_{unit}", (blocks, batch, len(g)), ROLLBACK_THREADS), g) for g in groups]


def rollback_args(
    pointers: Sequence[int], lengths: int, path: int, depth: int, kv_heads: int, max_seq: int, row_vectors: int
) -> KVRollbackArgs:
    args = KVRollbackArgs(lengths=lengths, path=path, depth=depth, kv_heads=kv_heads, max_seq=max_seq)
    args.row_vectors = row_vectors
    args.caches[: len(pointers)] = list(pointers)
    return args
