# SPDX-License-Identifier: Apache-2.0
"""docs/families.md promises those architectures that the frontend's equality tests cover, and no other."""

import re
from pathlib import Path

from tests.frontend.families import CONFIGS

PAGE = (Path(__file__).parents[2] / "docs/families.md").read_text()


def test_every_family_on_the_page_is_tested_and_the_other_way_round():
    promised = re.findall(r"^\| [^|]+ \| `([a-z0-9_]+)` \|", PAGE, re.MULTILINE)
    promised.remove("model_type")  # the head of the table
    assert len(set(promised)) == len(promised)
    assert set(promised) == {config["model_type"] for config in CONFIGS.values()}
