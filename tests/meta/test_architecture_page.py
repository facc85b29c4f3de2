# SPDX-License-Identifier: Apache-2.0
"""architecture.md and CONTRIBUTING.md name the packages in the order of the import contract's layers."""

import re
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGE = (REPO / "docs/explanation/architecture.md").read_text()
ROWS = re.findall(r"^\| `([a-z_]+)(?:/|\.py)` \| \S", PAGE, re.MULTILINE)


def test_each_package_and_no_other_has_its_line():
    package = REPO / "speccompile"
    names = {path.parent.name for path in package.glob("*/__init__.py")}
    names |= {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    assert sorted(ROWS) == sorted(names)


@pytest.fixture(scope="module")
def layers():
    """Returns the packages of each layer, sorted, from the highest layer to the lowest."""
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [sorted(re.findall(r"speccompile\.(\w+)", row)) for row in rows]


def test_lines_stand_in_the_order_of_the_layers(layers):
    rows = iter(ROWS)
    assert [sorted(next(rows) for _ in layer) for layer in layers] == layers


def test_contributing_names_the_layers_in_their_order(layers):
    order = ", ".join(" and ".join(layer) for layer in layers)
    assert f"Imports point down: {order}." in (REPO / "CONTRIBUTING.md").read_text()


def test_the_life_of_a_request_has_ten_sentences_that_name_what_is_there():
    life = PAGE.partition("## The life of a request")[2]
    assert re.findall(r"^(\d+)\. ", life, re.MULTILINE) == [str(number) for number in range(1, 11)]
    for path in re.findall(r"`((?:runtime|serving)/[\w/.]+)`", life):
        assert (REPO / "speccompile" / path).exists(), path
