# SPDX-License-Identifier: Apache-2.0
"""speccompile schema: the JSON schema of recipes, for editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def schema_command(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file instead of stdout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The schema is JSON with or without it.")] = False,
) -> None:
    """Print the JSON schema of recipes (docs/recipe.schema.json is kept equal to it)."""
    from speccompile.bundle.files import write_file
    from speccompile.recipe.models import text_from_schema

    del as_json
    text = text_from_schema()
    if output is None:
        typer.echo(text, nl=False)
        return
    write_file(output, text, makes_folder=True)
