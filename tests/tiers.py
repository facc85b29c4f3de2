# SPDX-License-Identifier: Apache-2.0
"""What a test needs, as markers: by its path under tests/, by its fixtures, or by a `pytestmark` of its own.

A test without a marker needs numpy and little time; `make check` runs those. See tests/README.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

MARKERS = {
    "distribution": "statistics: thousands of random draws or steps",
    "export": "runs torch or transformers: exports, trains or loads a checkpoint",
    "plan": "compiles kernels (g++, nvcc) or builds TensorRT-RTX plans",
    "mutant": "breaks the kernels, or a rule, on purpose and expects the tests to notice",
    "fuzz": "tries many mutated documents",
    "live": "starts servers, browsers or other child processes that take seconds",
}

# Patterns of paths under tests/ whose every test needs this; others say so with `pytestmark` or through a fixture.
PATHS: dict[str, tuple[str, ...]] = {
    "distribution": ("runtime/test_control*.py", "runtime/test_recurrent*.py"),
    "export": (
        "backends/test_borrowed.py",
        "backends/test_cuda_engine.py",
        "backends/test_cuda_finish.py",
        "backends/test_cuda_states.py",
        "backends/test_engines.py",
        "backends/test_experts.py",
        "backends/test_not_finite.py",
        "backends/test_padded_vocab.py",
        "backends/test_stored.py",
        "backends/test_tune.py",
        "bench/test_gpu_kernels.py",
        "bench/test_gpu_ort_cuda.py",
        "bench/test_greedy_equality.py",
        "bench/test_pad_checkpoint.py",
        "bench/test_pairs.py",
        "certificate/test_probe.py",
        "certificate/test_tokenizers.py",
        "e2e/*",
        "examples/test_eagle_recipe.py",
        "examples/test_hybrid.py",
        "checkpoints/*",
        "cli/test_doctor.py",
        "doctor/*",
        "export/*",
        "golden/*",
        "ops/test_states_torch.py",
        "passes/test_attach_candidates.py",
        "passes/test_polygraphy.py",
        "passes/test_tensorrt_numbers.py",
        "pipeline/test_draft_vocab_build.py",
        "pipeline/test_hybrid_build.py",
        "pipeline/test_hybrid_plans.py",
        "pipeline/test_lora_build.py",
        "pipeline/test_low_rank_build.py",
        "pipeline/test_packed_build.py",
        "pipeline/test_real_build.py",
        "pipeline/test_stored_build.py",
        "pipeline/test_windowed_build.py",
        "plugin_methods/*",
        "serving/openai/test_client.py",
        "serving/test_readme.py",
        "speculators/test_eagle_graphs.py",
        "speculators/test_dflash_graphs.py",
        "speculators/test_mask_graphs.py",
        "speculators/test_peagle_graphs.py",
        "speculators/test_early_exit.py",
        "speculators/test_gemma4_assistant.py",
        "speculators/test_glide.py",
        "speculators/test_mtp.py",
        "speculators/test_*_heads.py",
        "training/*",
    ),
    "fuzz": ("fuzz/*",),
    "plan": (
        "backends/test_block_drafter.py",
        "backends/tensorrt/test_build_gates.py",
        "backends/tensorrt/test_builder.py",
        "backends/tensorrt/test_bundle.py",
        "backends/tensorrt/test_engine.py",
        "backends/tensorrt/test_loop.py",
        "backends/tensorrt/test_methods.py",
        "backends/tensorrt/test_plugin*.py",
        "backends/tensorrt/test_predictions.py",
        "ops/tensorrt/*",
        "passes/test_tensorrt_*.py",
        "pipeline/test_hybrid_plans.py",
        "plugins/test_compile.py",
        "plugins/test_cpu_*.py",
        "plugins/test_driver.py",
        "plugins/test_kv_rollback.py",
        "plugins/test_launches.py",
        "plugins/test_spec_verify.py",
    ),
    "mutant": ("plugins/test_mutants.py", "plugins/test_races.py"),
    "live": (
        "cli/test_endings.py",
        "pipeline/test_interrupted.py",
        "serving/openai/test_connections.py",
        "serving/openai/test_process.py",
        "serving/load/*",
        "doctor/vllm/*",
        "serving/page/test_browser.py",
        "serving/ray/*",
        "serving/triton/live/*",
    ),
}

FIXTURES = {
    "chat_bundle": ("export", "live"),
    "compiled": ("export",),
    "e2e_folder": ("export",),
    "int8_pair": ("export",),
    "live": ("live",),
    "neutral": ("export",),
    "pair": ("export",),
}


def markers_of(path: str, fixtures: Iterable[str] = ()) -> set[str]:
    """Returns the names of the markers that a test gets from its path under tests/ and from its fixtures."""
    by_path = {marker for marker, patterns in PATHS.items() if any(fnmatchcase(path, p) for p in patterns)}
    return by_path.union(*(FIXTURES.get(name, ()) for name in fixtures))
