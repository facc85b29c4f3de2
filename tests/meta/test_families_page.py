# SPDX-License-Identifier: Apache-2.0
"""docs/reference/families.md promises those architectures that the export's equality tests cover, and no other."""

import re
from pathlib import Path

import pytest

from speccompile.checkpoints.config_values import _REFUSED, check_config
from speccompile.errors import ExportError
from tests.export.families import CONFIGS, GEMMA4
from tests.export.hybrids import HYBRIDS

PAGE = (Path(__file__).parents[2] / "docs/reference/families.md").read_text()
SUPPORTED, _, REFUSED = PAGE.partition("## What is refused")


def test_every_family_on_the_page_is_tested_and_the_other_way_round():
    promised = re.findall(r"^\| [^|]+ \| `([a-z0-9_]+)` \|", SUPPORTED, re.MULTILINE)
    promised.remove("model_type")  # the head of the table
    assert len(set(promised)) == len(promised)
    tested = (*CONFIGS.values(), *GEMMA4.values(), *HYBRIDS.values())
    assert set(promised) == {config["model_type"] for config in tested}


def test_every_architecture_called_refused_is_refused():
    names = set(re.findall(r"`([a-z0-9_-]+)`", REFUSED.partition("| refused for |")[2])) & set(_REFUSED)
    assert names == set(_REFUSED)
    for name in names:
        with pytest.raises(ExportError, match="cannot be exported"):
            check_config({"model_type": name}, max_seq_len=16)
