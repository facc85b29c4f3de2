# SPDX-License-Identifier: Apache-2.0
"""A quantised form is chosen by speed only among those close to float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speccompile.backends.onnxruntime import fidelity, kernel_library, tune
from speccompile.backends.onnxruntime.backend import OnnxRuntimeBackend
from speccompile.backends.onnxruntime.fidelity import (
    MAX_KL,
    MAX_KL_UNQUANTIZED,
    Distance,
    distance,
    fastest_form,
    near_forms,
    with_logits,
)
from speccompile.backends.onnxruntime.forms import forms_of
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import LOGITS
from speccompile.errors import BuildError
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from speccompile.passes.pipelines import onnxruntime_table

FORMS = ("rowq8", "blocks32")  # of int8 without our kernels
FAST, SLOW = {"1": 1.0, "4": 1.0}, {"1": 2.0, "4": 3.0}


def choose_form(times: Any, distances: Any, unquantized: Any = ()) -> str:
    near = near_forms(list(times), distances, unquantized)
    return fastest_form({form: times[form] for form in near})


def test_the_fastest_of_the_near_forms_is_taken() -> None:
    times = {"coarse": FAST, "fine": SLOW}
    near, far = Distance(MAX_KL, 1.0), Distance(MAX_KL * 1.01, 0.9)
    assert choose_form(times, {"coarse": near, "fine": near}) == "coarse"
    assert choose_form(times, {"coarse": far, "fine": near}) == "fine"
    assert choose_form({"fine": FAST, "coarse": SLOW}, {"coarse": near, "fine": near}) == "fine"


def test_where_no_form_is_near_the_nearest_is_taken_however_slow() -> None:
    far, further = Distance(0.01, 0.9), Distance(0.02, 0.9)
    assert choose_form({"coarse": FAST, "fine": SLOW}, {"coarse": further, "fine": far}) == "fine"


def test_without_quantisation_a_form_must_be_nearer() -> None:
    near, far = Distance(MAX_KL_UNQUANTIZED, 1.0), Distance(MAX_KL_UNQUANTIZED * 1.01, 1.0)
    times = {"fp32": SLOW, "packed": FAST}
    assert choose_form(times, {"fp32": Distance(0, 1.0), "packed": near}, {"fp32", "packed"}) == "packed"
    assert choose_form(times, {"fp32": Distance(0, 1.0), "packed": far}, {"fp32", "packed"}) == "fp32"


def test_the_packed_form_of_unquantised_weights_is_within_rounding_of_float32(compiled: Any) -> None:
    reference, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    packed = compiled("onnxruntime", "none", "packed", "target")[0]
    [found] = fidelity.measure_distances(reference, {"packed": packed}, spec).values()
    assert found.kl <= 1e-9 and found.top1 == 1.0


def test_the_packed_form_replaces_the_one_with_a_scale_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for library, expected in ((Path("lib.so"), ["blocks32", "packed"]), (None, ["rowq8", "blocks32"])):
        monkeypatch.setattr(kernel_library, "find_library", lambda library=library: library)
        assert [form.kernel for form in forms_of("int8")] == expected
        assert [form.kernel for form in forms_of("none")] == ["fp32", "packed"][: 2 if library else 1]
        assert [form.kernel for form in forms_of("int4")] == ["blocks32", "packed"][: 2 if library else 1]
        assert [form.name for form in forms_of("int8", "rowq8")] == ["rowq8"]


def test_unquantised_experts_are_not_gathered_where_there_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for library, expected in ((Path("lib.so"), ["packed"]), (None, ["fp32"])):
        monkeypatch.setattr(kernel_library, "find_library", lambda library=library: library)
        assert [form.kernel for form in forms_of("none", has_experts=True)] == expected
        assert next(form.name for form in forms_of("auto", has_experts=True)) == f"none/{expected[0]}"
        assert forms_of("int8", has_experts=True) == forms_of("int8")
    spec = verified_spec(decoder_spec("target", ModelDims("llama", 97, 64, 1, 4, 2, 16, 64)))
    for packs_experts, form, expected in ((None, "fp32", False), (True, "fp32", True), (None, "packed", True)):
        table = onnxruntime_table(spec, "none", form, packs_experts=packs_experts)
        assert ("pack_experts_float" in [entry.name for entry in table]) is expected


def test_without_kernels_the_packed_form_is_not_tried(
    neutral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dims = neutral
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    backend = OnnxRuntimeBackend()
    report = backend.compile(model, verified_spec(decoder_spec("target", dims)), tmp_path)
    assert report["form"] == "fp32" and report["forms_measured"] == {}
    assert backend.depends_on(CompileOptions())["cpu_kernels"] is None
    for name in ("cpu-1", "cpu-2"):  # other kernels: forms and costs are measured again
        monkeypatch.setattr(kernel_library, "find_library", lambda name=name: tmp_path / f"{name}.so")
        assert backend.depends_on(CompileOptions())["cpu_kernels"] == name


def test_of_kernels_for_the_same_far_weights_the_fastest_is_taken() -> None:
    """int4: two kernels differ by the last bits of their sums, and those do not decide."""
    far, as_far, further = Distance(0.0100, 0.9), Distance(0.0101, 0.9), Distance(0.02, 0.9)
    distances = {"slow": far, "fast": as_far, "coarse": further}
    assert choose_form({"slow": SLOW, "fast": FAST, "coarse": {"1": 0.1, "4": 0.1}}, distances) == "fast"


def test_a_draft_s_form_is_a_matter_of_speed() -> None:
    assert choose_form({"coarse": FAST, "fine": SLOW}, {}) == "coarse"


def test_the_distance_is_the_mean_kl_divergence() -> None:
    rng = np.random.default_rng(0)
    wanted, got = rng.normal(size=(2, 5, 7))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (wanted, got))
    found = distance(wanted, got)
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum(-1).mean()), rel=1e-12)
    assert found.top1 == float((p.argmax(-1) == q.argmax(-1)).mean())
    assert distance(wanted, wanted + 3.0).kl == pytest.approx(0.0, abs=1e-15)  # a shift changes no distribution


def test_forms_of_a_real_graph_are_measured_and_chosen(
    neutral: Any, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both int8 forms are built, `rowq8` is made to look twice as fast, and the one near float32 is taken."""
    model, dims = neutral
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    monkeypatch.setattr(
        tune, "measure_graph", lambda path, spec, **_: {"step_ms": FAST if "rowq8" in str(path) else SLOW}
    )
    spec = verified_spec(decoder_spec("target", dims), keep_logits=True)
    report = OnnxRuntimeBackend().compile(model, spec, tmp_path, quantization="int8")
    distances = report["form_distances"]
    assert set(distances) == set(FORMS)
    assert 0 < distances["blocks32"]["kl"] < distances["rowq8"]["kl"]
    near = [form for form, row in distances.items() if row["kl"] <= MAX_KL]
    assert sorted(report["forms_measured"]) == sorted(near or ["blocks32"])
    assert report["form"] == ("rowq8" if "rowq8" in near else "blocks32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.onnx", "graph.onnx.data"]
    # As when each is measured separately: only the form differs.
    one = {form: compiled("onnxruntime", "int8", form, "target")[0] for form in FORMS}
    reference = compiled("onnxruntime", "none", "fp32", "target")[0]
    again = fidelity.measure_distances(reference, one, spec)
    assert {form: row.kl for form, row in again.items()} == {form: row["kl"] for form, row in distances.items()}


