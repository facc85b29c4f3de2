# SPDX-License-Identifier: Apache-2.0
"""GGUF files are read as the models that they were made of: numbers, grids, keys and tensors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from speccompile.checkpoints.checkpoint import check_checkpoint, read_dims
from speccompile.checkpoints.config_values import check_config
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.checkpoints.gguf.blocks import BLOCKS, in_blocks, values_from_rows
from speccompile.checkpoints.model_config import read_model_config
from speccompile.checkpoints.tensor_files import open_files
from speccompile.export.weights import read_weights
from tests.checkpoints.gguf_lab import MODELS, random_blocks, write_model

TOKENS = 24  # more than the windows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 150, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def read(path: Path) -> Any:
    folder = resolve_checkpoint(str(path))
    dims = read_dims(folder)
    check_checkpoint(folder, dims)
    config = read_model_config(folder)
    check_config(config.to_dict(), TOKENS)
    model, info = read_weights(folder, config)
    assert not any(info.values()), info
    return model.eval()


def test_an_error_of_the_disk_is_raised(tmp_path, monkeypatch):
    write_model(tmp_path / "model.gguf", "llama", "F32")

    def full(*paths: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", full)
    with pytest.raises(OSError, match="No space left"):
        resolve_checkpoint(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("kind", ["F32", "Q8_0", {"down": "Q6_K", "_q.": "Q4_1", "_v.": "Q5_K", "": "Q4_K"}],
                         ids=["F32", "Q8_0", "mixed"])  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_logits_of_its_source(name, kind, tmp_path):
    source = write_model(tmp_path / "model.gguf", name, kind)
    made = read(tmp_path / "model.gguf")
    assert made.config.model_type == source.config.model_type
    expected, found = logits(source), logits(made)
    # Factors of frequencies are stored in float32, and norms of Gemma as 1 + their factor.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", [block.name for block in BLOCKS.values()])
def test_blocks_have_the_values_of_the_reference(kind):
    number = GGMLQuantizationType[kind].value
    size, size_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert (BLOCKS[number].size, BLOCKS[number].size_bytes) == (size, size_bytes)
    rows = random_blocks(kind, (7, 3 * max(size, 32)))
    with np.errstate(all="ignore"):
        expected = dequantize(rows, GGMLQuantizationType[kind])
        found = values_from_rows(number, rows)
    if kind == "BF16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(found.astype(np.float32), expected)
    if (make := BLOCKS[number].grid) is not None:
        grid = make(in_blocks(number, rows))
        assert grid.weight().tobytes() == found.tobytes()
        assert grid.levels.max() < 1 << grid.bits
        assert grid.levels.shape[1] == grid.group * grid.scales.shape[1]


def test_a_grid_is_in_the_order_of_the_values(tmp_path):
    write_model(tmp_path / "model.gguf", "llama", {"_q.": "Q4_1", "norm": "F32", "down": "Q6_K", "": "Q8_0"})
    files = open_files(resolve_checkpoint(str(tmp_path / "model.gguf")))
    grids = {key: files.grid(key) for key in files.headers}
    assert {key for key, grid in grids.items() if grid is None} == {key for key in grids if "norm" in key}
    for key, grid in grids.items():
        assert grid is None or grid.weight().tobytes() == files.array(key).tobytes(), key


def test_experts_have_grids_of_their_own(tmp_path):
    write_model(tmp_path / "model.gguf", "qwen3moe", "Q4_1")
    files = open_files(resolve_checkpoint(str(tmp_path / "model.gguf")))
    keys = [key for key in files.headers if ".experts." in key]
    assert len(keys) == 2 * 4 * 3
    assert len({files.array(key).tobytes() for key in keys}) == len(keys)
    for key in keys:
        grid = files.grid(key)
        assert grid is not None
        assert grid.weight().tobytes() == files.array(key).tobytes()
