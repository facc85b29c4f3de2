# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of recipes, for completion and checks in editors."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, create_model

from speccompile.core import registry
from speccompile.recipe.models import Recipe, engine_section, speculator_section


def schema_from_registry() -> dict[str, Any]:
    """Returns the schema of a recipe file; `speculator` is one of the sections of the registered methods."""
    engine: Any = engine_section()
    model = create_model("Recipe", __base__=Recipe, engine=(engine, Field(default_factory=engine)))
    schema = model.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    definitions.pop("SpeculatorSection")
    sections = []
    for name in sorted(registry.METHODS):
        section = speculator_section(name).model_json_schema()
        definitions.update(section.pop("$defs", {}))
        section["required"] = sorted({"method", *section.get("required", ())})
        definitions[section["title"]] = section
        sections.append({"$ref": f"#/$defs/{section['title']}"})
    for name in ("speculator", "engine", "decoding"):
        schema["properties"][name].pop("default", None)
    schema["properties"]["speculator"] = {"oneOf": sections, "description": "The method and its own keys."}
    backend = definitions["EngineSection"]["properties"]["backend"]
    backend["enum"] = sorted(registry.BACKENDS)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "speccompile recipe",
        **{k: v for k, v in schema.items() if k not in ("title", "description")},
    }


def text_from_schema() -> str:
    return json.dumps(schema_from_registry(), indent=2, sort_keys=False) + "\n"
