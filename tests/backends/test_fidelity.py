# SPDX-License-Identifier: Apache-2.0
"""A quantised form is chosen by speed only among those close to float32."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.backends.base import CompileJob, LoadJob
from speccompile.backends.distance import Distance, compare, distance_from_rows
from speccompile.backends.onnxruntime import fidelity, kernel_library, tune
from speccompile.backends.onnxruntime.backend import OnnxRuntimeBackend
from speccompile.backends.onnxruntime.fidelity import (
    MAX_KL,
    MAX_PERPLEXITY_CHANGE,
    fastest_form,
    is_near,
    near_forms,
    with_logits,
)
from speccompile.backends.onnxruntime.forms import Form, forms_of
from speccompile.backends.writing import lower_and_save
from speccompile.checkpoints.texts import TextSample
from speccompile.core.dims import ModelDims
from speccompile.core.jobs import CompileOptions
from speccompile.core.specs import LOGITS
from speccompile.errors import BuildError
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from speccompile.passes.pipelines import onnxruntime_table

FORMS = ("rowq8", "blocks32")  # of int8 without our kernels
SAMPLE = TextSample()
FAST, SLOW = {"1": 1.0, "4": 1.0}, {"1": 2.0, "4": 3.0}


def choose_form(times: Any, distances: Any, numbers: Any = None) -> str:
    near = near_forms(numbers or {form: form for form in times}, distances)
    return fastest_form({form: times[form] for form in near})


def test_the_fastest_of_the_near_forms_is_taken():
    times = {"coarse": FAST, "fine": SLOW}
    near, far = Distance(MAX_KL, 1.0), Distance(MAX_KL * 1.01, 0.9)
    assert choose_form(times, {"coarse": near, "fine": near}) == "coarse"
    assert choose_form(times, {"coarse": far, "fine": near}) == "fine"
    assert choose_form({"fine": FAST, "coarse": SLOW}, {"coarse": near, "fine": near}) == "fine"


def test_where_no_form_is_near_the_nearest_is_taken_however_slow():
    far, further = Distance(0.1, 0.9), Distance(0.2, 0.9)
    assert choose_form({"coarse": FAST, "fine": SLOW}, {"coarse": further, "fine": far}) == "fine"


@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        (MAX_PERPLEXITY_CHANGE, 0.0, True),
        (MAX_PERPLEXITY_CHANGE * 1.01, 0.0, False),
        (MAX_PERPLEXITY_CHANGE * 2, MAX_PERPLEXITY_CHANGE / 2, True),  # no more than noise may be
        (0.44, 0.02, False),
        (-0.2, 0.001, True),
        (None, 0.0, True),  # of a bundle that did not measure it
    ],
)
def test_a_perplexity_may_rise_a_little_and_by_its_noise(change, error, expected):
    assert is_near(Distance(1e-4, 0.99, change, error)) is expected


# SmolLM2-135M-Instruct (docs/lab/2026-11-26-kernels.md): what users of such models run daily, and what harms.
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Distance(3.6e-3, 0.965, 0.002, 0.003), True),  # weights as they are, activations of 8 bits in groups of 32
        (Distance(5.3e-3, 0.965, 0.006, 0.003), True),  # int8 weights and activations
        (Distance(7.1e-5, 0.996, 0.0, 0.001), True),  # bfloat16
        (Distance(0.47, 0.67, 0.44, 0.03), False),  # symmetric int4 of weights with minimums
        (Distance(0.39, 0.70, 0.33, 0.03), False),
    ],
)
def test_forms_of_a_real_model_are_near_or_not(row, expected):
    assert is_near(row) is expected


def test_the_packed_form_of_unquantised_weights_is_within_rounding_of_float32(compiled):
    reference, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    packed = compiled("onnxruntime", "none", "packed", "target")[0]
    [found] = fidelity.measure_distances(reference, {"packed": packed}, spec, SAMPLE).values()
    assert found.kl <= 1e-9 and found.top1 == 1.0 and abs(found.perplexity_change or 0) < 1e-6
    assert found.num_positions >= fidelity.NUM_TOKENS


def test_the_packed_form_replaces_the_one_with_a_scale_a_row(monkeypatch):
    for library, expected in ((Path("lib.so"), ["blocks32", "packed"]), (None, ["rowq8", "blocks32"])):
        monkeypatch.setattr(kernel_library, "find_library", lambda library=library: library)
        assert [form.kernel for form in forms_of("int8")] == expected
        assert [form.kernel for form in forms_of("none")] == ["fp32", "packed"][: 2 if library else 1]
        assert [form.kernel for form in forms_of("int4")] == ["blocks32", "packed"][: 2 if library else 1]
        assert [form.name for form in forms_of("int8", "rowq8")] == ["rowq8"]


def test_unquantised_experts_are_not_gathered_where_there_are_kernels(monkeypatch):
    for library, expected in ((Path("lib.so"), ["packed"]), (None, ["fp32"])):
        monkeypatch.setattr(kernel_library, "find_library", lambda library=library: library)
        assert [form.kernel for form in forms_of("none", has_experts=True)] == expected
        assert next(f.kernel for f in forms_of("auto", has_experts=True)) == expected[0]
        assert forms_of("int8", has_experts=True) == forms_of("int8")
    spec = verified_spec(decoder_spec("target", ModelDims("llama", 97, 64, 1, 4, 2, 16, 64)))
    for packs_experts, form, expected in ((None, "fp32", False), (True, "fp32", True), (None, "packed", True)):
        table = onnxruntime_table(spec, "none", form, packs_experts=packs_experts)
        assert ("pack_experts_float" in [entry.name for entry in table]) is expected


def test_auto_tries_bfloat16_where_kernels_compute_it_and_no_int4(monkeypatch):
    monkeypatch.setattr(kernel_library, "find_library", lambda: Path("lib.so"))
    assert [form.name for form in forms_of("auto")] == ["bf16/packed", "int8/blocks32", "int8/packed"]
    assert [form.name for form in forms_of("bf16")] == ["packed"]
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    assert [form.name for form in forms_of("auto")] == ["none/fp32", "int8/rowq8", "int8/blocks32"]


def test_bfloat16_without_kernels_is_refused(monkeypatch):
    spec = verified_spec(decoder_spec("target", ModelDims("llama", 97, 64, 1, 4, 2, 16, 64)))
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    backend = OnnxRuntimeBackend()
    with pytest.raises(BuildError, match="quantization: bf16: got no CPU kernels") as caught:
        backend.check(spec, CompileOptions(), "bf16")
    assert "C++ compiler" in caught.value.todo and caught.value.expected
    backend.check(spec, CompileOptions(), "int8")
    monkeypatch.setattr(kernel_library, "find_library", lambda: Path("lib.so"))
    backend.check(spec, CompileOptions(), "bf16")


def test_bfloat16_rounds_every_linear(neutral, tmp_path):
    """Also of float32 weights; the packed numbers are the weights' nearest."""
    model, dims = neutral
    table = onnxruntime_table(verified_spec(decoder_spec("target", dims)), "bf16", "packed")
    lower_and_save(model, table, tmp_path / "graph.onnx", None)
    graph = ir.load(tmp_path / "graph.onnx").graph
    ops = [node.op_type for node in graph if "Linear" in node.op_type]
    assert ops and all("Bf16" in op for op in ops)


