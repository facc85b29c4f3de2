# SPDX-License-Identifier: Apache-2.0
"""The committed JSON schema is current and agrees with the validation."""

from pathlib import Path

import pytest

from speccompile.recipe.models import schema_from_registry, text_from_schema

COMMITTED = Path(__file__).parents[2] / "docs" / "recipe.schema.json"
pytestmark = pytest.mark.usefixtures("real_methods")


def test_the_committed_schema_is_current():
    assert COMMITTED.read_text() == text_from_schema(), "run: speccompile schema -o docs/recipe.schema.json"


def test_every_reference_resolves():
    schema = schema_from_registry()

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [r for v in value.values() for r in references(v)]
        return [r for v in value for r in references(v)] if isinstance(value, list) else []

    names = {r.removeprefix("#/$defs/") for r in references(schema)}
    assert names == set(schema["$defs"])
