# SPDX-License-Identifier: Apache-2.0
"""Published GPU figures beside predictions: their sources, a prediction by hand, and a reason for each miss."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

from speccompile.planner.acceptance import published
from speccompile.planner.costs import LOOP_S, OPS_BESIDE, OPS_PER_LAYER

PATH = Path(__file__).parents[2] / "bench/published.py"
spec = importlib.util.spec_from_file_location("published_figures", PATH)
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
DATA = tomllib.loads(bench.FIGURES.read_text())
RESULTS = bench.results()


def test_there_are_25_figures_each_with_a_source_and_each_miss_has_a_reason():
    assert len(RESULTS) >= 25 and len({(one.machine, one.model, one.method, one.batch) for one in RESULTS}) >= 25
    for row, one in zip(DATA["figures"], RESULTS, strict=True):
        assert DATA["sources"][row["source"]]["url"].startswith("https://") and 0.3 < one.published < 4
        assert one.low <= one.predicted <= one.high and (one.is_hit or len(one.reason) > 20)
        assert "tokens" not in row or 1 < row["tokens"] <= row["nodes"]


def test_sizes_are_those_of_the_models():
    totals = {"Vicuna-7B": 6.74, "Vicuna-13B": 13.0, "Vicuna-33B": 32.5, "Llama-3.1-8B": 8.03, "Qwen3-8B": 8.19}
    for name, billions in totals.items():
        sizes = DATA["models"][name]
        costs = bench.costs_of(sizes, "bf16", sizes["layers"], sizes["vocab"])
        assert (costs.counts.num_linear + sizes["vocab"] * sizes["hidden"]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_prediction_is_lengths_times_the_quotient_of_steps():
    row = next(r for r in DATA["figures"] if r["method"] == "eagle" and r["machine"] == "H100-SXM" and r["runs"] == 4)
    sizes, bandwidth = DATA["models"]["Llama-3.1-8B"], 3350e9 * 0.75
    target = sizes["layers"] * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    draft = (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096 + 2 * 4096**2

    def step_s(num, layers, nodes):
        moved = 2 * num + 2 * 512 * 2048 * layers + 8 * 128256 * nodes
        return moved / bandwidth + (OPS_PER_LAYER * layers + OPS_BESIDE) * 2e-6

    plain = step_s(target, 32, 1) + 2 * LOOP_S
    found = 2.39 * plain / (step_s(target, 32, 5) + 2 * LOOP_S + 4 * step_s(draft, 1, 1))
    one = bench.result_of(row, DATA["models"])
    assert one.predicted == pytest.approx(found, rel=0.01) and one.published == round(198 / 133, 2)


def test_lengths_that_a_source_lacks_are_the_published_range_of_the_method():
    row = next(r for r in DATA["figures"] if "tokens" not in r and r["batch"] == 1)
    low, high = published("eagle3", None, None).lengths(row["runs"])
    one = bench.result_of(row, DATA["models"])
    assert one.high / one.low == pytest.approx(high / low, rel=0.02)


def test_weights_of_4_bits_alone_are_multiplied_in_16():
    rows = [row for row in DATA["figures"] if row["machine"] == "Jetson-AGX-Thor" and row["batch"] == 1]
    assert {tuple(bench.machine_of(row).rates)[-1] for row in rows} == {"int4", "bf16"}
