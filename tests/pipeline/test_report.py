# SPDX-License-Identifier: Apache-2.0
"""report.html: the summary first, keys that were set before those with their defaults, three digits, phones."""

import re

import pytest

from speccompile.bundle.report import html_from_manifest, is_default, text_from_number

RECIPE = {
    "target": {"model": "models/big", "quantization": "int8", "lora": None, "weights": "checkpoint"},
    "speculator": {"method": "draft_model", "model": "small", "tree": "chain", "num_draft_tokens": 3},
    "engine": {"backend": "onnxruntime", "device": "cpu", "max_batch_size": 8, "max_draft_nodes": 16},
    "decoding": {"temperature": 0.0, "stop": []},
}
TARGET = {
    "role": "target",
    "form": "packed",
    "quantization": "int8",
    "tuning": {"threads": 1, "step_ms": {"1": 12.94082, "2": 19.16}, "tried": []},
    "passes": [{"name": "fuse", "num_rewrites": 3, "num_nodes_before": 9, "num_nodes_after": 6, "time_ms": 1.23456}],
}
MANIFEST = {
    "recipe": RECIPE,
    "speccompile_version": "1",
    "created_at": "2026-11-26",
    "graphs": {"target": TARGET},
    "files": {"graphs/target/graph.onnx": {"size_bytes": 2048, "sha256": "ab" * 32}},
    "stages": [{"name": "export target", "seconds": 28.3812, "cached": False, "peak_rss_bytes": 1024}],
    "versions": {"numpy": "2"},
}


@pytest.fixture(scope="module")
def page():
    return html_from_manifest(MANIFEST)


def test_the_summary_comes_first(page):
    first = page[page.index("<h1>") : page.index("<h2>")]
    for words in ("models/big", "draft_model", "onnxruntime, cpu", "int8, kernels packed", "2.0 KiB", "28.4 s"):
        assert words in first
    assert "12.9 ms, 77.3 tokens/s without drafts, 1 threads" in first


def test_stored_weights_are_told_by_their_levels():
    held = {"grids": {"4 bits, float16 scale for 32 inputs": 106_168_320}, "floats": 28_311_552}
    graph = {**TARGET, "quantization": "stored", "weights": held}
    page = html_from_manifest({**MANIFEST, "graphs": {"target": graph}})
    told = "stored, kernels packed: 106.2 M of 4 bits, float16 scale for 32 inputs; 28.3 M floats"
    assert told in page


def test_keys_that_were_set_come_before_those_with_their_defaults(page):
    opened, _, closed = page.partition("<details>")
    assert (
        "target.quantization" in opened
        and "speculator.num_draft_tokens" in opened
        and "engine.max_draft_nodes" not in opened
    )
    assert "target.lora" in closed and "decoding.stop" in closed and "target.quantization" not in closed
    assert "keys with their defaults</summary>" in closed
    assert is_default(RECIPE, "engine.max_seq_len", 2048) != is_default(RECIPE, "engine.max_seq_len", 77)
    assert not is_default(RECIPE, "engine.unknown", 1) and not is_default(RECIPE, "target.model", "x")


def test_numbers_have_three_digits_and_units_stay_on_their_line(page):
    assert [text_from_number(x) for x in (0.123456, 12.94082, 1234.56, 1e-9, 0.0)] == [
        "0.123",
        "12.9",
        "1235",
        "1e-09",
        "0",
    ]
    assert "<td class=n data-of=time>28.4 s</td>" in page and "td.n, th.n { text-align: right" in page
    assert not re.search(r"\d\.\d{3,}", re.sub(r"width:[\d.]+rem", "", page[page.index("<h1>") :]))
    assert "<meta name=viewport" in page and "td[data-of]::before" in page
