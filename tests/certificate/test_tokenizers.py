# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from tokenizers import Tokenizer

from speccompile.certificate.checkpoint import check_tokenizer
from tests.certificate.certificate_lab import make_engine
from tests.common.test_tokenizer_file import CUT, FILLED
from tests.mock_lm import VOCAB
from tests.pipeline import fakes

pytestmark = pytest.mark.export


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(fakes.tokenizer(VOCAB)))
    return tmp_path


def engine_with(tokenizer):
    engine = make_engine()
    engine.tokenizer = Tokenizer.from_str(json.dumps(tokenizer))
    return engine


def test_the_checkpoints_own_tokenizer_passes(checkpoint):
    check = check_tokenizer(engine_with(fakes.tokenizer(VOCAB)), checkpoint)
    assert check.status == "passed" and check.facts["num_entries_differing"] == 0
    assert check.facts["reader"] == "transformers" and check.summary.startswith("15 of 15 texts")


@pytest.mark.parametrize("stored", [{"truncation": CUT | {"max_length": 8192}}, {"padding": FILLED}])
def test_a_tokenizer_that_cuts_or_fills_up_fails(checkpoint, stored):
    """The checkpoint has the same setting: transformers does not follow it."""
    changed = fakes.tokenizer(VOCAB) | stored
    (checkpoint / "tokenizer.json").write_text(json.dumps(changed))
    check = check_tokenizer(engine_with(changed), checkpoint)
    assert check.status == "failed" and check.facts["num_entries_differing"] == 0


def test_a_swapped_tokenizer_fails(checkpoint):
    other = fakes.tokenizer(VOCAB)
    words = other["model"]["vocab"]
    words["w3"], words["w4"] = words["w4"], words["w3"]
    check = check_tokenizer(engine_with(other), checkpoint)
    assert check.status == "failed" and check.facts["num_entries_differing"] == 2


def test_ids_beyond_the_targets_vocabulary_fail(checkpoint):
    large = fakes.tokenizer(VOCAB + 9)
    large["model"]["unk_token"] = f"w{VOCAB + 8}"
    check = check_tokenizer(engine_with(large), checkpoint)
    assert check.status == "failed" and f"the target has {VOCAB} tokens" in check.summary


def test_what_cannot_be_compared_is_not_run(tmp_path):
    engine = engine_with(fakes.tokenizer(VOCAB))
    assert check_tokenizer(engine, None).status == "not run"
    assert check_tokenizer(engine, tmp_path).status == "not run"
    assert "no tokenizer" in check_tokenizer(make_engine(), tmp_path).summary
