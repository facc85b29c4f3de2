# SPDX-License-Identifier: Apache-2.0
"""Options of load that a bundle or a machine cannot meet."""

from pathlib import Path

import pytest

from speccompile.backends.machine import num_usable_cores
from speccompile.bundle.bundle import Bundle
from speccompile.core import registry
from speccompile.errors import BundleError, RuntimeFault
from speccompile.runtime import engine

SECTION = {"method": "draft_model", "model": "small"}


def bundle(backend: str = "onnxruntime", file: str = "graphs/target/graph.onnx") -> Bundle:
    sizes = {"max_batch_size": 1, "max_seq_len": 32, "max_draft_nodes": 4}
    recipe = {"engine": {"backend": backend, "device": "cpu", **sizes}, "speculator": SECTION}
    spec = {"name": "target", "inputs": [], "outputs": [], "caches": [], "vocab_size": 8}
    return Bundle(Path("made"), {"recipe": recipe, "graphs": {"target": {"file": file, "spec": spec}}})


def test_a_backend_that_reads_other_files_is_refused():
    engine._check_backend(bundle(), registry.backend("reference"))
    with pytest.raises(BundleError, match=r"made: got graph.onnx of backend onnxruntime; expected graph.plan for tens"):
        engine._check_backend(bundle(), registry.backend("tensorrt"))
    with pytest.raises(BundleError, match=r"got graph.plan of backend tensorrt; expected graph.onnx for onnxruntime"):
        engine._check_backend(bundle("tensorrt", "graphs/target/graph.plan"), registry.backend("onnxruntime"))


def test_a_method_with_graphs_of_its_own_needs_a_bundle_of_its_own():
    with pytest.raises(BundleError, match="method medusa: got its name alone; expected its model") as caught:
        engine.method_config(SECTION, "medusa")
    assert "recipe has speculator.method: medusa" in caught.value.todo
    assert engine.method_config(SECTION, "ngram")[0] == "ngram"
    assert engine.method_config(SECTION, None)[1].model == "small"


def test_a_drafter_of_a_hybrid_has_the_fields_of_its_own_section():
    section = {"method": "hybrid", "drafters": [{"method": "suffix"}, {**SECTION, "num_draft_tokens": 3}]}
    assert engine.method_config(section, "draft_model")[1].num_draft_tokens == 3
    name, config = engine.method_config(section, {"method": "draft_model", "num_draft_tokens": 2})
    assert (name, config.model, config.num_draft_tokens) == ("draft_model", "small", 2)
    with pytest.raises(BundleError, match="method medusa: got its name alone"):
        engine.method_config(section, "medusa")


@pytest.mark.parametrize("value", ["3", 2.5])
def test_a_wrong_value_of_a_section_that_is_given_is_not_the_bundles_fault(value):
    with pytest.raises(BundleError) as caught:
        engine.method_config(SECTION, {"method": "ngram", "num_draft_tokens": value})
    assert caught.value.todo == "Correct the value."
    with pytest.raises(BundleError, match="Build the bundle again"):
        engine.method_config({**SECTION, "num_draft_tokens": "3"}, None)


def test_no_more_threads_than_cores_are_used():
    cores = num_usable_cores()
    assert engine._usable(cores) == cores
    with pytest.warns(UserWarning, match=f"{cores + 998} threads asked for, {cores} used"):
        assert engine._usable(cores + 998) == cores
    with pytest.raises(RuntimeFault, match="threads: got 0; expected 1 or more"):
        engine._usable(0)