def test_a_target_without_logits_is_measured_with_them_and_written_without(
    neutral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dims = neutral
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    seen: list[Any] = []
    monkeypatch.setattr(tune, "measure_graph", lambda path, spec, **_: {"step_ms": FAST})

    def measure(reference: Path, forms: Any, spec: Any) -> dict[str, Distance]:
        seen.append(spec)
        return {form: Distance(float(form != "blocks32"), 0.5) for form in FORMS}

    monkeypatch.setattr(fidelity, "measure_distances", measure)
    spec = verified_spec(decoder_spec("target", dims))
    report = OnnxRuntimeBackend().compile(model, spec, tmp_path, quantization="int8")
    assert report["form"] == "blocks32" and seen == [verified_spec(decoder_spec("target", dims), keep_logits=True)]
    assert with_logits(seen[0]) == seen[0]
    OnnxRuntimeBackend().load(tmp_path / "graph.onnx", spec, max_slots=1, max_rows=64, tuning={"threads": 1})
    assert all(t.name != LOGITS for t in spec.outputs)


def test_a_draft_is_not_compared_and_measured_with_its_weights_evicted(
    neutral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dims = neutral
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    evicted = []

    def measure(path: Path, spec: Any, others_bytes: int, node_counts: tuple[int, ...]) -> dict[str, Any]:
        assert node_counts == (1, 4)
        evicted.append(others_bytes)
        return {"step_ms": FAST if "rowq8" in str(path) else SLOW}

    monkeypatch.setattr(tune, "measure_graph", measure)
    monkeypatch.setattr(fidelity, "measure_distances", None)
    spec = candidate_spec(decoder_spec("draft", dims), 1, dists=True)
    report = OnnxRuntimeBackend().compile(model, spec, tmp_path, quantization="int8")
    assert report["form"] == "rowq8" and report["form_distances"] == {}
    assert evicted == [sum(v.const_value.nbytes for v in model.graph.initializers.values())] * 2 and evicted[0] > 0


def test_a_child_that_dies_is_reported_with_its_last_output(compiled: Any, tmp_path: Path) -> None:
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    (tmp_path / "graph.onnx").write_bytes(b"no graph")
    with pytest.raises(BuildError, match=r"distance of .*exit code 1"):
        fidelity.measure_distances(tmp_path / "graph.onnx", {"a": path}, spec)
