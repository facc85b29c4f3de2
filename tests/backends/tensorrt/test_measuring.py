# SPDX-License-Identifier: Apache-2.0
"""Measurements and checks of a plan fit its build's profiles, whatever the recipe's sizes are."""

from dataclasses import replace
from typing import Any

import pytest

from speccompile.backends import measuring
from speccompile.backends.base import LoadJob
from speccompile.backends.measuring import NODE_COUNTS
from speccompile.backends.tensorrt.config import Config, ProfileConfig
from speccompile.backends.tensorrt.engine import load_engine
from speccompile.backends.tensorrt.profiles import make_profiles
from speccompile.backends.tensorrt.records import write_record
from speccompile.backends.tensorrt.specs import tensorrt_spec
from speccompile.backends.tensorrt.tune import adapt_tuning, measure_plan
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import GraphSpec
from speccompile.export import checks
from speccompile.graph_kinds.borrowed import reading_spec
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from speccompile.graph_kinds.features import FeatureDims, feature_draft_spec, fusion_spec
from speccompile.graph_kinds.heads import candidate_heads_spec, heads_spec, tree_heads_spec
from tests.backends.tensorrt.trt_lab import Lab

MAX_SEQ, VOCAB = 512, 211
SIZES = ("llama", VOCAB, 16, 1, 2, 1, 8, MAX_SEQ)
DIMS = ModelDims(*SIZES)
FEATURES = FeatureDims(*SIZES, target_hidden_size=16, layers=(0, 1, 2))


def rows(spec: GraphSpec) -> GraphSpec:
    return replace(spec, max_rows=MAX_SEQ)


DECODER = rows(decoder_spec("draft", DIMS))
SPECS = {
    "target": verified_spec(rows(decoder_spec("target", DIMS, hidden=True))),
    "draft": candidate_spec(DECODER, 1, dists=True),
    "drafting draft": candidate_spec(DECODER, 4, dists=True),
    "draft on the target's caches": candidate_spec(reading_spec(DECODER, DIMS, ("k_cache.0", "v_cache.0")), 4, False),
    "draft on features": feature_draft_spec("draft", FEATURES, 4, True, MAX_SEQ),
    "fusion": fusion_spec("fusion", FEATURES),
    "heads of a chain": heads_spec("heads", 16, VOCAB, 3),
    "heads of a wide tree": tree_heads_spec("heads", 16, VOCAB, 168, gives_parents=True),
    "drafting heads": candidate_heads_spec("heads", 16, VOCAB, 4, 10),
}


CHECKS = {  # the others are checked as decoders are
    "draft on features": checks.check_candidates,
    "fusion": checks.check_features,
    "heads of a chain": checks.check_heads,
    "heads of a wide tree": checks.check_heads,
    "drafting heads": checks.check_head_candidates,
}


def write(lab: Lab, name: str, max_draft_nodes: int, **fields: Any) -> tuple[Any, GraphSpec]:
    """A plan with the profiles that a build gives it, and its spec."""
    nodes = max_draft_nodes + 1
    max_rows = -(-(MAX_SEQ + nodes) // 8) * 8 if SPECS[name].caches else 0
    spec = tensorrt_spec(SPECS[name], "float16", max_rows)
    profiles = make_profiles(spec, CompileOptions("float16", 8, max_rows, nodes, Config(**fields)))
    bounds = [{dim: (low, high) for dim, (low, _, high) in p.sizes.items()} for p in profiles]
    plan = lab.plan(None, spec, bounds)
    record = {"variant": "tensorrt", "version": "0.0", "plugins": []}
    write_record(plan, {**record, "profiles": [p.json_from_profile() for p in profiles]})
    return plan, spec


@pytest.fixture
def lab(monkeypatch, tmp_path):
    for name in ("MIN_REPEATS", "MAX_REPEATS"):
        monkeypatch.setattr(measuring, name, 1)
    return Lab(monkeypatch, tmp_path)


@pytest.mark.parametrize("max_draft_nodes", [1, 2, 4, 8, 16, 40])
@pytest.mark.parametrize("name", SPECS)
def test_a_plan_is_measured_and_checked_inside_its_profiles(lab, name, max_draft_nodes):
    plan, spec = write(lab, name, max_draft_nodes)
    measured = [int(nodes) for nodes in measure_plan(LoadJob(plan, spec))["step_ms"]]
    assert measured == [n for n in NODE_COUNTS if n <= measured[-1]]
    if name == "target":
        assert measured == [n for n in NODE_COUNTS if n <= max_draft_nodes + 1]
    sizes = {"max_slots": 1, "max_rows": MAX_SEQ if spec.caches else 0}
    engine = load_engine(LoadJob(plan, spec, **sizes))
    assert CHECKS[name](engine) if name in CHECKS else checks.check_decoder(engine, max_draft_nodes + 1)


def test_wider_steps_of_the_recipe_are_not_all_scored(lab):
    plan, spec = write(lab, "target", 4, decode=ProfileConfig(nodes=(1, 5, 32)))
    assert list(measure_plan(LoadJob(plan, spec))["step_ms"]) == ["1", "2", "3", "4"]


def test_a_record_of_other_kernels_is_measured_again(lab, monkeypatch):
    plan, spec = write(lab, "target", 1)
    monkeypatch.setattr("speccompile.backends.cuda.device.open_device", lambda ordinal: lab.device)
    fresh = adapt_tuning(LoadJob(plan, spec, tuning={"measured": True, "gpu": "Fake GPU", "step_ms": {"1": 99.0}}))
    assert fresh["kernels"] == "eager" and fresh["step_ms"]["1"] != 99.0
    asked = adapt_tuning(LoadJob(plan, spec, tuning={"cuda_graphs": False}))  # what was set by hand stays
    assert asked == {**fresh, "cuda_graphs": False}
    assert (
        adapt_tuning(LoadJob(plan, spec, tuning=fresh)) == fresh and adapt_tuning(LoadJob(plan, spec)) == fresh
    )  # the kept one