def test_without_kernels_the_packed_form_is_not_tried(neutral, tmp_path, monkeypatch):
    model, dims = neutral
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    backend = OnnxRuntimeBackend()
    report = backend.compile(CompileJob(model, verified_spec(decoder_spec("target", dims)), tmp_path))
    assert report["form"] == "fp32" and report["forms_measured"] == {}
    assert backend.depends_on(CompileOptions())["cpu_kernels"] is None
    for name in ("cpu-1", "cpu-2"):  # other kernels: forms and costs are measured again
        monkeypatch.setattr(kernel_library, "find_library", lambda name=name: tmp_path / f"{name}.so")
        assert backend.depends_on(CompileOptions())["cpu_kernels"] == name


@pytest.mark.parametrize("kl", [MAX_KL / 2, MAX_KL, 0.1])
def test_of_kernels_for_the_same_weights_the_fastest_is_taken(kl):
    """Two kernels differ by the last bits of their sums, and those do not decide, near the bound or beyond it."""
    rows = {"slow": Distance(kl, 0.9), "fast": Distance(kl * 1.5, 0.9), "coarse": Distance(0.2, 0.9)}
    numbers = {"slow": "int8", "fast": "int8", "coarse": "int4"}
    assert choose_form({"slow": SLOW, "fast": FAST, "coarse": {"1": 0.1, "4": 0.1}}, rows, numbers) == "fast"


