# SPDX-License-Identifier: Apache-2.0
"""Calibration texts: what a file may hold, which graphs use them, and that they are part of a graph's key."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from speccompile.bundling import calibration
from speccompile.bundling.calibration import MAX_TOKENS, MIN_TOKENS, calibration_of, read_texts
from speccompile.core import registry
from speccompile.core.jobs import GraphJob
from speccompile.errors import RecipeError

VOCAB = 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder with a tokenizer of 32 words."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_text_file_is_one_text(folder: Path) -> None:
    (folder / "a.txt").write_text("w1 w2 w31 " * 100)
    [text] = read_texts(folder / "a.txt", folder, VOCAB)
    assert text == (1, 2, 31) * 100


def test_lines_hold_texts_or_token_ids(folder: Path) -> None:
    ids = [i % VOCAB for i in range(300)]
    path = lines(folder / "a.jsonl", {"prompt": "w3 w4"}, {"text": "w5", "prompt": "w6"}, {"prompt": ids, "id": 1})
    assert read_texts(path, folder, VOCAB) == ((3, 4), (5,), tuple(ids))


def test_no_more_than_the_first_tokens_are_read(folder: Path) -> None:
    path = lines(folder / "a.jsonl", *[{"text": [1] * 30000}] * 3)
    texts = read_texts(path, folder, VOCAB)
    assert [len(text) for text in texts] == [30000, MAX_TOKENS - 30000]


@pytest.mark.parametrize(
    ("name", "content", "where", "expected"),
    [
        ("a.txt", b"w1 w2", "a.txt", f"at least {MIN_TOKENS}"),
        ("a.txt", b"\xff\xfe\x00", "a.txt", "UTF-8"),
        ("a.jsonl", b'{"prompt": "w1"}\n{"prompt"\n', "a.jsonl:2", "one JSON object"),
        ("a.jsonl", b'\n{"words": "w1"}\n', "a.jsonl:2", "`text` or `prompt`"),
        ("a.jsonl", b'{"prompt": [1, "w2"]}\n', "a.jsonl:1", "text or token ids"),
        ("a.jsonl", b'{"prompt": [1, 99]}\n', "a.jsonl:1", f"ids below {VOCAB}"),
        ("a.jsonl", b"", "a.jsonl", f"at least {MIN_TOKENS}"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(
    folder: Path, name: str, content: bytes, where: str, expected: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        read_texts(folder / name, folder, VOCAB)
    error = caught.value
    assert error.where == f"target.calibration: {folder / where}" and expected in error.expected
    assert error.got and error.todo


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is read of a plan."""

    calibration: str = "auto"
    weights: str = "checkpoint"
    drafts: tuple[GraphJob, ...] = ()


def texts_of(plan: Plan, quantization: str = "int4", name: str = "target", source: Any = None) -> Any:
    backend = SimpleNamespace(calibrates=("int4", "auto"))
    return calibration_of(plan, GraphJob(name, "model", quantization), source, backend)  # type: ignore[arg-type]


def test_an_int4_target_draws_its_text_where_none_is_given(folder: Path) -> None:
    assert texts_of(Plan()) == () == texts_of(Plan(), "auto")
    (folder / "a.txt").write_text("w1 w2 " * 200)
    source = SimpleNamespace(folder=folder, dims=SimpleNamespace(vocab_size=VOCAB))
    [text] = texts_of(Plan(str(folder / "a.txt")), source=source)
    assert text == (1, 2) * 200


def test_weights_are_rounded_elsewhere() -> None:
    assert texts_of(Plan(), "int8") is None and texts_of(Plan(), "none") is None
    assert texts_of(Plan(), name="draft") is None
    assert texts_of(Plan("none")) is None and texts_of(Plan(weights="random")) is None


def test_a_target_whose_draft_shares_its_quantised_weights_is_rounded_as_the_draft_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "find_class", lambda source: SimpleNamespace(shares_weights=source == "shares"))
    assert texts_of(Plan(drafts=(GraphJob("draft", "m", "int4", "shares"),))) is None
    assert texts_of(Plan(drafts=(GraphJob("draft", "m", "none", "shares"),))) == ()
    assert texts_of(Plan(drafts=(GraphJob("draft", "m", "int4", "own"),))) == ()
    assert calibration.AUTO_TEXTS == "auto"
