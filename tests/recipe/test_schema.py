# SPDX-License-Identifier: Apache-2.0
"""The committed JSON schema is current and agrees with the validation."""

from pathlib import Path

import pytest

from speccompile.core import registry
from speccompile.recipe.json_schema import schema_from_registry, text_from_schema
from speccompile.recipe.models import recipe_model

COMMITTED = Path(__file__).parents[2] / "docs" / "recipe.schema.json"
REGISTERED = dict(registry.METHODS)


@pytest.fixture(autouse=True)
def real_methods(methods: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real registry, not that of the other tests of this folder."""
    monkeypatch.setattr(registry, "METHODS", REGISTERED)


def test_the_committed_schema_is_current():
    assert COMMITTED.read_text() == text_from_schema(), "run: speccompile schema -o docs/recipe.schema.json"


def test_every_method_has_its_section():
    schema = schema_from_registry()
    sections = schema["properties"]["speculator"]["oneOf"]
    assert len(sections) == len(registry.METHODS)
    for name in registry.METHODS:
        section = schema["$defs"][f"{name}_speculator"]
        assert section["properties"]["method"]["const"] == name
        assert section["additionalProperties"] is False
        assert "method" in section["required"]


def test_the_keys_are_those_of_the_validation():
    schema = schema_from_registry()
    model = recipe_model("none")
    assert set(schema["properties"]) == set(model.model_fields)
    for name in ("target", "engine", "decoding"):
        section = model.model_fields[name].annotation
        definition = schema["properties"][name]["$ref"].rpartition("/")[2]
        assert section is not None
        assert set(schema["$defs"][definition]["properties"]) == set(section.model_fields)


def test_every_reference_resolves():
    schema = schema_from_registry()

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [r for v in value.values() for r in references(v)]
        return [r for v in value for r in references(v)] if isinstance(value, list) else []

    names = {r.removeprefix("#/$defs/") for r in references(schema)}
    assert names == set(schema["$defs"])
