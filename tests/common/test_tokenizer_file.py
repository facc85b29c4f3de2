# SPDX-License-Identifier: Apache-2.0
"""Damaged tokenizer files are refused by name, whatever the library raises."""

import ast
import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from speccompile.common.tokenizer_file import encode_text, load_tokenizer
from speccompile.errors import CheckpointError, RuntimeFault
from speccompile.runtime.text import PromptBytes, most_bytes_of_a_token
from speccompile.serving.openai.completions import encode
from speccompile.serving.openai.errors import ApiError
from tests.pipeline import fakes

ROOT = Path(__file__).parents[2]
CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
FILLED = {
    "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
    "pad_id": 0, "pad_type_id": 0, "pad_token": "w0",
}  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "{}", "[" * 100_000, '{"version": "1.0", "model": {"type": "WordLevel"}}', "\x00"]
)
def test_a_damaged_tokenizer_is_refused(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="expected a tokenizers file") as caught:
        load_tokenizer(path, CheckpointError, "Download it again.")
    assert caught.value.where == str(path)


def test_other_faults_pass(tmp_path, monkeypatch):
    """Only the library's own `Exception` becomes our error; our errors and an interrupt pass."""
    tokenizers = pytest.importorskip("tokenizers")

    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizers, "Tokenizer", type("Fake", (), {"from_file": staticmethod(interrupt)}))
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(tmp_path / "x", CheckpointError, "Download it again.")


@pytest.mark.parametrize("stored", [{"truncation": CUT}, {"padding": FILLED}, {"truncation": CUT, "padding": FILLED}])
def test_stored_truncation_and_padding_are_reset(tmp_path, stored):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(fakes.tokenizer(9) | stored))
    tokenizer = load_tokenizer(path, CheckpointError, "")
    assert tokenizer.encode("w1 w2 w3 w4 w5").ids == [1, 2, 3, 4, 5]
    assert [row.ids for row in tokenizer.encode_batch(["w1", "w1 w2 w3 w4"])] == [[1], [1, 2, 3, 4]]


def test_no_other_module_reads_a_tokenizer():
    found = []
    paths = [path for top in ("speccompile", "examples", "bench") for path in (ROOT / top).rglob("*.py")]
    texts = {path: text for path in paths if "Tokenizer" in (text := path.read_text())}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("from_") and "Tokenizer" in ast.unparse(node):
                # transformers' own classes reset both settings at every call.
                found += [] if ast.unparse(node).endswith("from_pretrained") else [str(path.relative_to(ROOT))]
    assert found == ["speccompile/common/tokenizer_file.py"]


def test_a_panic_of_its_regular_expression_is_an_error_of_the_text():
    found = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    assert encode_text(found, "aab") == [0, 0, 1]
    with pytest.raises(RuntimeFault, match="prompt: got Onig: Regex search error: retry-limit-in-match over; expected"):
        encode_text(found, "a" * 60)
    engine = SimpleNamespace(tokenizer=found, prompt_bytes=PromptBytes(found, 10))
    for text in ("a" * 60, "a" * 5000):  # here and in a thread
        with pytest.raises(ApiError, match="retry-limit-in-match") as error:
            asyncio.run(encode(engine, text, special=True))
        assert (error.value.status, error.value.param) == (400, "prompt")


def byte_level(**added):
    found = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "abab": 3}, merges=[("a", "b"), ("ab", "ab")]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.add_special_tokens([AddedToken("<s>", **added)])
    return found


def with_parts(pre_tokenizer=None, normalizer=None, **added):
    found = byte_level(**added)
    if pre_tokenizer is not None:
        found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel()])
    if normalizer is not None:
        found.normalizer = normalizer
    return found


@pytest.mark.parametrize(
    ("tokenizer", "most"),
    [
        (byte_level(), 4),
        (with_parts(pre_tokenizers.Split(" ", "isolated")), 4),
        (with_parts(pre_tokenizers.Split(" ", "removed")), None),
        (with_parts(normalizer=normalizers.NFC()), None),
        (with_parts(rstrip=True), None),
        (Tokenizer(models.WordLevel({"a": 0}, "a")), None),
        (Tokenizer(models.BPE({"a": 0}, [])), None),
        (object(), None),
        (None, None),
    ],
)
def test_only_a_tokenizer_of_bytes_has_a_bound(tokenizer, most):
    assert most_bytes_of_a_token(tokenizer) == most


def test_a_text_that_cannot_fit_is_not_tokenized():
    found = byte_level()
    bound = PromptBytes(found, 2000)
    engine = SimpleNamespace(tokenizer=SimpleNamespace(encode=None), prompt_bytes=bound)
    with pytest.raises(ApiError, match="got a text of 8001 bytes; expected at most 2000 tokens, which 8000") as error:
        asyncio.run(encode(engine, "ab" * 4000 + "b", special=True))
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    bound.check("prompt", "ab" * 4000)
    engine.tokenizer = found
    assert asyncio.run(encode(engine, "ab" * 4000, special=True)) == [3] * 2000


def test_a_long_text_is_tokenized_without_pythons_lock():
    """By the one call that releases it, in a thread: others go on."""
    found, threads = byte_level(), set()

    def encode_batch_fast(texts, **options):
        threads.add(threading.current_thread())
        return found.encode_batch_fast(texts, **options)

    tokenizer = SimpleNamespace(encode=None, encode_batch_fast=encode_batch_fast)
    engine = SimpleNamespace(tokenizer=tokenizer, prompt_bytes=PromptBytes(tokenizer, 1))
    assert asyncio.run(encode(engine, "ab" * 4000, special=True)) == [3] * 2000
    assert threads and threading.current_thread() not in threads
