# SPDX-License-Identifier: Apache-2.0
"""Damaged tokenizer files are refused by name, whatever the library raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.errors import CheckpointError


@pytest.mark.parametrize(
    "text", ["", "{}", "[" * 100_000, '{"version": "1.0", "model": {"type": "WordLevel"}}', "\x00"]
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="expected a tokenizers file") as caught:
        load_tokenizer(path, CheckpointError, "Download it again.")
    assert caught.value.where == str(path)


def test_other_faults_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the library's own `Exception` becomes our error; our errors and an interrupt pass."""
    tokenizers = pytest.importorskip("tokenizers")

    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizers, "Tokenizer", type("Fake", (), {"from_file": staticmethod(interrupt)}))
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(tmp_path / "x", CheckpointError, "Download it again.")