def test_kernels_of_a_quantisation_have_the_same_numbers_but_for_the_scales_of_activations():
    named = {kernel: Form(kernel, "int8", kernel).numbers for kernel in ("rowq8", "blocks32", "packed")}
    assert named["blocks32"] == named["packed"] != named["rowq8"]
    assert Form("a", "int4", "packed").numbers != Form("b", "int8", "packed").numbers


def test_a_draft_s_form_is_a_matter_of_speed():
    assert choose_form({"coarse": FAST, "fine": SLOW}, {}) == "coarse"


def test_the_distance_is_the_mean_over_the_positions_of_all_texts():
    rng = np.random.default_rng(0)
    wanted, got = rng.normal(size=(2, 40, 7))
    following = rng.integers(0, 7, 40)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (wanted, got))
    parts = [slice(0, 1), slice(1, 24), slice(24, 40)]
    found = distance_from_rows([compare(wanted[part], got[part], following[part]) for part in parts])
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum(-1).mean()), rel=1e-12)
    assert found.top1 == float((p.argmax(-1) == q.argmax(-1)).mean()) and found.num_positions == 40
    added = np.log(p / q)[np.arange(40), following]
    assert found.perplexity_change == pytest.approx(np.exp(added.mean()) - 1, rel=1e-12)
    sums = np.array([(added - added.mean())[part].sum() for part in parts])
    error = np.exp(added.mean()) * np.sqrt(3 / 2 * np.square(sums).sum()) / 40
    assert found.perplexity_error == pytest.approx(error, rel=1e-12)
    same = distance_from_rows([compare(wanted, wanted + 3.0, following)])  # a shift changes no distribution
    assert (same.kl, same.perplexity_change, same.perplexity_error) == pytest.approx((0, 0, 0), abs=1e-12)


def test_the_error_of_a_perplexity_covers_what_other_texts_give():
    """95 % of samples within two errors: of 300, each of 20 texts whose positions depend on each other."""
    rng, inside = np.random.default_rng(1), 0
    for _ in range(300):
        added = rng.normal(0, 0.1, (20, 50)) + rng.normal(0, 0.03, (20, 1))
        row = distance_from_rows([np.stack([np.zeros(50), np.ones(50), text], axis=1) for text in added])
        inside += abs(row.perplexity_change or 0) <= 2 * row.perplexity_error
    assert 270 <= inside <= 295


def test_a_distance_is_told_in_words():
    told = Distance(3.3e-3, 0.967, 0.003, 0.002, 2240).summary()
    assert told == "KL 3.3e-03 nats, the same likeliest token after 96.7%, perplexity +0.3% (standard error 0.2%)"
    assert Distance(3.3e-3, 0.967).summary() == "KL 3.3e-03 nats, the same likeliest token after 96.7%"


