# SPDX-License-Identifier: Apache-2.0
"""The graph with sequences lies beside a lowered graph, is opened with our library alone, and gives the same bits."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from speccompile.backends.base import LoadJob
from speccompile.backends.onnxruntime import kernel_library, sequences
from speccompile.backends.onnxruntime.engine import load_engine, open_session
from speccompile.backends.onnxruntime.kernel_library import sequences_path
from speccompile.core import specs
from speccompile.errors import BuildError
from tests.plugins.cpu_lab import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def copied(compiled: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    def copy(kv_cache: str = "auto") -> tuple[Path, Any]:
        path, spec, _ = compiled("onnxruntime", "int8", "packed", "target", kv_cache)
        shutil.copytree(path.parent, tmp_path / "graph")
        return tmp_path / "graph/graph.onnx", spec

    return copy


def ops_of(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def logits(path: Path, spec: Any, threads: int) -> np.ndarray:
    engine = load_engine(LoadJob(path, spec, max_rows=64, tuning={"threads": threads}))
    tokens = np.arange(40) % 90
    parts = []
    for start, end in ((0, 17), (17, 18), (18, 23), (23, 40)):
        feeds = {specs.TOKENS: tokens[None, start:end], specs.LENGTHS: np.array([start])}
        parts.append(engine.run(feeds)[specs.LOGITS][0].copy())
    return np.concatenate(parts)


@pytest.mark.parametrize("kv_cache", ["auto", "int8"])
def test_the_layers_of_a_graph_are_one_node_with_the_bits_of_their_kernels(copied, kv_cache):
    path, spec = copied(kv_cache)
    joined, attention = ops_of(sequences_path(path)), {"auto": "", "int8": "Int8"}[kv_cache] + "RotaryQkvAttention"
    sequence = {"auto": "KernelSequence", "int8": "MixedSequence"}[kv_cache]
    assert joined.count(sequence) == 1 and attention not in joined
    assert sequence not in ops_of(path) and ops_of(path).count(attention) == 2
    together = logits(path, spec, 2)
    sequences_path(path).unlink()
    assert np.array_equal(together.view(np.int32), logits(path, spec, 1).view(np.int32))


def test_a_session_without_the_library_opens_the_graph_with_bodies(copied, monkeypatch):
    path, _ = copied()
    sequences_path(path).write_bytes(b"no graph")
    monkeypatch.setenv(kernel_library.SWITCH, "off")
    kernel_library.begin_search.cache_clear()
    try:
        open_session(path, {"threads": 1})
        assert sequences.write_sequences(path) == 0
    finally:
        kernel_library.begin_search.cache_clear()


def test_a_full_disk_is_a_build_error(copied, monkeypatch):
    path, _ = copied()
    plain = Path.open

    def refuse(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" in mode:
            raise OSError(28, "No space left on device")
        return plain(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BuildError, match=r"graph\.sequences\.onnx.*No space left"):
        sequences.write_sequences(path)
