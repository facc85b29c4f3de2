# SPDX-License-Identifier: Apache-2.0
"""Which tokens a draft may name: the most frequent ones of a text, and those that end it."""

import json
from pathlib import Path

import numpy as np
import pytest

from speccompile.checkpoints.draft_vocab import MIN_TOKENS, choose_tokens, tokens_of
from speccompile.errors import CheckpointError, RecipeError
from speccompile.graph_kinds.decoder import DraftVocab
from speccompile.speculators.draft_model.config import DraftModelConfig
from speccompile.speculators.mtp.config import MtpConfig
from tests.pipeline import fakes

pytestmark = pytest.mark.export

VOCAB, END = 32, 31


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [END, 999]}))
    return tmp_path


def test_the_most_frequent_tokens_are_kept_and_of_equal_ones_the_lower():
    made = tokens_of([[5, 5, 5, 9, 9, 7, 7, 2]], 3, 16)
    assert made.ids == (5, 7, 9) and made.coverage == 7 / 8
    assert tokens_of([[5, 5, 5, 9, 9, 7, 7, 2]], 2, 16).ids == (5, 7)
    assert tokens_of([[5, 5, 4]], 4, 16).ids == (0, 1, 4, 5)  # tokens that do not occur come by their ids


def test_ends_of_text_are_kept_though_no_text_has_them():
    assert tokens_of([[5, 5, 9]], 2, 16, [15]).ids == (5, 15)


def test_coverage_of_held_out_text_is_of_tokens_chosen_without_it():
    texts = [[1, 1, 2, 2], [1, 2], [1, 2], [7, 7, 7, 7, 7, 1]]
    made = tokens_of(texts, 2, 16)
    assert made.ids == (1, 7) and made.coverage == 10 / 14
    assert made.held_out == 1 / 6  # chosen without the last text, 1 and 2 are kept
    assert tokens_of([[1, 1, 1, 2, 2, 2, 1, 9]], 2, 16).held_out == 1 / 2  # the last fourth of a single text


def test_counts_are_those_of_a_scan():
    rng = np.random.default_rng(5)
    texts = [rng.zipf(1.3, 500).clip(max=63).tolist() for _ in range(5)]
    made, flat = tokens_of(texts, 10, 64), [token for text in texts for token in text]
    wanted = sorted(range(64), key=lambda token: (-flat.count(token), token))[:10]
    assert made.ids == tuple(sorted(wanted))
    assert made.coverage == pytest.approx(sum(token in wanted for token in flat) / len(flat), abs=1e-12)


def test_a_files_tokens_are_chosen_with_the_models_own_end(folder):
    (folder / "a.txt").write_text("w1 w2 w2 w3 " * 500)
    made = choose_tokens(DraftVocab(3, str(folder / "a.txt")), folder, VOCAB)
    assert made.ids == (1, 2, END) and made.record() == {"size": 3, "coverage": 0.75, "held_out": 0.75}
    (folder / "b.txt").write_text("w1 w2 w2 w4 " * 500)
    other = choose_tokens(DraftVocab(3, str(folder / "b.txt")), folder, VOCAB)
    assert other.digest == made.digest  # other text, the same tokens: the same graph
    assert choose_tokens(DraftVocab(4, str(folder / "b.txt")), folder, VOCAB).digest != made.digest


def test_wrong_sizes_and_texts_are_refused(folder):
    (folder / "a.txt").write_text("w1 " * (MIN_TOKENS - 1))
    with pytest.raises(RecipeError, match=r"draft_vocab_text.*expected at least 1000"):
        choose_tokens(DraftVocab(3, str(folder / "a.txt")), folder, VOCAB)
    with pytest.raises(RecipeError, match="fewer than the 32 tokens"):
        choose_tokens(DraftVocab(VOCAB, str(folder / "a.txt")), folder, VOCAB)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError):
        choose_tokens(DraftVocab(3, str(folder / "a.txt")), folder, VOCAB)


@pytest.mark.parametrize("config", [DraftModelConfig, MtpConfig])
def test_recipes_give_both_fields_or_none(config):
    assert config(model="m").draft_vocab is None
    assert config(model="m", draft_vocab_size=5, draft_vocab_text="t").draft_vocab == DraftVocab(5, "t")
    for fields, got in (
        ({"draft_vocab_size": 5}, "draft_vocab_size alone"),
        ({"draft_vocab_text": "t"}, "draft_vocab_text alone"),
        ({"draft_vocab_size": 1, "draft_vocab_text": "t"}, "1"),
    ):
        with pytest.raises(RecipeError) as caught:
            config(model="m", **fields)
        assert caught.value.got == got
