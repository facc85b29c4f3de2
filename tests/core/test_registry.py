# SPDX-License-Identifier: Apache-2.0
"""One table of methods; other packages add theirs as entry points, which are looked up for unknown names alone."""

from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest

from speccompile.core import registry
from speccompile.core.registry import Method
from speccompile.errors import RecipeError


class EchoMethod(Method):
    name = "echo"
    formats = f"{__name__}:FORMATS"


FORMATS = ("a layout",)


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that adds a method, and tries to take the name of one."""
    info = tmp_path / "echo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo\nVersion: 1.0\n")
    target = f"{__name__}:EchoMethod"
    (info / "entry_points.txt").write_text(f"[{registry.METHOD_GROUP}]\necho = {target}\nngram = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("sys").modules[__name__])


@pytest.mark.usefixtures("echo")
def test_an_entry_point_is_a_method_and_takes_no_name_of_the_table():
    assert isinstance(registry.method("echo"), EchoMethod)
    assert registry.method("ngram").name == "ngram"
    names = [method.name for method in registry.all_methods()]
    assert names == [*registry.METHODS, "echo"]
    assert registry.load_formats()[-1] == "a layout"
    with pytest.raises(RecipeError, match=r"one of dflash, .*echo") as caught:
        registry.method("ecko")
    assert "'echo'" in caught.value.todo


def test_names_of_the_table_look_no_package_up(monkeypatch, tmp_path):
    def refuse(**kwargs: str) -> NoReturn:
        raise AssertionError(kwargs)

    monkeypatch.syspath_prepend(tmp_path)  # nothing is kept for this search path
    monkeypatch.setattr(metadata, "entry_points", refuse)
    assert registry.method("none").name == "none" and registry.backend("reference").name == "reference"
    with pytest.raises(AssertionError, match=r"speccompile\.backends"):
        registry.backend("nowhere")


def test_a_method_has_the_name_of_its_line_and_needs_little():
    assert [method.name for method in registry.all_methods()] == list(registry.METHODS)
    bare = registry.method("none")
    assert bare.graph_jobs(None) == () and not bare.formats and not bare.trainer and bare.TrainingConfig is None
    with pytest.raises(NotImplementedError, match=r"Method\.make_proposer"):
        Method().make_proposer(None, {}, None)  # type: ignore[arg-type]


def test_a_method_that_can_be_trained_names_its_trainer():
    for method in registry.all_methods():
        assert bool(method.trainer) == (method.TrainingConfig is not None)
    with pytest.raises(RecipeError, match=r"one of dflash, draft_model, .*prophet"):
        registry.trainer("ngram")
    with pytest.raises(RecipeError) as caught:
        registry.trainer("medua")
    assert caught.value.where == "training.method" and "'medusa'" in caught.value.todo
