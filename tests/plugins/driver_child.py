# SPDX-License-Identifier: Apache-2.0
"""The plugins' enqueue through the real driver bindings into tests/plugins/fake_libcuda.cpp: python -m ... LIBRARY.

Prints {"verdicts", "caches", "launches", "wrong"}: how many were compared with the numpy twins, and what differed.
"""

import ctypes
import json
import sys
from typing import Any

import ml_dtypes
import numpy as np

from bench.gpu_check.kernels import check_cases, is_at_boundary, is_same
from speccompile.backends.tensorrt import kernels, plugins
from speccompile.backends.tensorrt.import_helper import load_tensorrt
from speccompile.backends.tensorrt.launches import DTYPES, verify_workspace_bytes
from speccompile.backends.tensorrt.plugin_names import NUM_CACHES
from speccompile.ops.kv_rollback import kv_rollback
from speccompile.ops.spec_verify import spec_verify

STREAM, SEED = 30, 5
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Desc:
    """What TensorRT says of a tensor."""

    def __init__(self, kind: Any, dims: tuple[int, ...]) -> None:
        self.type, self.dims = kind, dims


def verdict(plugin: Any, trt: Any, case: dict[str, np.ndarray], dtype: str) -> list[np.ndarray]:
    """Returns path, num_accepted and next_token of one call of SpecVerify."""
    held = [np.ascontiguousarray(a) for a in (case["logits"].astype(NUMPY[dtype]), *list(case.values())[1:])]
    batch, nodes, vocab = held[0].shape
    outputs = [np.full((batch, nodes), 77), np.full(batch, 77), np.full(batch, 77)]
    workspace = np.full(verify_workspace_bytes(batch, nodes, vocab, False) + 256, 0xA5, np.uint8)
    address = -(-workspace.ctypes.data // 256) * 256
    descs = [Desc(getattr(trt, dtype), held[0].shape), *(Desc(None, a.shape) for a in held[1:])]
    plugin.enqueue(descs, [], [a.ctypes.data for a in held], [a.ctypes.data for a in outputs], address, STREAM)
    return outputs


def rolled_back(
    plugin: Any, trt: Any, caches: list[np.ndarray], lengths: np.ndarray, path: np.ndarray, kind: str
) -> None:
    """Compacts the caches in place."""
    inputs = [*caches, lengths, path]
    descs = [Desc(getattr(trt, kind), a.shape) for a in caches] + [Desc(trt.int64, a.shape) for a in (lengths, path)]
    plugin.enqueue(descs, [], [a.ctypes.data for a in inputs], [a.ctypes.data for a in caches], 0, STREAM)


def main() -> None:
    library = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # its soname is that of the driver: the bindings find it
    trt = load_tensorrt("tensorrt_rtx").trt
    kernels.compile_kernels = lambda op, capability: b"code"
    wrong, rng = [], np.random.default_rng(SEED)
    verify, num_verdicts = plugins._verify_plugin(trt)(3, {}), 0
    for index, (name, case) in enumerate(check_cases(vocabs=(97, 600), batches=(1, 3))):
        dtype, num_verdicts = DTYPES[index % len(DTYPES)], num_verdicts + 1
        if not is_same(verdict(verify, trt, case, dtype), spec_verify(**case)) and not is_at_boundary(case):
            wrong.append(f"{name}, {dtype}")
    num_caches = 0
    for dtype, width in (("float32", 8), ("float16", 16), ("bfloat16", 10), ("float16", 5)):
        plugin = plugins._rollback_plugin(trt)(6, {NUM_CACHES: 6})
        lengths, path = np.array([4, 9]), np.array([[0, 2, 3, -1], [0, 1, 3, 5]])
        caches = [rng.normal(size=(2, 2, 24, width)).astype(NUMPY[dtype]) for _ in range(6)]
        expected = [kv_rollback(cache.copy(), lengths, path)[0] for cache in caches]
        rolled_back(plugin, trt, caches, lengths, path, dtype)
        num_caches += len(caches)
        wrong += [f"cache, {dtype}" for a, b in zip(caches, expected, strict=True) if a.tobytes() != b.tobytes()]
    print(
        json.dumps(
            {"verdicts": num_verdicts, "caches": num_caches, "launches": library.fake_num_launches(), "wrong": wrong}
        )
    )


if __name__ == "__main__":
    main()
