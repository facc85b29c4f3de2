# SPDX-License-Identifier: Apache-2.0
"""docs/reference/doctor.md lists every layout and every check."""

import re
from pathlib import Path

from speccompile.core.registry import load_formats
from speccompile.doctor.doctor import KNOWN

PAGE = (Path(__file__).parents[2] / "docs/reference/doctor.md").read_text()


def rows(heading):
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([a-z0-9_./]+)` \|", section, re.MULTILINE)


def test_the_page_has_every_layout():
    assert sorted(rows("Layouts")) == sorted(layout.name for layout in load_formats())


def test_the_page_has_every_check():
    named = {check.name for layout in load_formats() for check in layout.checks}
    assert sorted(rows("Checks")) == sorted({"files", "format"} | named)


def test_the_page_names_what_is_known_only():
    line = next(line for line in PAGE.splitlines() if line.startswith("Known but not supported yet"))
    names = line.partition(": ")[2].lower().replace("-", "").strip(".").split(", ")
    assert sorted(names) == sorted(known.name for known in KNOWN)
