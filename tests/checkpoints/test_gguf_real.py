# SPDX-License-Identifier: Apache-2.0
"""A real model in a GGUF file is what transformers makes of it, and what the package `gguf` means by its blocks."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer

from speccompile.checkpoints.checkpoint import special_tokens
from speccompile.checkpoints.folders import resolve_checkpoint
from speccompile.checkpoints.model_config import read_model_config
from speccompile.checkpoints.tensor_files import open_files
from speccompile.export.weights import read_weights
from tests.real_model import gemma3, smollm2

TEXTS = (
    "The capital of France is",
    "def f(x):\n\treturn x ** 2  # 12.5 %",
    "Привет 你好 🙂",
    "<|im_start|>user\nHi<|im_end|>",
)


@pytest.fixture(scope="module")
def file() -> Path:
    return smollm2()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "cache"))


def hub_key(name: str) -> str:
    """Returns the key in a checkpoint of a tensor of llama.cpp's."""
    for old, new in (("token_embd", "embed_tokens"), ("output_norm", "norm"), ("blk.", "layers."),
                     ("attn_output", "self_attn.o_proj"), ("attn_norm", "input_layernorm"),
                     ("ffn_norm", "post_attention_layernorm")):  # fmt: skip
        name = name.replace(old, new)
    name = re.sub(r"\battn_([qkv])\b", r"self_attn.\1_proj", name)
    return "model." + re.sub(r"\bffn_(gate|up|down)\b", r"mlp.\1_proj", name)


def in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def test_smollm2_has_the_values_of_its_blocks(file):
    files = open_files(resolve_checkpoint(str(file)))
    left = set(files.headers)
    for tensor in GGUFReader(file).tensors:
        key = hub_key(tensor.name)
        expected = dequantize(tensor.data, tensor.tensor_type)
        heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2], 0)
        found = files.array(key)
        assert found.tobytes() == (in_halves(expected, heads) if heads else expected).tobytes(), key
        left.remove(key)
    assert not left
    assert len(files.grid_keys) == 211


def test_smollm2_has_the_logits_of_transformers_own_reader(file):
    from transformers import AutoModelForCausalLM

    folder = resolve_checkpoint(str(file))
    model, info = read_weights(folder, read_model_config(folder))
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    their_tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert not any(info.values())
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == their_tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
    with torch.inference_mode():
        ids = torch.tensor([tokenizer(TEXTS[1]).input_ids])
        assert torch.equal(model.eval()(ids).logits, theirs.eval()(ids).logits)
    assert special_tokens(folder) == ([2, 0], 1)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_gemma_has_the_values_of_its_blocks_and_its_config():
    path = gemma3()
    folder = resolve_checkpoint(str(path))
    files, values = open_files(folder), {t.name: t for t in GGUFReader(path).tensors}
    kinds = {tensor.tensor_type.name for tensor in values.values()}
    assert kinds == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    for layer in range(18):
        for part in ("q", "k", "v"):
            held = values[f"blk.{layer}.attn_{part}.weight"]
            found = files.array(f"model.layers.{layer}.self_attn.{part}_proj.weight")
            assert found.tobytes() == dequantize(held.data, held.tensor_type).tobytes()
    config = read_model_config(folder)
    model, info = read_weights(folder, config)
    assert not any(info.values())
    assert (config.vocab_size, config.sliding_window, config.query_pre_attn_scalar) == (262144, 512, 256)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("1, 2, 3, 4, 5, 6,").input_ids
    with torch.inference_mode():
        best = model.eval()(torch.tensor([ids])).logits[0, -1].argmax()
    assert ids[0] == 2
    assert tokenizer.decode(best) in (" ", " 7")
