# SPDX-License-Identifier: Apache-2.0
"""The demo says what its bench report says, and stops at the first command that fails."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples/demo.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(**changes):
    plain = {"tokens_per_s": 100.0, "tokens_per_s_spread": 3.0}
    fast = {"tokens_per_s": 150.0, "tokens_per_s_spread": 4.0, "of_plain": 1.5, "of_plain_spread": 0.1,
            "mean_acceptance_length": 2.25, "num_texts": 12, "num_equal": 12, "num_equal_to_plain": 12}  # fmt: skip
    return {"modes": {"plain": plain, "speculative": {**fast, **changes}}, "reference": {}}


def test_the_summary_has_speeds_with_spread_ratio_and_acceptance(demo):
    text = demo.summary_from_bench(report())
    assert "plain              100 ±3 tokens/s" in text
    assert "speculative        150 ±4 tokens/s   x1.50 ±0.10\n" in text
    assert "2.25 tokens per target step" in text
    assert "texts: 12 of 12 equal plain decoding's; transformers in float32: 12 of 12 equal" in text


def test_the_summary_does_not_hide_a_difference_or_the_noise(demo):
    text = demo.summary_from_bench(report(num_equal_to_plain=11, num_equal=10, of_plain_spread=0.6))
    assert "x1.50 ±0.60, no difference within the noise" in text
    assert "texts: 11 of 12 equal plain decoding's; transformers in float32: 10 of 12 equal" in text
    told = demo.summary_from_bench({**report(num_equal=None), "reference": {"not_run": "no torch"}})
    assert "transformers in float32: no torch" in told


def test_a_failed_command_ends_the_demo_with_its_exit_code(tmp_path):
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("target:\n  model: x\n  quantisation: int8\n")
    done = subprocess.run([sys.executable, DEMO, "--recipe", recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown key 'quantisation'" in done.stderr
    assert "generate" not in done.stdout
