# SPDX-License-Identifier: Apache-2.0
"""docs/explanation/architecture.md has a line for each package, in the order of the layers' import contract."""

import re
import tomllib
from pathlib import Path

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs/explanation/architecture.md").read_text()
ROWS = re.findall(r"^\| `([a-z_]+)(?:/|\.py)` \| \S", PAGE, re.MULTILINE)


def test_each_package_and_no_other_has_its_line():
    package = REPO / "speccompile"
    names = {path.parent.name for path in package.glob("*/__init__.py")}
    names |= {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    assert sorted(ROWS) == sorted(names)


def test_lines_stand_in_the_order_of_the_layers():
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    floors = [sorted(re.findall(r"speccompile\.(\w+)", layer)) for layer in layers]
    rows = iter(ROWS)
    assert [sorted(next(rows) for _ in floor) for floor in floors] == floors


def test_the_life_of_a_request_has_ten_sentences_that_name_what_is_there():
    life = PAGE.partition("## The life of a request")[2]
    assert re.findall(r"^(\d+)\. ", life, re.MULTILINE) == [str(number) for number in range(1, 11)]
    for path in re.findall(r"`((?:runtime|serving)/[\w/.]+)`", life):
        assert (REPO / "speccompile" / path).exists(), path
