# SPDX-License-Identifier: Apache-2.0
"""int4 targets are quantised over calibration text, and `auto` keeps the fastest form that is near float32."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from speccompile.backends.onnxruntime import calibration, fidelity, tune
from speccompile.backends.onnxruntime.backend import OnnxRuntimeBackend
from speccompile.backends.onnxruntime.calibration import Collector, Linear, calibrate, groups_of, pieces_of, quantise
from speccompile.backends.onnxruntime.fidelity import SAME_WEIGHTS
from speccompile.backends.onnxruntime.forms import forms_of
from speccompile.core.jobs import CompileOptions
from speccompile.errors import BuildError
from speccompile.graph_kinds.decoder import candidate_spec, decoder_spec, verified_spec
from speccompile.passes.attach_grids import linears_of
from speccompile.passes.compensation import Blocks

BOUND = 0.04  # KL of this random model: 0.012 with int8, several times more with int4
RNG = np.random.default_rng(0)
PIECES = [RNG.integers(0, 97, n) for n in (40, 17, 33)]


def collect(collector: Collector, sources: list[str]) -> dict[str, np.ndarray]:
    with ThreadPoolExecutor(2) as pool:
        return collector.sums(sources, PIECES, pool)


@pytest.fixture
def collector(compiled: Any, tmp_path: Path) -> Collector:
    path, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    model = ir.load(path)
    copy = tmp_path / "graph.onnx"
    ir.save(model, copy, external_data="graph.onnx.data")
    return Collector(copy, spec)


def test_every_linear_is_collected_once_and_merged_ones_share_their_input(collector: Collector) -> None:
    """Two layers of QKV, output, gate with up, down; and the LM head."""
    assert [linear.num_in for linear in collector.linears] == [64, 64, 64, 96] * 2 + [64]
    names = [linear.weights for linear in collector.linears]
    assert sum("q_proj" in name and "k_proj" in name and "v_proj" in name for name in names) == 2
    assert len(set(names)) == len({linear.source for linear in collector.linears}) == 9


def test_sums_are_those_of_the_outer_products_however_they_are_grouped(collector: Collector) -> None:
    sources = [linear.source for linear in collector.linears]
    whole = collect(collector, sources)
    for source in sources:
        [alone] = collect(collector, [source]).values()
        np.testing.assert_array_equal(alone, whole[source])
    # The gate's and down's inputs follow from their own sums: compare one with the values themselves.
    inputs = [collector._session.run([sources[2]], collector._feeds(piece))[0][0] for piece in PIECES]
    rows = np.concatenate(inputs).astype(np.float64)
    assert rows.shape == (90, 64)
    np.testing.assert_allclose(whole[sources[2]], rows.T @ rows, rtol=1e-5, atol=1e-4)


def test_quantised_weights_have_less_error_over_the_text_than_rounded_ones(
    collector: Collector, tmp_path: Path
) -> None:
    names = quantise(collector, PIECES, tmp_path)
    sums = collect(collector, [linear.source for linear in collector.linears])
    for index, linear in enumerate(collector.linears):
        weight = collector.weight(linear.weights)
        levels, scales = (np.load(file) for file in calibration._files(tmp_path, names.index(linear.weights)))
        wrong = Blocks(levels, scales).weight() - weight
        plain = _rounded(weight) - weight
        error, rounded = (float(np.einsum("kn,kn->", d, sums[linear.source] @ d)) for d in (wrong, plain))
        if linear != collector.head:  # of which the likely logits count more
            assert error < 0.8 * rounded, (index, linear.weights)


def test_the_head_is_found_and_its_means_are_weighed_by_probability(collector: Collector) -> None:
    head = collector.head
    assert head == collector.linears[-1]
    total = collect(collector, [head.source])[head.source]
    scatter, means = collector.split_head(total)
    assert means.shape == (64, 97) and np.linalg.eigvalsh(scatter)[0] > -1e-3
    runs = [collector._session.run([head.source, "logits"], collector._feeds(piece)) for piece in PIECES]
    rows, logits = (np.concatenate([run[i][0] for run in runs]).astype(np.float64) for i in (0, 1))
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    likely = probs.sum(axis=0) > 0.5
    wanted = (rows.T @ probs / probs.sum(axis=0))[:, likely]
    np.testing.assert_allclose(means[:, likely], wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


def _rounded(weight: np.ndarray) -> np.ndarray:
    from speccompile.passes.quantize_blocks import levels_from_weight

    return Blocks(*levels_from_weight(weight, 4)).weight()


def test_groups_hold_at_most_the_limit_or_one_input() -> None:
    linears = [
        Linear("a", "x", 10),
        Linear("b", "x", 10),
        Linear("c", "y", 10),
        Linear("d", "z", 30),
        Linear("e", "w", 5),
    ]
    assert groups_of(linears, calibration.group_bytes()) == [["x", "y", "z", "w"]]
    assert groups_of(linears, 800) == [["x", "y"], ["z"], ["w"]]
    assert groups_of(linears, 1) == [["x"], ["y"], ["z"], ["w"]]


def test_a_group_takes_half_of_the_available_memory_and_some_where_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "available_memory", lambda: 100 << 30)
    assert calibration.group_bytes() == 50 << 30
    monkeypatch.setattr(calibration, "available_memory", lambda: 0)
    assert calibration.group_bytes() == calibration.MIN_GROUP_BYTES
    monkeypatch.undo()
    assert 0 < calibration.available_memory() < 1 << 50


def test_texts_are_cut_to_what_the_caches_hold() -> None:
    assert [len(p) for p in pieces_of([range(600), range(3), ()], 0)] == [256, 256, 88, 3]
    assert [len(p) for p in pieces_of([range(100)], 64)] == [64, 36]


def test_a_child_that_dies_is_reported_with_what_to_do(compiled: Any, tmp_path: Path) -> None:
    _, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    (tmp_path / "graph.onnx").write_bytes(b"no graph")
    with pytest.raises(BuildError, match=r"calibration of target.*exit code 1") as caught:
        calibrate(tmp_path / "graph.onnx", spec, [[1, 2, 3]], tmp_path / "blocks")
    assert "target.calibration: none" in caught.value.todo


@pytest.fixture(scope="module")
def automatic(neutral: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The report of `auto`, where int4 is made to look fastest, and the folder of the graph."""
    model, dims = neutral
    folder = tmp_path_factory.mktemp("auto")
    order = {"int4": 1.0, "int8": 2.0, "none": 3.0}

    def measure(path: Path, spec: Any, others_bytes: int, node_counts: Any) -> dict[str, Any]:
        ms = order[path.parent.parent.name]
        return {"step_ms": {"1": ms, "4": ms}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "measure_graph", measure)
        patch.setattr(fidelity, "MAX_KL", BOUND)
        spec = verified_spec(decoder_spec("target", dims), keep_logits=True)
        options = CompileOptions(calibration=())
        report = OnnxRuntimeBackend().compile(model, spec, folder, quantization="auto", options=options)
    return report, folder


