# SPDX-License-Identifier: Apache-2.0
"""The cost model by hand-made figures, and the table of machines."""

import json
from dataclasses import replace

import numpy as np
import pytest

from speccompile.core.jobs import WeightCounts
from speccompile.errors import RecipeError
from speccompile.planner.costs import (
    OPS_BESIDE,
    OPS_PER_LAYER,
    RUNTIME_OPS,
    GraphCosts,
    distinct_experts,
    graphs_of_plan,
)
from speccompile.planner.machine import (
    BITS,
    CACHES,
    EFFICIENCY,
    INT8_CACHES,
    OTHER_BITS,
    OTHERS,
    Machine,
    find_machine,
    published_machines,
)
from speccompile.planner.measuring import machine_from_json
from speccompile.prepare import plan_from_source
from speccompile.recipe.model_recipe import ModelOptions
from tests.pipeline import fakes

# 1e9 bytes/s, 1e10 operations/s of int8; 1e-6 s a launch.
MACHINE = Machine("m", "cpu", 1, 1e12, 1e9, 1e-6, "made up", {"int8": 1e10, "float32": 2e9})
GRAPH = GraphCosts(
    name="target", precision="int8", num_int8=0, counts=WeightCounts(10**6, 10**6, 0), num_experts=0, num_chosen=1,
    cache_columns=100, group=2, num_layers=3, num_state_layers=1, vocab_size=1000, state_values=50, caches=CACHES,
    num_drafts=0, weights_bytes=10**6, slot_bytes=4096,
)  # fmt: skip
WEIGHTS_S = 1e6 / 1e9  # to read them


def test_a_step_is_the_sum_of_what_it_reads_and_multiplies():
    beside = (OPS_PER_LAYER * 3 + OPS_BESIDE) * 1e-6
    for nodes, batch, context in ((1, 1, 0), (4, 1, 200), (8, 8, 200)):
        rows = nodes * batch
        products = max(WEIGHTS_S, 2e6 * rows / 1e10)
        held = batch * 100 * (context + nodes)
        attention = max(4 * held / 1e9, 2 * held * nodes * 2 / 2e9)
        moved = 8 * (50 * batch + 1000 * rows) / 1e9
        assert GRAPH.step_s(MACHINE, nodes, batch, context) == pytest.approx(products + attention + moved + beside)
    assert GRAPH.drafts_s(MACHINE, 5, 1, 0) == pytest.approx(5 * GRAPH.step_s(MACHINE, 1))
    assert replace(GRAPH, num_drafts=3).drafts_s(MACHINE, 5, 1, 0) == pytest.approx(2 * GRAPH.step_s(MACHINE, 1))
    assert GRAPH.prompt_s(MACHINE, 130) == pytest.approx(GRAPH.step_s(MACHINE, 128) + GRAPH.step_s(MACHINE, 2, 1, 128))


def test_rows_read_as_many_experts_as_draws_say():
    rng = np.random.default_rng(0)
    for rows in (1, 3, 10):
        drawn = [len({e for _ in range(rows) for e in rng.choice(16, 4, replace=False)}) for _ in range(4000)]
        assert distinct_experts(16, 4, rows) == pytest.approx(np.mean(drawn), abs=0.1)
    mixture = replace(GRAPH, counts=WeightCounts(10**7, 10**7, 0, num_experts=9 * 10**6), num_experts=16, num_chosen=4)
    beside = GRAPH.step_s(MACHINE, 1) - WEIGHTS_S  # GRAPH has a million weights
    assert mixture.step_s(MACHINE, 1) == pytest.approx(beside + WEIGHTS_S * (1 + 9 * 4 / 16))
    assert mixture.step_s(MACHINE, 64) > 1e6 * 2 * 64 / 1e10 + 9 * WEIGHTS_S


def test_a_measured_machine_has_operators_of_its_runtime():
    point = ((1e3, ((1, 1e-9), (64, 1e-9))),)
    kinds = dict.fromkeys((*BITS, *OTHER_BITS), point) | {OTHERS: ((1e3, ((1, 1e-6), (64, 1e-6))),)}
    machine = replace(MACHINE, measured=kinds)
    plain = replace(GRAPH, num_state_layers=0)
    assert GRAPH.step_s(machine, 1) - plain.step_s(machine, 1) == pytest.approx(RUNTIME_OPS["states"] * 1e-6)
    mixed = replace(plain, counts=replace(GRAPH.counts, num_experts=10**5), num_experts=4, num_chosen=4)
    assert mixed.step_s(machine, 1) - plain.step_s(machine, 1) == pytest.approx(3 * RUNTIME_OPS["experts"] * 1e-6)