def test_forms_of_a_real_graph_are_measured_and_chosen(neutral, compiled, tmp_path, monkeypatch):
    """Both int8 forms are built, `rowq8` is made to look twice as fast, and the one near float32 is taken."""
    model, dims = neutral
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    monkeypatch.setattr(tune, "measure_graph", lambda job, _: {"step_ms": FAST if "rowq8" in str(job.path) else SLOW})
    spec = verified_spec(decoder_spec("target", dims), keep_logits=True)
    options = CompileOptions(sample=SAMPLE)
    report = OnnxRuntimeBackend().compile(CompileJob(model, spec, tmp_path, quantization="int8", options=options))
    distances = report["form_distances"]
    assert set(distances) == set(FORMS) and report["distance_text"] == SAMPLE.source
    assert all(row["kl"] > 0 and row["num_positions"] >= fidelity.NUM_TOKENS for row in distances.values())
    near = [form for form, row in distances.items() if is_near(Distance(**row))]
    nearest = min(distances, key=lambda form: distances[form]["kl"])
    assert sorted(report["forms_measured"]) == sorted(near or [nearest])
    assert report["form"] == ("rowq8" if "rowq8" in near else near[0] if near else nearest)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.onnx", "graph.onnx.data"]
    # As when each is measured separately: only the form differs.
    one = {form: compiled("onnxruntime", "int8", form, "target")[0] for form in FORMS}
    reference = compiled("onnxruntime", "none", "fp32", "target")[0]
    again = fidelity.measure_distances(reference, one, spec, SAMPLE)
    assert {form: row.kl for form, row in again.items()} == {form: row["kl"] for form, row in distances.items()}


def test_a_target_without_logits_is_measured_with_them_and_written_without(neutral, tmp_path, monkeypatch):
    model, dims = neutral
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    seen: list[Any] = []
    monkeypatch.setattr(tune, "measure_graph", lambda *_: {"step_ms": FAST})

    def measure(reference: Path, forms: Any, spec: Any, sample: TextSample, form_spec: Any) -> dict[str, Distance]:
        seen.append(spec)
        assert sample is SAMPLE and form_spec == spec
        return {form: Distance(float(form != "blocks32"), 0.5) for form in FORMS}

    monkeypatch.setattr(fidelity, "measure_distances", measure)
    spec = verified_spec(decoder_spec("target", dims))
    options = CompileOptions(sample=SAMPLE)
    report = OnnxRuntimeBackend().compile(CompileJob(model, spec, tmp_path, quantization="int8", options=options))
    assert report["form"] == "blocks32" and seen == [verified_spec(decoder_spec("target", dims), keep_logits=True)]
    assert with_logits(seen[0]) == seen[0]
    OnnxRuntimeBackend().load(LoadJob(tmp_path / "graph.onnx", spec, max_rows=64, tuning={"threads": 1}))
    assert all(t.name != LOGITS for t in spec.outputs)


def test_a_draft_is_not_compared_and_measured_with_its_weights_evicted(neutral, tmp_path, monkeypatch):
    model, dims = neutral
    monkeypatch.setattr(kernel_library, "find_library", lambda: None)
    evicted = []

    def measure(job: LoadJob, node_counts: tuple[int, ...]) -> dict[str, Any]:
        assert node_counts == (1, 4)
        evicted.append(job.others_bytes)
        return {"step_ms": FAST if "rowq8" in str(job.path) else SLOW}

    monkeypatch.setattr(tune, "measure_graph", measure)
    monkeypatch.setattr(fidelity, "measure_distances", None)
    spec = candidate_spec(decoder_spec("draft", dims), 1, dists=True)
    report = OnnxRuntimeBackend().compile(CompileJob(model, spec, tmp_path, quantization="int8"))
    assert report["form"] == "rowq8" and report["form_distances"] == {}
    assert evicted == [sum(v.const_value.nbytes for v in model.graph.initializers.values())] * 2 and evicted[0] > 0


def test_a_child_that_dies_is_reported_with_its_last_output(compiled, tmp_path):
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    (tmp_path / "graph.onnx").write_bytes(b"no graph")
    with pytest.raises(BuildError, match=r"distance of .*exit code 1"):
        fidelity.measure_distances(tmp_path / "graph.onnx", {"a": path}, spec, SAMPLE)