def test_auto_keeps_the_fastest_form_near_float32(automatic: Any) -> None:
    report, folder = automatic
    distances = report["form_distances"]
    assert set(distances) == {form.name for form in forms_of("auto")}
    assert set(report["forms_measured"]) == {form for form in distances if not form.startswith("int4/")}
    assert {"none/fp32", "int8/blocks32", "int4/blocks32"} <= set(distances)
    assert distances["int4/blocks32"]["kl"] > BOUND > distances["int8/blocks32"]["kl"]
    assert distances["none/fp32"]["kl"] < 1e-9
    assert report["quantization"] == "int8" and report["form"].startswith("int8/")
    assert sorted(path.name for path in folder.iterdir()) == ["graph.onnx", "graph.onnx.data"]


def test_the_calibration_is_recorded_and_covers_every_linear(automatic: Any) -> None:
    report, _ = automatic
    tokens = calibration.NUM_TEXTS * calibration.NUM_TOKENS
    assert report["calibration"] == {"texts": "drawn from the target", "num_tokens": tokens, "num_linears": 9}
    assert report["peak_rss_bytes"] > 0


def test_int4_over_text_is_nearer_to_float32_than_rounded_whatever_the_kernel(
    automatic: Any, compiled: Any, neutral: Any
) -> None:
    reference, spec, _ = compiled("onnxruntime", "none", "fp32", "target")
    rounded = {"blocks32": compiled("onnxruntime", "int4", "blocks32", "target")[0]}
    plain = fidelity.measure_distances(reference, rounded, spec)["blocks32"].kl
    found = [row["kl"] for name, row in automatic[0]["form_distances"].items() if name.startswith("int4/")]
    assert max(found) < 0.75 * plain
    assert max(found) <= SAME_WEIGHTS * min(found)


def test_int4_with_text_has_its_distance_recorded_and_without_none_is_measured(
    neutral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One form alone is not timed. A draft is rounded: no text of its own is at hand."""
    model, dims = neutral
    monkeypatch.setattr(tune, "measure_graph", None)
    seen: list[Any] = []

    def calibrated(graph: Path, spec: Any, texts: Any, scratch: Path) -> calibration.Calibrated:
        seen.append(texts)
        found = {}
        for _, value in linears_of(ir.load(graph)):
            weight = value.const_value.numpy()
            found[value.name] = Blocks(
                np.zeros(weight.shape, np.int8), np.ones((-(-len(weight) // 32), weight.shape[1]), np.float16)
            )
        return calibration.Calibrated(found, 3, 1)

    monkeypatch.setattr(calibration, "calibrate", calibrated)
    monkeypatch.setattr(fidelity, "measure_distances", lambda *_: {"blocks32": fidelity.Distance(0.25, 0.5)})
    backend, spec = OnnxRuntimeBackend(), decoder_spec("target", dims)
    options = CompileOptions(calibration=((1, 2, 3),))
    common: dict[str, Any] = {"quantization": "int4", "form": "blocks32", "options": options}
    report = backend.compile(model, verified_spec(spec), tmp_path / "a", **common)
    assert seen == [((1, 2, 3),)] and report["form_distances"] == {"blocks32": {"kl": 0.25, "top1": 0.5}}
    assert report["calibration"]["texts"] == "given" and report["forms_measured"] == {}
    weights = [
        v.const_value for n, v in ir.load(tmp_path / "a" / "graph.onnx").graph.initializers.items() if ".int4" in n
    ]
    assert len(weights) == 9 and all((tensor.numpy() == 0x88).all() for tensor in weights)
    draft = candidate_spec(decoder_spec("draft", dims), 1, dists=True)
    report = backend.compile(model, draft, tmp_path / "b", **common)
    assert len(seen) == 1 and "calibration" not in report
