# SPDX-License-Identifier: Apache-2.0
"""speccompile vectors: test vectors of the acceptance rules, for any engine that verifies drafts."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Rule(StrEnum):
    """`core.vectors.FORMS`, which would import numpy here."""

    greedy, race, chain, tree = "greedy", "race", "chain", "tree"


def vectors_command(
    rule: Annotated[Rule | None, typer.Option("--rule", help="Of one rule; default: of all.")] = None,
    output: Annotated[Path | None, typer.Option("--out", "-o", help="Write to a file instead of stdout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Vectors are JSON with or without it.")] = False,
) -> None:
    """Print test vectors of the acceptance rules (docs/reference/cli.md has the format)."""
    import json

    from speccompile.bundle.files import write_file
    from speccompile.core.vectors import FORMS, make_vectors

    del as_json
    made = make_vectors(tuple(FORMS) if rule is None else (rule.value,))
    lines = ",\n".join(json.dumps(vector) for vector in made["vectors"])
    text = f'{{"format": {made["format"]}, "vectors": [\n{lines}\n]}}\n'
    if output is None:
        typer.echo(text, nl=False)
        return
    write_file(output, text, makes_folder=True)
