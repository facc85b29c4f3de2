# SPDX-License-Identifier: Apache-2.0
"""Predictions of --dry-run for a TensorRT build, against builds that bench/tensorrt_memory.py measured."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from speccompile.backends.tensorrt.backend import predict_sizes
from speccompile.cli.main import app
from speccompile.core.jobs import WeightCounts

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[3]
MIB = 2**20
VOCAB, LAYERS = 32000, 2
# hidden, quantization: weights in the plan, the builder's peak, what its parent held, export or lowering, in MiB.
SEEN = [
    (1024, "none", 174, 912, 675, 1052),
    (2048, "none", 445, 1492, 647, 1721),
    (5120, "none", 1836, 4929, 638, 4777),
    (2048, "int8", 285, 1133, 647, 2034),
    (5120, "int8", 1075, 2696, 638, 5928),
    (2048, "int4", 249, 1099, 640, 2340),
    (5120, "int4", 782, 2312, 615, 6597),
]


def counts(hidden):
    inner, head = hidden * 27 // 10, VOCAB * hidden
    layers = LAYERS * (4 * hidden * hidden + 3 * hidden * inner)
    return WeightCounts(layers + 2 * head, layers + head, head, head)


@pytest.mark.parametrize(("hidden", "quantization", "weights", "builder", "held", "export"), SEEN)
def test_predictions_are_near_what_was_measured(hidden, quantization, weights, builder, held, export):
    sizes = predict_sizes(counts(hidden), quantization, "float16")
    assert sizes.weights_bytes == pytest.approx(weights * MIB, rel=0.05)
    assert sizes.builder_peak_bytes == pytest.approx((builder + held) * MIB, rel=0.1)
    # The export of a checkpoint holds half as much again as that of random weights, which these are.
    assert export * MIB * 0.95 <= sizes.export_peak_bytes <= export * MIB * 1.4


def dry_run(*arguments):
    recipe = str(ROOT / "recipes/llama13b.yaml")
    done = CliRunner().invoke(app, ["build", recipe, "--dry-run", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_dry_run_of_the_whole_13b_states_plan_caches_and_both_peaks():
    predicted = json.loads(dry_run("--json"))["predicted"]
    target = predicted["graphs"]["target"]
    assert target["num_params"] == pytest.approx(13.016e9, rel=1e-3)
    assert target["weights_bytes"] == pytest.approx(2 * target["num_params"], rel=0.01)
    assert target["cache_bytes"] == 4 * 4096 * 2 * 2 * 40 * 5120  # slots, rows, K and V, bytes, layers, heads
    assert target["builder_peak_bytes"] > 2 * target["weights_bytes"]
    assert target["build_peak_bytes"] == max(target["export_peak_bytes"], target["builder_peak_bytes"])
    assert predicted["total"]["build_peak_bytes"] == target["build_peak_bytes"]


def test_quantised_weights_need_a_smaller_builder():
    plain, small = (
        json.loads(dry_run("--json", "--set", f"target.quantization={q}"))["predicted"]["graphs"]["target"]
        for q in ("none", "int4")
    )
    assert small["weights_bytes"] < 0.3 * plain["weights_bytes"]
    assert small["builder_peak_bytes"] < 0.3 * plain["builder_peak_bytes"]


def test_the_dry_run_prints_the_builders_peak():
    text = dry_run()
    assert "builder peak" in text
    assert "engine.tensorrt.decode.nodes" in text
