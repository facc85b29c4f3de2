# SPDX-License-Identifier: Apache-2.0
"""Models out of GGUF files, lowered for ONNX Runtime: every row of the graph is one of the file, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from speccompile.backends.base import CompileJob
from speccompile.backends.onnxruntime.backend import GRAPH_FILE, OnnxRuntimeBackend
from speccompile.backends.onnxruntime.cuda_backend import OrtCudaBackend
from speccompile.checkpoints.folders import folder_from_gguf
from speccompile.checkpoints.tensor_files import TensorFiles, open_files
from speccompile.core.jobs import CompileOptions
from speccompile.graph_kinds.decoder import decoder_spec, verified_spec
from tests import store
from tests.backends.stored_lab import digests, rows_of

pytest.importorskip("torch")

from tests.checkpoints.gguf_lab import write_model

pytestmark = pytest.mark.export

# By a name: the model, and the block types of its matrices.
FILES: dict[str, tuple[str, Any]] = {
    "Q4_1, head Q8_0": ("llama", {"token_embd": "Q8_0", "": "Q4_1"}),
    "Q4_0": ("llama with biases", "Q4_0"),
    "Q4_K, V and head Q6_K": ("llama", {"attn_v": "Q6_K", "token_embd": "Q6_K", "": "Q4_K"}),
    "Q5_K": ("qwen3", "Q5_K"),
    "Q5_0, fused": ("phi3", "Q5_0"),
    "Q5_1": ("gemma3", {"token_embd": "Q8_0", "": "Q5_1"}),
    "Q8_0": ("qwen2", "Q8_0"),
    "experts": ("qwen3moe", "Q4_0"),
    "experts with minimums": ("mixtral", "Q4_1"),
    "floats beside": ("llama", {"attn_k": "F16", "token_embd": "F32", "": "Q4_0"}),
}


def compiled(folder: Path, dest: Path, backend: OnnxRuntimeBackend, form: str) -> tuple[dict[str, Any], TensorFiles]:
    files = open_files(folder)
    model, dims = store.export_decoder(folder, weights="checkpoint", max_seq_len=32)
    spec = verified_spec(decoder_spec("target", dims))
    options = CompileOptions(grids=files)
    return backend.compile(CompileJob(model, spec, dest, quantization="stored", form=form, options=options)), files


@pytest.mark.parametrize("form", ["packed", "blocks"])
@pytest.mark.parametrize("name", FILES)
def test_weights_stay_as_the_file_has_them(name, form, tmp_path):
    write_model(tmp_path / "model.gguf", *FILES[name])
    report, files = compiled(folder_from_gguf(tmp_path / "model.gguf"), tmp_path / "out", OnnxRuntimeBackend(), form)
    stored = set().union(*(digests(files.array(key)) for key in files.grid_keys))
    built = set().union(*(digests(weight) for weight in rows_of(tmp_path / "out" / GRAPH_FILE)))
    # Routers are floats; so is an embedding beside MatMulNBits where it is not tied.
    is_float = {key: key.endswith(".gate.weight") or (form == "blocks" and "embed" in key) for key in files.grid_keys}
    floats = set().union(*(digests(files.array(key)) for key in files.grid_keys if is_float[key]))
    assert built | floats == stored | floats
    assert report["weights"]["num_float"] == (2 + 1 if name == "floats beside" else 0)


def test_onnx_runtime_on_gpus_has_the_same_weights(tmp_path):
    write_model(tmp_path / "model.gguf", "llama", "Q4_0")
    report, files = compiled(folder_from_gguf(tmp_path / "model.gguf"), tmp_path / "out", OrtCudaBackend(), "blocks")
    built = set().union(*(digests(weight) for weight in rows_of(tmp_path / "out" / GRAPH_FILE)))
    assert built == set().union(*(digests(files.array(key)) for key in files.grid_keys))
    assert report["weights"]["num_float"] == 0
