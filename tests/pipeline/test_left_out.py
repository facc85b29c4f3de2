# SPDX-License-Identifier: Apache-2.0
"""A self-draft that no user named is built where it pays: the rule, builds by it, and the recipes that they keep."""

from pathlib import Path
from typing import Any

import pytest

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.bundle.bundle import Bundle, read_bundle
from speccompile.bundle.choices import promised_gain, why_left_out
from speccompile.bundle.stage_cache import StageCache
from speccompile.core.jobs import GraphJob, StepCosts
from speccompile.pipeline import build
from tests.pipeline import fakes

FLAT = StepCosts(((1, 10.0), (11, 10.0)))
SMOLLM2 = {"1": 15.47, "2": 15.63, "4": 16.43, "8": 18.88, "12": 25.56}  # milliseconds of a step, in bf16


def test_the_promise_is_that_of_the_best_chain():
    assert promised_gain(FLAT, StepCosts(((1, 10.0),))) == pytest.approx(1.9 / 2)  # one draft, as slow as a step
    assert promised_gain(FLAT, StepCosts(((1, 5.0),))) == pytest.approx(3.439 / 2.5)  # three
    free = (1 - 0.9**11) / 0.1
    assert promised_gain(FLAT, StepCosts(((1, 1e-9),))) == pytest.approx(free)
    steep = StepCosts(((1, 10.0), (2, 20.0), (11, 110.0)))
    assert promised_gain(steep, StepCosts(((1, 1e-9),))) == pytest.approx(1.9 / 2)
    measured = StepCosts.from_json({"step_ms": SMOLLM2})
    assert 1.5 < promised_gain(measured, StepCosts(((1, 6.16),))) < 1.56  # 1.46 of plain decoding was measured
    assert promised_gain(StepCosts(), FLAT) == promised_gain(FLAT, StepCosts()) == float("inf")


def record(ms: float, quantization: str = "none", slope: float = 0.0) -> dict[str, Any]:
    return {"quantization": quantization, "tuning": {"step_ms": {"1": ms, "11": ms + 10 * slope}}}


@pytest.mark.parametrize(
    ("form", "size", "ms", "why"),
    [
        ("none", 30, 4.0, None),
        ("bf16", 33, 4.0, None),
        ("int8", 30, 4.0, "the target's weights are int8, not floats"),
        ("stored", 30, 4.0, "the target's weights are stored, not floats"),
        ("none", 34, 4.0, "its files are 34% of the target's, more than a third"),
        ("none", 30, 7.0, None),
        ("none", 30, 8.0, "the measured times promise 1.06 times plain decoding, less than 1.1"),
    ],
)
def test_the_rule(form, size, ms, why):
    records, job = {"target": record(10.0, form), "mine": record(ms)}, GraphJob("mine", "m", min_gain=1.1)
    sizes = {"target": 100, "mine": size}
    assert why_left_out(job, records, sizes) == why
    assert why_left_out(GraphJob("mine", "m"), records, sizes) is None  # a user named it
    is_known_before = form in ("int8", "stored")
    assert (why_left_out(job, {"target": record(10.0, form)}, {}) is not None) == is_known_before


@pytest.fixture
def built(tmp_path: Path, exported: list[Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns (speculator, form, bytes, milliseconds) -> the bundle; `lines`: what the build said."""
    fakes.make_checkpoint(tmp_path / "big")

    def build_one(speculator: str, form: str = "none", size: int = 100, ms: float = 1.0) -> tuple[Bundle, list[str]]:
        def compiled(self: Any, job: CompileJob) -> dict[str, Any]:
            job.dest.mkdir(exist_ok=True)
            is_target = job.spec.name == "target"
            (job.dest / "graph.bin").write_bytes(bytes(1000 if is_target else size))
            passes = {"passes": [], "op_histogram": {"before": {}, "after": {}}}
            return {"form": form, "quantization": form if is_target else "int4", "forms_measured": {}, **passes}

        def tuned(self: Any, job: LoadJob) -> dict[str, Any]:
            return {"threads": 1, "step_ms": {"1": 10.0 if job.spec.name == "target" else ms}}

        def rollback(self: Any, dims: Any, dest: Path, options: Any = None) -> Any:
            dest.mkdir()
            (dest / "graph.bin").write_text("rollback")
            return fakes.rollback_spec(dims)

        made = {"compile": compiled, "tune": tuned, "compile_rollback": rollback, "graph_file": "graph.bin"}
        for name, value in made.items():
            monkeypatch.setattr(fakes.FakeBackend, name, value)
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"target: {{model: big}}\nspeculator: {speculator}\nengine: {{max_seq_len: 48}}\n")
        lines: list[str] = []
        out = tmp_path / "out"
        build(fakes.make_plan(recipe), out, lines.append, StageCache(None))
        return read_bundle(out), lines

    return build_one


MINE = "{method: self_draft, min_gain: 1.1}"
BOTH = f"{{method: hybrid, drafters: [{MINE}, {{method: suffix, depth: 9}}]}}"
THREE = f"{{method: hybrid, drafters: [{MINE}, {{method: suffix, depth: 9}}, {{method: ngram}}]}}"


def test_a_draft_that_pays_is_kept(built, exported):
    bundle, lines = built(BOTH)
    assert bundle.recipe.method == "hybrid" and list(bundle.graphs) == ["target", "self_draft", "rollback"]
    assert bundle.recipe.speculator["drafters"][0]["min_gain"] == 1.1 and len(exported) == 2
    assert not any("not run" in line for line in lines)


@pytest.mark.parametrize(
    ("values", "why", "num_exported"),
    [
        ({"form": "int8"}, "the target's weights are int8, not floats", 1),
        ({"size": 400}, "its files are 40% of the target's, more than a third", 2),
        ({"ms": 9.0}, "the measured times promise 1.00 times plain decoding, less than 1.1", 2),
    ],
)
def test_a_draft_that_does_not_pay_is_left_out(built, exported, values, why, num_exported):
    bundle, lines = built(BOTH, **values)
    assert [line for line in lines if "not run" in line] == [f"self_draft: not run: {why}"]
    assert [row["note"] for row in bundle.manifest["stages"] if row["name"] == "self_draft"] == [why]
    assert list(bundle.graphs) == ["target", "rollback"] and len(exported) == num_exported
    assert not any("self_draft" in name for name in bundle.manifest["files"])
    section = dict(bundle.recipe.speculator)
    assert (section["method"], section["depth"]) == ("suffix", 9)
    assert (bundle.path / "recipe.yaml").read_text().count("self_draft") == 0


def test_what_is_left_of_the_drafters_stays(built):
    bundle, _ = built(THREE, ms=9.0)
    assert [d["method"] for d in bundle.recipe.speculator["drafters"]] == ["suffix", "ngram"]
    assert built(MINE, ms=9.0)[0].recipe.method == "none"


def test_a_draft_that_a_user_named_is_built_in_any_case(built):
    bundle, _ = built("{method: self_draft}", form="int8", size=900, ms=90.0)
    assert bundle.recipe.method == "self_draft" and "self_draft" in bundle.graphs
