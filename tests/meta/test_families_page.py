# SPDX-License-Identifier: Apache-2.0
"""docs/families.md promises those architectures that the frontend's equality tests cover, and no other."""

import re
from pathlib import Path

import pytest

from speccompile.errors import ExportError
from speccompile.frontend.families import check_config
from tests.frontend.families import CONFIGS

PAGE = (Path(__file__).parents[2] / "docs/families.md").read_text()
SUPPORTED, _, REFUSED = PAGE.partition("## What is refused")


def test_every_family_on_the_page_is_tested_and_the_other_way_round():
    promised = re.findall(r"^\| [^|]+ \| `([a-z0-9_]+)` \|", SUPPORTED, re.MULTILINE)
    promised.remove("model_type")  # the head of the table
    assert len(set(promised)) == len(promised)
    assert set(promised) == {config["model_type"] for config in CONFIGS.values()}


def test_every_architecture_called_refused_is_refused():
    table = REFUSED.partition("| recurrent")[0] + REFUSED.partition("| recurrent")[2].partition("\n")[0]
    names = set(re.findall(r"`([a-z0-9_]+)`", table)) - {"model_type"}
    assert {"bloom", "falcon", "gpt_oss", "deepseek_v3", "mamba", "qwen3_next"} <= names
    for name in names:
        with pytest.raises(ExportError, match="cannot be exported"):
            check_config({"model_type": name}, max_seq_len=16)
