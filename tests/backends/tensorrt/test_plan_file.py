# SPDX-License-Identifier: Apache-2.0
"""A plan's bytes tell its tensors, profiles, plugins and kernels; what is no plan, or half of one, is refused."""

import importlib.util

import pytest

from speccompile.backends.tensorrt.plan_file import MAGIC, PlanTensor, read_plan
from speccompile.errors import BundleError

if importlib.util.find_spec("tensorrt_rtx") is None:
    pytest.skip("TensorRT-RTX is not installed: NO PLAN IS READ", allow_module_level=True)

from speccompile.backends.tensorrt.builder import build_plan
from tests.backends.tensorrt.lab import linear_request

TWO = [{"x": [[1, 16], [1, 16], [1, 16]]}, {"x": [[1, 16], [2, 16], [4, 16]]}]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    build_plan(linear_request(folder, shapes=TWO, compute_capabilities=["12.0"]), folder / "g.plan")
    return folder / "g.plan"


def test_header_and_sections(plan):
    facts = read_plan(plan)
    assert facts.size_bytes == plan.stat().st_size
    assert facts.version.startswith("1.")
    assert set(facts.sections) == {"ENGN", "WGHT"}
    assert facts.weights_bytes >= 16 * 16 * 2
    assert facts.accelerators == ("sm120",)


def test_tensors_and_profiles(plan):
    facts = read_plan(plan)
    assert facts.num_profiles == 2
    # Static in the first profile, dynamic in the second.
    assert facts.tensors == (PlanTensor("x", (-1, 16), "float16", False), PlanTensor("y", (-1, 16), "float16", True))


def test_kernels_of_both_profiles(plan):
    facts = read_plan(plan)
    assert len(facts.kernels) == 2
    assert all(sum(counts.values()) >= 1 for counts in facts.kernels)
    assert facts.plugins == ()


def test_it_is_json(plan):
    import json

    assert json.loads(json.dumps(read_plan(plan).json_from_facts()))["num_profiles"] == 2


@pytest.mark.parametrize("content", [b"", b"vtrt", b"PK\x03\x04" + bytes(200)], ids=["empty", "short", "zip"])
def test_what_is_no_plan_is_refused(tmp_path, content):
    file = tmp_path / "x.plan"
    file.write_bytes(content)
    with pytest.raises(BundleError) as caught:
        read_plan(file)
    assert caught.value.where == str(file)
    assert caught.value.expected == "a TensorRT plan"


def test_a_plan_cut_short_is_refused(plan, tmp_path):
    file = tmp_path / "cut.plan"
    file.write_bytes(plan.read_bytes()[:-1])
    with pytest.raises(BundleError, match="as its header says"):
        read_plan(file)


def test_an_unknown_layout_gives_fewer_facts_and_no_wrong_ones(tmp_path):
    size = 4096
    file = tmp_path / "odd.plan"
    file.write_bytes((MAGIC + bytes(12) + size.to_bytes(8, "little")).ljust(size, b"\x5b"))
    facts = read_plan(file)
    assert (facts.tensors, facts.plugins, facts.kernels, facts.weights_bytes) == ((), (), (), None)
