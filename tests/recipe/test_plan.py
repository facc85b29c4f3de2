# SPDX-License-Identifier: Apache-2.0
"""Resolving a recipe: a frozen plan, contradictions refused."""

import json
from pathlib import Path

import pytest
import yaml

from speccompile.backends.tensorrt.config import Config, ProfileConfig
from speccompile.core.jobs import DecoderOptions, GraphJob
from speccompile.errors import RecipeError
from speccompile.recipe import BuildPlan, Device, load_recipe, resolve
from speccompile.recipe.models import engine_section

CPU = Device("cpu", 4)


def plan(folder: Path, *overrides: str) -> BuildPlan:
    path = folder / "r.yaml"
    path.write_text("target: {model: org/gpt2}\nspeculator: {method: candidate, model: org/small}\n")
    return resolve(load_recipe(path, overrides), CPU)


def test_the_plan_holds_every_decision(tmp_path):
    made = plan(tmp_path, "target.quantization=int8", "decoding.stop=[a]")
    outputs = DecoderOptions(hidden=True, hidden_layers=(1,), keep_logits=True)
    assert made.target == GraphJob("target", "org/gpt2", "int8", options=outputs)
    assert made.drafts == (GraphJob("draft", "org/small", "none"),)
    assert made.decoding.stop == ("a",)
    assert made == plan(tmp_path, "target.quantization=int8", "decoding.stop=[a]")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("target.quantization=none",), "none"),
        (("target.weights=random",), "none"),
        ((), "int4"),  # until the checkpoint is seen: its floats are floats, see `bundle.choices`
        (("target.quantization=int8",), "int4"),
        (("target.quantization=auto",), "int4"),
        (("target.quantization=int4",), "int4"),
        (("target.quantization=int8", "engine.device=cuda"), "none"),
        (("target.quantization=int8", "engine.backend=tensorrt"), "none"),
        (("target.quantization=int8", "speculator.quantization=int8"), "int8"),
    ],
)
def test_the_backend_decides_the_weights_of_drafts_that_leave_them_open(tmp_path, overrides, expected):
    made = plan(tmp_path, "speculator.quantization=auto", *overrides)
    assert [draft.quantization for draft in made.drafts] == [expected]
    assert made.recipe_from_plan()["speculator"]["quantization"] == ("int8" if expected == "int8" else "auto")


def test_the_plan_as_a_recipe_gives_the_same_plan(tmp_path):
    made = plan(tmp_path, "engine.threads=2", "speculator.widths=[2, 2]", "decoding.top_p=0.5")
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(_lists(made.recipe_from_plan())))
    assert resolve(load_recipe(again), CPU) == made


def _lists(value: object) -> object:
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("engine.threads=5", "engine.threads"),
        ("engine.max_seq_len=17", "engine.max_draft_nodes"),
        ("speculator.num_draft_tokens=17", "speculator.num_draft_tokens"),
        ("speculator.num_draft_tokens=0", "speculator"),
    ],
)
def test_contradictions_are_refused(tmp_path, override, where):
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, override)
    assert caught.value.where == where
    assert caught.value.todo


@pytest.mark.parametrize(
    ("overrides", "keeps"),
    [
        ((), True),
        (("engine.logits=false",), False),
        (("engine.backend=reference",), True),
        (("engine.device=cuda",), False),
        (("engine.backend=tensorrt",), False),
        (("engine.backend=tensorrt", "engine.logits=true"), True),
    ],
)
def test_logits_are_kept_where_that_costs_nothing_or_is_asked_for(tmp_path, overrides, keeps):  # type: ignore[no-untyped-def]
    made = plan(tmp_path, *overrides)
    assert made.engine.logits is keeps
    assert made.target.options.keep_logits is keeps


