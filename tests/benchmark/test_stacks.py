# SPDX-License-Identifier: Apache-2.0
"""Samples of the stack find the file and the function that a thread was in."""

import sys
from time import perf_counter

from speccompile.benchmark import stacks
from speccompile.benchmark.stacks import StackSampler
from speccompile.core.sampling_params import SamplingParams
from tests.golden.method_fakes import make_engine


def busy(seconds):
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def test_a_busy_function_has_the_samples_and_the_switch_interval_comes_back(tmp_path):
    before = sys.getswitchinterval()
    with StackSampler() as sampler:
        busy(0.3)
    assert sys.getswitchinterval() == before
    inside = sum(num for stack, num in sampler.stacks.items() if "/test_stacks.py:busy" in stack)
    assert inside > 0.8 * sampler.stacks.total() and sampler.stacks.total() > 20
    assert sampler.shares()["elsewhere"] > 0.8
    sampler.write(tmp_path / "stacks.txt")
    lines = (tmp_path / "stacks.txt").read_text().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == sampler.stacks.total()


def test_samples_count_for_the_innermost_file_of_the_package():
    engine = make_engine("draft_model")
    end = perf_counter() + 0.4
    with StackSampler() as sampler:
        while perf_counter() < end:
            engine.generate(["abc"] * 10, SamplingParams(max_new_tokens=32, ignore_eos=True))
    shares = sampler.shares()
    # The runs of drafts are called in the first, trees are made in the second.
    assert {"drafting/kv_cache.py", "drafting/tree.py"} <= shares.keys(), shares
    assert list(shares.values()) == sorted(shares.values(), reverse=True) and abs(sum(shares.values()) - 1) < 1e-9
    assert all(name == "elsewhere" or (stacks.PACKAGE / name).is_file() for name in shares)
