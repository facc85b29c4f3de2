# SPDX-License-Identifier: Apache-2.0
"""docs/reference/recipe.md lists every key that a recipe may have, with its default and its meaning."""

import dataclasses
import re
from pathlib import Path

import pytest

from speccompile.core import registry
from speccompile.core.registry import METHODS
from speccompile.recipe.models import DecodingSection, Section, TargetSection, backend_section, engine_section
from speccompile.recipe.training import GeneratedSection, PlainSection, TextSection, TrainingBase, TrainingSection

TENSORRT = backend_section("tensorrt")
PAGE = (Path(__file__).parents[2] / "docs/reference/recipe.md").read_text()
ROWS = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*) \|$", PAGE, re.MULTILINE))
SECTIONS = {
    "target": TargetSection,
    "engine": engine_section(),
    "engine.tensorrt": TENSORRT,
    "engine.tensorrt.prefill": TENSORRT.model_fields["prefill"].annotation,
    "engine.tensorrt.decode": TENSORRT.model_fields["decode"].annotation,
    "decoding": DecodingSection,
    "training": TrainingSection,
    "training.text": TextSection,
    "training.plain": PlainSection,
    "training.generated": GeneratedSection,
}


def keys(section):
    """Returns the fields of a section that are no sections themselves."""
    fields = section.model_fields.items()
    return {
        k: f
        for k, f in fields
        if not (isinstance(f.annotation, type) and issubclass(f.annotation, (Section, TrainingBase)))
    }


def shown(default):
    """Returns a default as the page shows it: as YAML would, in code."""
    if isinstance(default, bool):
        return "`true`" if default else "`false`"
    if default is None:
        return "`null`"
    if isinstance(default, tuple):
        return f"`{list(default)}`"
    return f"`{default}`"


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_has_every_key_of_a_section(name):
    for key, field in keys(SECTIONS[name]).items():
        default = "required" if field.is_required() else shown(field.get_default(call_default_factory=True))
        assert ROWS.get(f"{name}.{key}", "").startswith(f"{default} | "), f"{name}.{key}: {default}"


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_has_no_other_key(name):
    listed = {row.rpartition(".")[2] for row in ROWS if row.rpartition(".")[0] == name}
    assert listed == set(keys(SECTIONS[name]))


SHARED = {
    key: (default, members)
    for key, default, members in re.findall(
        r"^\| `speculator\.([a-z_]+)` \| ([^|]+) \| ([^|]+) \| [^|]+ \|$",
        PAGE.partition("### Shared keys\n")[2].partition("\n###")[0],
        re.MULTILINE,
    )
}
WITH_MODEL = set(METHODS) - {"none", "ngram", "suffix", "hybrid"}


def members_of(cell):
    """Returns the methods that a cell of the shared keys names: `all`, `all but` some, or these."""
    named = set(re.findall(r"`([a-z0-9_]+)`", cell))
    return WITH_MODEL - named if cell.startswith("all") else named


def default_of(cell, method):
    """Returns a method's default out of a cell such as `chain`; `auto`: `medusa`, `eagle`."""
    common, *others = cell.split("; ")
    special = [other.partition(": ")[0] for other in others if f"`{method}`" in other.partition(": ")[2]]
    return special[0] if special else common


@pytest.mark.parametrize("method", METHODS)
def test_the_page_has_every_key_of_a_method(method):
    section = PAGE.partition(f"### `method: {method}`\n")[2].partition("\n##")[0]
    rows = dict(re.findall(r"^\| `speculator\.([a-z_]+)` \| ([^|]+) \| .* \|$", section, re.MULTILINE))
    shared = {key: default_of(cell, method) for key, (cell, of) in SHARED.items() if method in members_of(of)}
    assert not set(rows) & set(shared)
    fields = dataclasses.fields(registry.method(method).Config)
    expected = {f.name: "required" if f.default is dataclasses.MISSING else shown(f.default) for f in fields}
    assert rows | shared == expected


def test_shared_keys_name_methods_and_have_a_row_of_their_own():
    named = {name for _, of in SHARED.values() for name in re.findall(r"`([a-z0-9_]+)`", of)}
    assert SHARED
    assert named <= WITH_MODEL


HEADS = {
    method: dict(re.findall(r"`([a-z_]+)` `?([\w.\[\]-]+)`?", cell))
    for method, cell in re.findall(
        r"^\| `([a-z0-9_]+)` \| ([^|]+) \| [^|]+ \| [^|]+ \|$",
        (Path(__file__).parents[2] / "docs/reference/training.md").read_text(),
        re.MULTILINE,
    )
}


@pytest.mark.parametrize("method", METHODS)
def test_the_page_of_training_has_every_size_of_a_method(method):
    config = registry.method(method).TrainingConfig
    fields = () if config is None else dataclasses.fields(config)
    assert HEADS.get(method, {}) == {field.name: shown(field.default).strip("`") for field in fields}
