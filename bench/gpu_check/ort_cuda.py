# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's CUDA execution provider, end to end on the example pair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import speccompile
from bench.gpu_check import checks, decoding, parts, report
from speccompile.core import specs
from speccompile.core.sampling import SamplingParams
from speccompile.ops.kv_rollback import kv_rollback

if TYPE_CHECKING:
    from speccompile.backends.onnxruntime.cuda_engine import OrtCudaEngine

MAX_TIE_GAP = 1e-3  # float32 without TF32; kernels add in another order than torch's
# Sums in another order shift a distribution by about 1e-5, and as many draws fall on another token: one text may part.
MAX_PARTED = 1
NUM_SAMPLED, NUM_TOKENS = 16, 40
HEATS = ((0.8, 0, 0.95), (1.0, 40, 1.0), (1.2, 0, 0.9), (1.0, 0, 1.0))  # temperature, top_k, top_p
# Drafts that are not drawn leave sampled text as it is without any, so that one reference serves all.
SAMPLED = {"none": "none", "ngram": "ngram", "draft_model": {"method": "draft_model", "drafts": "greedy"}}
NUM_COMMITS = 5


def rollback_row(engine: OrtCudaEngine, tokens: Sequence[int]) -> dict[str, Any]:
    """Paths of scored trees committed in the caches on the device, at one shape, against the numpy twin.

    Args:
        engine: the target's; its slots are overwritten.
        tokens: 24 or more.
    """
    slots, wrong, total = min(2, engine.max_slots), 0, 0
    lengths, path = np.array([8, 13])[:slots], np.array([[0, 2, 3, -1], [0, 1, 3, 5]])[:slots]
    for _ in range(NUM_COMMITS):
        engine.run({specs.TOKENS: np.tile(tokens[:24], (slots, 1)), specs.LENGTHS: np.zeros(slots, np.int64)})
        before = _caches_on_host(engine, slots)
        engine.compact(lengths, path)
        for old, new in zip(before, _caches_on_host(engine, slots), strict=True):
            total += 1
            wrong += not np.array_equal(new, kv_rollback(old, lengths, path)[0])
    got = f"{total - wrong} of {total} caches equal"
    return report.row(f"tree commits, {NUM_COMMITS} at one shape", got, "all, to the numpy twin", wrong == 0)


def _caches_on_host(engine: OrtCudaEngine, slots: int) -> list[NDArray[np.float32]]:
    caches = engine.caches
    assert caches is not None
    found = [np.empty(caches.shape(index, slots), np.float32) for index in range(len(caches.names))]
    for index, array in enumerate(found):
        engine.device.copy(array.ctypes.data, caches.address(index, 0), array.nbytes)
    engine.device.synchronize()
    return found


def sampled_rows(bundle: Path, twin: Path, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Sampled tokens of the bundle against those of its target on the CPU, at the same seeds.

    Args:
        bundle: on the GPU.
        twin: see `copy_for_cpu`.
        prompts: token ids.
    """
    params = [
        SamplingParams(max_new_tokens=NUM_TOKENS, temperature=t, top_k=k, top_p=p, seed=100 + i)
        for i, (t, k, p) in enumerate(HEATS[i % len(HEATS)] for i in range(len(prompts)))
    ]
    wanted, rows = speccompile.load(twin, method="none").generate(prompts, params), []
    for name, method in SAMPLED.items():
        results = speccompile.load(bundle, method=method).generate(prompts, params)
        parted = sum(a.tokens != b.tokens for a, b in zip(results, wanted, strict=True))
        got, expected = f"{len(prompts) - parted} of {len(prompts)} equal", f"the CPU's, but for {MAX_PARTED}"
        rows.append(report.row(f"sampled texts, {name}", got, expected, parted <= MAX_PARTED))
    return rows


def copy_for_cpu(bundle: Path, dest: Path) -> Path:
    """Returns the bundle with the same target for ONNX Runtime's CPU; the draft's outputs have other shapes there."""

    def move(manifest: dict[str, Any]) -> None:
        manifest["recipe"]["engine"]["device"] = "cpu"
        manifest["graphs"]["target"]["tuning"] = {}  # as it is: its speed does not matter

    return checks.edited_copy(bundle, dest, move)


class OrtCuda(parts.Subject):
    """The example pair with `engine.device: cuda`."""

    name, overrides, max_tie_gap = "ort-cuda", ("engine.backend=onnxruntime", "engine.device=cuda"), MAX_TIE_GAP

    def why_not_run(self) -> dict[str, Any] | None:
        import onnxruntime

        if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
            return None
        return report.not_run(
            f"onnxruntime {onnxruntime.__version__} has no CUDA provider: "
            "run make gpu-env (one environment cannot hold onnxruntime and onnxruntime-gpu)"
        )

    def tokens(self, work: Path) -> dict[str, Any]:
        """Compares with transformers and the CPU; CUDA graphs, tree commits, memory."""
        bundle = self.build(work)
        rows = self.equality_rows(bundle, decoding.Reference())
        prompts = [r["prompt_ids"] for r in decoding.golden_rows()[:NUM_SAMPLED]]
        engine = speccompile.load(bundle)
        engine.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS))
        rows += checks.graph_rows(engine)
        rows.append(rollback_row(engine.engines[0], prompts[0] * 24))
        rows += sampled_rows(bundle, copy_for_cpu(bundle, work / "on-cpu"), prompts)
        rows.append(checks.memory_row(engine.engines[0].device, engine, prompts))
        return report.result(rows)