def test_measured_products_are_read_off_between_rows_and_sizes():
    points = (((1, 1e-9), (4, 2e-9)), ((1, 3e-9), (4, 4e-9)))
    measured = {"int8": tuple(zip((1e3, 1e5), points, strict=True))}
    machine = replace(MACHINE, measured=measured)
    assert machine.product_s("int8", 1000, 1, 10.0) == pytest.approx(1e-6)
    assert machine.product_s("int8", 1000, 4, 1e9) == pytest.approx(4e-6)
    assert machine.product_s("int8", 1000, 2, 1e4) == pytest.approx(1e-6 * (4 / 3 + 10 / 3) / 2)
    assert machine.product_s("int8", 1000, 8, 10.0) == pytest.approx(4e-6)  # in proportion above the last row
    assert machine.at(0) is machine and machine.product_s("int4", 1000, 1, 10.0) == pytest.approx(1e-6)
    with pytest.raises(RecipeError, match="no rate of float32"):
        machine.product_s("float32", 1, 1, 1.0)
    record = {**vars(machine), "measured": json.loads(json.dumps(measured))}
    assert machine_from_json(record) == machine


def test_every_published_machine_has_a_source_and_sane_figures():
    machines = published_machines()
    assert len(machines) >= 20
    for machine in machines.values():
        assert machine.source and machine.kind in ("cpu", "gpu") and set(machine.rates) <= set(BITS)
        assert 50e9 < machine.bandwidth < 1e13 and 16 <= machine.num_units <= 304
        assert machine.rates["float32"] < machine.rates["bf16"] < machine.rates.get("int8", 1e18)
    slow, fast = machine.at(0), machine.at(1)
    ratio = EFFICIENCY["bandwidth"][1] / EFFICIENCY["bandwidth"][0]
    assert slow.bytes_s(1e9) / fast.bytes_s(1e9) == pytest.approx(ratio)
    with pytest.raises(RecipeError, match="H100-SXM"):
        find_machine("H1000")


def test_sizes_come_from_the_plan(tmp_path):
    model = fakes.make_checkpoint(tmp_path / "big")
    options = ModelOptions(settings=("target.quantization=int8", "speculator.method=none"))
    [(name, graph)] = graphs_of_plan(plan_from_source(str(model), options)).items()
    attention, feed_forward, head = 8 * 8 * 2 + 2 * 8 * 4, 3 * 8 * 16, 32 * 8
    assert name == "target" and graph.precision == "int8" and graph.num_experts == 0
    assert graph.counts.num_linear == 2 * (attention + feed_forward) + head
    assert (graph.num_int8, graph.caches) == (0, CACHES)
    changed = ("target.quantization=int4", "engine.kv_cache=int8", "speculator.method=none")
    [small] = graphs_of_plan(plan_from_source(str(model), ModelOptions(settings=changed))).values()
    assert (small.precision, small.num_int8, small.caches) == ("int4", head, INT8_CACHES)
    assert small.slot_bytes * 2 == graph.slot_bytes  # heads of 4 columns: 4 levels and a scale, not 16 bytes
    assert (graph.cache_columns, graph.group, graph.num_layers, graph.vocab_size) == (2 * 2 * 4, 2, 2, 32)


def test_a_lookup_takes_the_time_of_its_method(tmp_path):
    model = str(fakes.make_checkpoint(tmp_path / "big"))

    def host_s(**section):
        options = ModelOptions(settings=(f"speculator={json.dumps(section)}",))
        return graphs_of_plan(plan_from_source(model, options))["target"].host_s

    assert 0 < host_s(method="ngram") < host_s(method="suffix")
    both = host_s(method="hybrid", drafters=[{"method": "ngram"}, {"method": "suffix"}])
    assert both == pytest.approx(host_s(method="ngram") + host_s(method="suffix"))


def test_floats_of_sixteen_bits_are_read_as_they_are_stored(tmp_path):
    model = fakes.make_checkpoint(tmp_path / "big")
    options = ModelOptions(settings=("target.quantization=none", "speculator.method=none"))
    [wide] = graphs_of_plan(plan_from_source(str(model), options)).values()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    [half] = graphs_of_plan(plan_from_source(str(model), options)).values()
    assert (wide.precision, half.precision) == ("float32", "bf16")
    assert half.weights_bytes < 0.6 * wide.weights_bytes
    random = replace(options, settings=(*options.settings, "target.weights=random"))
    [sized] = graphs_of_plan(plan_from_source(str(model), random)).values()
    assert sized.precision == "float32"
