# SPDX-License-Identifier: Apache-2.0
"""The Python plugins: plans are built with them, and wrong uses are refused in words. Nothing is executed here."""

import json

import numpy as np
import pytest

from speccompile.backends.tensorrt import plugins
from speccompile.backends.tensorrt.import_helper import installed_variants, load_tensorrt
from speccompile.backends.tensorrt.plugin_names import ABI_FIELD, KV_ROLLBACK, NUM_CACHES, PLUGIN_ABI, SPEC_VERIFY
from speccompile.backends.tensorrt.variants import Variant
from speccompile.errors import BuildError
from tests.backends.tensorrt import plugin_graphs as graphs

pytestmark = pytest.mark.plan


@pytest.fixture(scope="module")
def variant() -> Variant:
    if "tensorrt_rtx" not in installed_variants():  # importing it here would precede the import helper's workaround
        pytest.skip("TensorRT-RTX is not installed: NO PLAN WAS BUILT")
    loaded = load_tensorrt("tensorrt_rtx")
    plugins.register_plugins(loaded.trt)
    return loaded


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_plan_holds_both_plugins(variant, dtype):
    model = graphs.step_model(dtype)
    _, network, errors = graphs.parse(variant, model)
    assert errors == []
    assert graphs.plugins_in(variant.trt, network) == ["verify", "compact"]
    plan = graphs.build(variant, model)
    assert plan is not None
    assert b"KVRollback" in plan and b"SpecVerify" in plan


def test_a_draft_vocabulary_map_is_the_ninth_input(variant):
    assert graphs.build(variant, graphs.step_model("float16", 0, has_map=True)) is not None


def test_a_single_cache_needs_no_attribute(variant):
    assert graphs.build(variant, graphs.step_model("float16", 1, says_num_caches=False)) is not None


def test_the_plugin_beats_the_function_body_by_the_override_alone(variant):
    model = graphs.step_model("float32", 0, has_body=True)
    _, network, errors = graphs.parse(variant, model)
    assert errors == [] and graphs.plugins_in(variant.trt, network) == ["verify"]
    _, network, _ = graphs.parse(variant, model, overrides=False)
    assert graphs.plugins_in(variant.trt, network) == []


def test_aliased_outputs_need_the_preview_feature(variant):
    assert graphs.build(variant, graphs.step_model("float16"), aliases=False) is None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (graphs.step_model("float16", 4, says_num_caches=False), "got 6 inputs; expected 1 caches"),
        (None, "got 7 inputs; expected 8, or 9 with d2t"),
    ],
    ids=["num_caches", "inputs"],
)
def test_a_wrong_node_is_refused(variant, capfd, model, message):  # type: ignore[no-untyped-def]
    if model is None:
        model = graphs.step_model("float16", 0)
        del model.graph.node[1].input[-1]
    _, _, errors = graphs.parse(variant, model)
    assert errors
    assert message in capfd.readouterr().err + "".join(text for _, text in variant.logger.lines)


def test_registering_twice_changes_nothing(variant):
    registry = variant.trt.get_plugin_registry()
    before = len(registry.all_creators)
    plugins.register_plugins(variant.trt)
    assert len(registry.all_creators) == before


def test_what_a_plan_carries_and_what_a_load_checks(variant):
    trt = variant.trt
    creators = plugins._creators(trt)
    assert {f.name for f in creators[KV_ROLLBACK].field_names} == {ABI_FIELD, NUM_CACHES}

    def create(**values: int):  # type: ignore[no-untyped-def]
        fields, kept = plugins._fields(trt, values)
        return creators[KV_ROLLBACK].create_plugin("compact", fields, trt.TensorRTPhase.RUNTIME), kept

    plugin, _ = create(**{ABI_FIELD: PLUGIN_ABI, NUM_CACHES: 6})
    fields = {f.name: np.asarray(f.data).tolist() for f in plugin.get_fields_to_serialize()}
    assert fields == {ABI_FIELD: [PLUGIN_ABI], NUM_CACHES: [6]}
    assert plugin.clone().num_outputs == 6 and plugin.get_aliased_input(3) == 3
    with pytest.raises(BuildError, match=r"plugin KVRollback: got a plan for plugin ABI 7; expected ABI 1\. Build"):
        create(**{ABI_FIELD: 7})


def test_enqueue_hands_over_pointers_and_sizes(variant, monkeypatch):
    calls = []
    monkeypatch.setattr(plugins, "launch_verify", lambda args, stream: calls.append((args, stream)))
    monkeypatch.setattr(plugins, "launch_rollback", lambda *args: calls.append(args))
    monkeypatch.setattr(plugins, "copy_memory", lambda *args: calls.append(("copy", *args)))

    class Desc:
        def __init__(self, kind, *dims: int) -> None:  # type: ignore[no-untyped-def]
            self.type, self.dims = kind, dims

    trt = variant.trt
    verify = plugins._verify_plugin(trt)(3, {})
    descs = [Desc(trt.bfloat16, 2, 3, 97), None, None, Desc(trt.float32, 2, 3, 50)]
    verify.enqueue(descs, [], list(range(1, 10)), [11, 12, 13], 20, 30)
    args, stream = calls.pop()
    assert {name: getattr(args, name) for name, _ in args._fields_} == {
        **{name: i + 1 for i, name in enumerate(plugins._VERIFY_NAMES)},
        "path": 11,
        "num_accepted": 12,
        "next_token": 13,
        "workspace": 20,
        "batch": 2,
        "nodes": 3,
        "vocab": 97,
        "draft_vocab": 50,
        "dtype": 2,
    }
    assert stream == 30
    rollback = plugins._rollback_plugin(trt)(2, {NUM_CACHES: 2})
    cache = Desc(trt.float16, 4, 2, 32, 8)
    rollback.enqueue([cache, cache, Desc(trt.int64, 3), Desc(trt.int64, 3, 5)], [], [1, 2, 3, 4], [1, 2], 0, 30)
    assert calls == [([1, 2], (3, 2, 32, 8), "float16", 3, 4, 5, 30)]
    calls.clear()
    rollback.enqueue([cache, cache, Desc(trt.int64, 3), Desc(trt.int64, 3, 5)], [], [1, 2, 3, 4], [1, 9], 0, 30)
    copied = ("copy", 9, 2, 4 * 2 * 32 * 8 * 2, 30)  # a cache that TensorRT gives another output is copied whole
    assert calls == [copied, ([1, 9], (3, 2, 32, 8), "float16", 3, 4, 5, 30)]


def test_abi_is_json():
    abi = plugins.plugin_abi()
    assert json.loads(json.dumps(abi)) == abi
    assert abi["ops"] == [SPEC_VERIFY, KV_ROLLBACK] and len(abi["sources_sha256"]) == 64


def test_a_library_that_is_not_there(variant, tmp_path):
    with pytest.raises(BuildError, match=r"plugin library: got .*none\.so; expected a file\. Run: make plugins"):
        plugins.load_plugin_library(variant.trt, tmp_path / "none.so")
