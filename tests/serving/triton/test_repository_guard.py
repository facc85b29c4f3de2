# SPDX-License-Identifier: Apache-2.0
"""A repository gains a model beside the others; what the command did not write stays. The bundle is a fake one."""

import os
import sys
from pathlib import Path

import pytest

from speccompile.bundle.stage_cache import StageCache
from speccompile.errors import BuildError, RecipeError
from speccompile.pipeline import build
from speccompile.serving.triton import repository as module
from speccompile.serving.triton.repository import RepositoryOptions, check_backend, write_backend, write_repository
from tests.pipeline import fakes


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        fakes.install(patch.setattr, lambda name, value: patch.setitem(sys.modules, name, value))
        plan = fakes.make_plan(fakes.write_recipe(folder / "in"))
        return build(plan, folder / "out", cache=StageCache(None)).path


def write(bundle: Path, repository: Path, **options) -> list[str]:
    return write_repository(bundle, repository, RepositoryOptions(**options))


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_other_models_stay_and_its_own_is_replaced(bundle, tmp_path):
    repository = tmp_path / "repo"
    (repository / "resnet" / "1").mkdir(parents=True)
    (repository / "resnet" / "1" / "m").write_text("precious")
    write(bundle, repository)
    write(bundle, repository, layout="trtllm")
    write(bundle, repository, name="second", links_bundle=True)
    inode = (repository / "second").stat().st_ino
    write(bundle, repository, max_batch_size=3)
    five = ["ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls"]
    assert entries(repository) == sorted([*five, "resnet", "second", "speccompile"])
    assert (repository / "resnet" / "1" / "m").read_text() == "precious"
    assert (repository / "second").stat().st_ino == inode
    assert "max_batch_size: 3" in (repository / "speccompile" / "config.pbtxt").read_text()
    assert entries(tmp_path) == ["repo"]


def test_a_link_to_a_repository_is_followed(bundle, tmp_path):
    (tmp_path / "link").symlink_to("repo")
    write(bundle, tmp_path / "link")
    write(bundle, tmp_path / "link", name="other")
    assert entries(tmp_path / "repo") == ["other", "speccompile"] and (tmp_path / "link").is_symlink()


def test_the_working_folder_may_be_the_repository(bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(bundle, Path())
    write(bundle, Path())
    assert os.listdir() == ["speccompile"]


def foreign_model(repository: Path) -> None:
    (repository / "speccompile" / "1").mkdir(parents=True)
    (repository / "speccompile" / "1" / "m").touch()


def edited_config(repository: Path) -> None:
    path = repository / "speccompile" / "config.pbtxt"
    path.write_text(f"{path.read_text()}# mine\n")


def another_version(repository: Path) -> None:
    (repository / "speccompile" / "2").mkdir()
    (repository / "speccompile" / "2" / "m").touch()


def a_link(repository: Path) -> None:
    (repository / "speccompile").rename(repository.parent / "moved")
    (repository / "speccompile").symlink_to("../moved")


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (foreign_model, "a folder with other things in it: 1/"),
        (edited_config, "files in it that were changed since speccompile wrote them: config.pbtxt"),
        (another_version, "files in it that speccompile did not write: 2/"),
        (a_link, "a link"),
    ],
)
def test_a_model_that_is_not_as_it_was_written_is_refused_before_the_work(bundle, tmp_path, monkeypatch, change, got):
    repository = tmp_path / "repo"
    if change is not foreign_model:
        write(bundle, repository)
    change(repository)
    monkeypatch.setattr(module, "staged_folder", None)
    with pytest.raises(BuildError) as caught:
        write(bundle, repository)
    assert caught.value.got == got


def test_a_repository_is_no_bundle_and_no_file(bundle, tmp_path):
    for dest in (bundle, bundle / "graphs" / "new"):
        with pytest.raises(BuildError, match="a bundle that speccompile wrote"):
            write(bundle, dest)
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="which is a file"):
        write(bundle, tmp_path / "file")


@pytest.mark.parametrize("name", ["", "..", "a/b", "../../x", ".hidden"])
def test_a_models_name_is_the_name_of_a_folder(bundle, tmp_path, name):
    with pytest.raises(RecipeError, match="--name"):
        write(bundle, tmp_path / "repo", name=name)


def test_the_backend_is_replaced_where_it_is_as_it_was_written(tmp_path, monkeypatch):
    path = write_backend(tmp_path)
    stub = path.with_name("triton_python_backend_stub")
    stub.touch()
    monkeypatch.setattr(module, "_BACKEND_MODULE", module._BACKEND_MODULE + "# of a later version\n")
    write_backend(tmp_path)
    assert "later version" in path.read_text() and stub.exists()
    for edited in (f"{path.read_text()}# mine\n", path.read_text().replace("import sys", "import os"), "mine"):
        path.write_text(edited)
        with pytest.raises(BuildError, match="a file that was edited"):
            check_backend(tmp_path)
        with pytest.raises(BuildError, match="a file that was edited"):
            write_backend(tmp_path)
        assert path.read_text() == edited
        path.unlink()
        write_backend(tmp_path)
