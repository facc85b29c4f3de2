# SPDX-License-Identifier: Apache-2.0
"""docs/how_to/add_backend.md has every attribute and every method of a backend and of an engine, and none besides."""

import inspect
import re
from pathlib import Path

from speccompile.backends.base import Backend, EngineBase
from speccompile.core.protocols import Engine

PAGE = (Path(__file__).parents[2] / "docs/how_to/add_backend.md").read_text()
ENGINE_HEADING = "## What an engine promises"


def rows(heading):
    """Cells of the table below a heading, the head left out."""
    section = PAGE.partition(f"{heading}\n")[2].partition("\n#")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def public(owner):
    return {name: value for name, value in vars(owner).items() if not name.startswith("_")}


def call(name, method):
    names = [name for name in inspect.signature(method).parameters if name != "self"]
    return f"{name}({', '.join(names)})"


def methods(owner):
    return {call(name, value) for name, value in public(owner).items() if inspect.isfunction(value)}


def test_the_page_has_every_attribute_of_a_backend_with_its_default():
    listed = {name.strip("`"): default.strip("`") for name, default, _ in rows("### Attributes")}
    known = inspect.get_annotations(Backend)
    assert listed == {name: repr(getattr(Backend, name)) if hasattr(Backend, name) else "none" for name in known}


def test_the_page_has_every_method_of_a_backend_with_its_arguments():
    listed = rows("### Methods")
    assert {cells[0].strip("`") for cells in listed} == methods(Backend)
    without_default = {cells[0].strip("`").partition("(")[0] for cells in listed if len(cells) == 2 or not cells[2]}
    assert without_default == Backend.__abstractmethods__


def test_the_page_has_every_member_of_an_engine():
    listed = {name for cells in rows(ENGINE_HEADING) for name in re.findall(r"`([^`]+)`", cells[0])}
    attributes = {name for name, value in public(Engine).items() if isinstance(value, property)}
    assert listed == methods(Engine) | attributes | set(inspect.get_annotations(Engine))


def test_the_base_of_engines_has_what_the_page_leaves_to_it():
    text = PAGE.partition(ENGINE_HEADING)[2]
    named = re.search(r"writes (.*?);", text).group(1)
    missing = set(public(Engine)) - set(dir(EngineBase)) | EngineBase.__abstractmethods__
    assert set(re.findall(r"`(\w+)`", named)) == {n for n in missing if not n.startswith("_")}
