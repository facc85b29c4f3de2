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


def report(exact):
    plain = {"tokens_per_s": 100.0, "mean_acceptance_length": 1.0, "exact": True}
    fast = {"tokens_per_s": 150.0, "mean_acceptance_length": 2.25, "exact": exact}
    return {"modes": {"plain": plain, "speculative": fast}, "ratios": {"speculative/plain": 1.5}}


def test_the_summary_has_speeds_ratio_and_acceptance(demo):
    text = demo.summary_from_bench(report(exact=True))
    assert "plain           100.0 tokens/s" in text
    assert "speculative     150.0 tokens/s   x1.50, the same tokens" in text
    assert "2.25 tokens per target step" in text


def test_the_summary_does_not_hide_a_difference(demo):
    assert "NOT the same tokens" in demo.summary_from_bench(report(exact=False))


def test_a_failed_command_ends_the_demo_with_its_exit_code(tmp_path):
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text("target:\n  model: x\n  quantisation: int8\n")
    done = subprocess.run([sys.executable, DEMO, "--recipe", recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown key 'quantisation'" in done.stderr
    assert "generate" not in done.stdout
