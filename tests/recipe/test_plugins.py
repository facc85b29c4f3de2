# SPDX-License-Identifier: Apache-2.0
"""A recipe may name methods and backends of other packages, with fields of their own."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from speccompile.backends.reference.backend import ReferenceBackend
from speccompile.common.parameters import parameter
from speccompile.core import registry
from speccompile.core.jobs import DraftBounds
from speccompile.core.registry import Method
from speccompile.errors import RecipeError
from speccompile.recipe import Device, load_recipe, resolve


@dataclass(frozen=True)
class EchoConfig:
    """Drafts the last token again."""

    num_draft_tokens: int = 2

    @property
    def draft_bounds(self) -> DraftBounds:
        return DraftBounds(self.num_draft_tokens)


class EchoMethod(Method):
    name = "echo"
    Config = EchoConfig


@dataclass(frozen=True)
class TableConfig:
    """A backend of look-up tables."""

    rows: int = parameter(8, ge=1, description="Rows of a table.")


class TableBackend(ReferenceBackend):
    name = "table"
    Config = TableConfig


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site/echo-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{registry.METHOD_GROUP}]\necho = {__name__}:EchoMethod\n"
        f"[{registry.BACKEND_GROUP}]\ntable = {__name__}:TableBackend\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")


TEXT = "target: {model: org/gpt2}\nspeculator: {method: echo}\nengine: {backend: table, table: {rows: 3}}\n"


def test_a_recipe_has_the_fields_of_both(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(TEXT)
    plan = resolve(load_recipe(path, ["speculator.num_draft_tokens=4"]), Device("cpu", 2))
    assert plan.method == "echo" and plan.speculator == EchoConfig(4)
    assert plan.engine.backend == "table" and plan.options == TableConfig(3)
    assert plan.recipe_from_plan()["engine"]["table"] == {"rows": 3}


@pytest.mark.parametrize(
    ("override", "where", "words"),
    [
        ("engine.table.rows=0", "engine.table.rows", "greater than or equal to 1"),
        ("engine.table.columns=1", "engine.table.columns", "unknown key 'columns'"),
        ("engine.backend=tabel", "engine.backend", "Did you mean 'table'?"),
        ("speculator.method=ecko", "speculator.method", "Did you mean 'echo'?"),
        ("speculator.num_draft_tokens=99", "speculator.num_draft_tokens", "99"),
    ],
)
def test_their_fields_are_checked_as_others_are(tmp_path, override, where, words):
    path = tmp_path / "r.yaml"
    path.write_text(TEXT)
    with pytest.raises(RecipeError) as caught:
        resolve(load_recipe(path, [override]), Device("cpu", 2))
    assert where in caught.value.where and words in str(caught.value)