@pytest.mark.parametrize(
    ("backend", "dtype", "device"), [("onnxruntime", "float32", "cpu"), ("tensorrt", "float16", "cuda")]
)
def test_dtype_and_device_left_open_are_the_backends_own(tmp_path, backend, dtype, device):
    made = plan(tmp_path, f"engine.backend={backend}")
    assert (made.dtype, made.engine.device) == (dtype, device)
    assert plan(tmp_path, "engine.backend=tensorrt", "target.dtype=bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("overrides", "where", "known"),
    [
        (
            ("target.quantization=fp8",),
            "target.quantization",
            "none, bf16, int8, int4, stored, auto with engine.backend: onnxruntime",
        ),
        (("speculator.quantization=fp8",), "speculator.quantization", "none, bf16, int8, int4"),
        (("target.quantization=auto", "engine.backend=tensorrt"), "target.quantization", "int4, fp8, stored with"),
        (
            ("engine.kv_cache=int8", "engine.backend=tensorrt"),
            "engine.kv_cache",
            "one of auto with engine.backend: tensorrt",
        ),
        (("engine.kv_cache=int8", "engine.device=cuda"), "engine.kv_cache", "one of auto with"),
        (("target.quantization=auto", "engine.backend=reference"), "target.quantization", "none, stored with"),
        (("target.quantization=auto", "engine.device=cuda"), "target.quantization", "none, int8, int4, stored with"),
        (("target.dtype=float16",), "target.dtype", "float32 with"),
        (("target.dtype=float32", "engine.backend=tensorrt"), "target.dtype", "float16, bfloat16"),
    ],
)
def test_forms_that_the_backend_does_not_have_are_refused(tmp_path, overrides, where, known):
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, *overrides)
    assert caught.value.where == where
    assert known in caught.value.expected


def test_a_calibration_text_is_found_beside_the_recipe_and_kept_in_the_plan(tmp_path):
    (tmp_path / "text.txt").write_text("a text")
    made = plan(tmp_path, "target.quantization=int4", "target.calibration=text.txt")
    assert made.calibration == str(tmp_path / "text.txt") == made.recipe_from_plan()["target"]["calibration"]
    assert plan(tmp_path).calibration == "auto" and plan(tmp_path, "target.calibration=none").calibration == "none"


@pytest.mark.parametrize("engine", ["engine.backend=tensorrt", "engine.backend=reference", "engine.device=cuda"])
def test_a_calibration_text_is_refused_where_nothing_reads_it(tmp_path, engine):
    (tmp_path / "text.txt").write_text("a text")
    with pytest.raises(RecipeError, match="which quantises without text") as caught:
        plan(tmp_path, "target.calibration=text.txt", engine)
    assert caught.value.where == "target.calibration"


def test_a_calibration_text_that_does_not_exist_is_refused_with_its_line(tmp_path):
    with pytest.raises(RecipeError, match=r"--set target.calibration=no.txt.*which does not exist"):
        plan(tmp_path, "target.calibration=no.txt")


def test_only_the_section_of_the_chosen_backend_is_in_the_recipe_of_a_plan(tmp_path):
    assert "tensorrt" not in plan(tmp_path).recipe_from_plan()["engine"]
    made = plan(tmp_path, "engine.backend=tensorrt", "engine.tensorrt.decode.nodes=[1,4,17]")
    section = made.recipe_from_plan()["engine"]["tensorrt"]
    assert section["decode"] == {"batch": "auto", "nodes": [1, 4, 17], "kv": "auto"}
    assert made.recipe_from_plan()["engine"]["variant"] == "auto"
    assert made.options == Config(decode=ProfileConfig(nodes=(1, 4, 17)))
    assert plan(tmp_path).options is None


def test_what_a_backend_reads_beside_its_section_is_its_own(tmp_path):
    made = plan(tmp_path, "engine.backend=tensorrt", "engine.plugins=none")
    assert made.options == Config(plugins="none") and not made.options.has_plugins
    assert made.recipe_from_plan()["engine"]["plugins"] == "none"
    again = made.recipe_from_plan()["engine"]
    read = engine_section().model_validate_json(json.dumps(again)).model_dump(mode="json")
    assert read == {**again, "synthetic_acceptance": []}
    assert not {"variant", "plugins", "tensorrt"} & set(plan(tmp_path).recipe_from_plan()["engine"])
