# SPDX-License-Identifier: Apache-2.0
"""A backend declares its recipe fields, one of another package as well as a built-in one."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from speccompile.backends.base import Backend
from speccompile.common.parameters import parameter
from speccompile.core import registry
from speccompile.errors import RecipeError
from speccompile.recipe import BuildPlan, Device, load_recipe, resolve
from speccompile.recipe.models import backend_section


def _check_name(value: str) -> str:
    if not value.islower():
        raise ValueError("lower case")
    return value


@dataclass(frozen=True)
class Inner:
    """A nested section."""

    depth: int = parameter(3, ge=1, description="How deep.")


@dataclass(frozen=True)
class Config:
    """The fields that only the chip reads."""

    dialect: Literal["a", "b"] = parameter("a", beside_section=True, description="Beside the section.")
    lanes: int | Literal["auto"] = parameter("auto", ge=1, le=8, description="Of the chip.")
    sizes: tuple[int, int] | Literal["auto"] = parameter("auto", ge=1)
    label: str = parameter("x", check=_check_name)
    inner: Inner = parameter(Inner())


class ChipBackend(Backend):
    name = "chip"
    Config = Config

    def compile(self, job: Any) -> dict[str, Any]:
        raise NotImplementedError

    def compile_rollback(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def load(self, job: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that adds a backend."""
    info = tmp_path / "chip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chip\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.BACKEND_GROUP}]\nchip = {__name__}:ChipBackend\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def plan(folder: Path, *overrides: str) -> BuildPlan:
    path = folder / "r.yaml"
    path.write_text("target: {model: org/gpt2}\n")
    return resolve(load_recipe(path, overrides), Device("cpu", 4))


def test_its_section_and_the_keys_beside_it_make_its_config(tmp_path):
    keys = ("engine.chip.lanes=4", "engine.chip.sizes=[1,2]", "engine.chip.inner.depth=5", "engine.dialect=b")
    made = plan(tmp_path, "engine.backend=chip", *keys)
    assert made.options == Config("b", 4, (1, 2), "x", Inner(5))
    written = made.recipe_from_plan()["engine"]
    assert (written["dialect"], written["chip"]["inner"]) == ("b", {"depth": 5}) and "dialect" not in written["chip"]
    assert plan(tmp_path, "engine.backend=chip").options == Config()
    assert asdict(Config())["inner"] == {"depth": 3}


def test_its_keys_are_unknown_with_another_backend(tmp_path):
    with pytest.raises(RecipeError, match="unknown key 'chip'"):
        plan(tmp_path, "engine.chip.lanes=4")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("chip.lanes=9", "less than or equal to 8"),
        ("chip.lanes=many", "'auto'"),
        ("chip.sizes=[0,1]", "greater than or equal to 1"),
        ("chip.inner.depth=0", "greater than or equal to 1"),
        ("chip.label=X", "lower case"),
        ("dialect=c", "'a' or 'b'"),
    ],
)
def test_values_out_of_their_bounds_are_refused_by_key(tmp_path, key, expected):
    with pytest.raises(RecipeError) as caught:
        plan(tmp_path, "engine.backend=chip", f"engine.{key}")
    name = key.partition("=")[0].removesuffix(".1")
    assert f"engine.{name}" in caught.value.where and expected in caught.value.expected


def test_descriptions_are_in_the_schema():
    section = backend_section("chip")
    assert section is not None
    schema = section.model_json_schema()
    assert (schema["title"], schema["description"]) == ("chip_engine", "The fields that only the chip reads.")
    assert schema["properties"]["lanes"]["description"] == "Of the chip."
    assert "dialect" not in schema["properties"]
    assert backend_section("reference") is None
