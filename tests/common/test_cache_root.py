# SPDX-License-Identifier: Apache-2.0
"""The cache's folder and what stands in its way; messages about missing packages; the package's conversations."""

import importlib.metadata
import logging
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from speccompile.common import extras
from speccompile.common.cache_root import cache_root, find_cache_folder, make_cache_folder
from speccompile.common.chat_prompts import read_chats
from speccompile.errors import BuildError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("mine")
    return path


def test_the_variable_or_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path / "deep/cache"))
    assert cache_root() == tmp_path / "deep/cache" and not cache_root().exists()
    assert make_cache_folder("tuning") == cache_root() / "tuning" and (cache_root() / "tuning").is_dir()
    monkeypatch.setenv("SPECCOMPILE_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_cache_folder() == tmp_path / ".cache/speccompile"
    monkeypatch.setenv("SPECCOMPILE_CACHE", "~/cache")
    assert cache_root() == tmp_path / "cache"


@pytest.mark.parametrize("below", ["", "cache"])
def test_a_file_in_the_way_is_named(file, below, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(file / below))
    for find in (make_cache_folder, find_cache_folder):
        with pytest.raises(BuildError) as caught:
            find("graphs")
        assert caught.value.where == "SPECCOMPILE_CACHE" and caught.value.got == f"a file at {file}"
        assert caught.value.todo == "Set SPECCOMPILE_CACHE to a folder that can be written."
    assert file.read_text() == "mine"


def test_no_permission_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write everywhere
    with pytest.raises(BuildError, match=rf"got no permission to write at {tmp_path}/graphs"):
        make_cache_folder("graphs")


def test_a_folder_that_cannot_be_made_is_named(monkeypatch):
    monkeypatch.setenv("SPECCOMPILE_CACHE", "/proc/cache")
    with pytest.raises(BuildError, match=r"SPECCOMPILE_CACHE: got .+ at /proc/cache; expected a folder in which"):
        make_cache_folder()


def test_the_default_folder_may_be_done_without(file, monkeypatch, caplog):
    monkeypatch.delenv("SPECCOMPILE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(file))
    with caplog.at_level(logging.WARNING, "speccompile"):
        assert find_cache_folder("tuning") is None
    assert "nothing is kept for the next start" in caplog.text and f"a file at {file}" in caplog.text
    with pytest.raises(BuildError, match=f"the cache folder {file}/.cache/speccompile: got a file at {file};"):
        make_cache_folder("graphs")


def test_a_user_without_a_home_folder(monkeypatch):
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SPECCOMPILE_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    with pytest.raises(BuildError, match="SPECCOMPILE_CACHE: got no value, and no home folder"):
        cache_root()


WHEEL = "speccompile-0.1.0-py3-none-any.whl"


def test_in_a_clone_it_is_the_clone():
    assert extras.install_command("serve") == f"pip install -e '{Path(__file__).parents[2]}[serve]'"


@pytest.mark.parametrize(
    ("record", "source"),
    [
        (f'{{"url": "file:///a%20b/{WHEEL}", "archive_info": {{}}}}', f"/a b/{WHEEL}"),
        ('{"url": "file:///src", "dir_info": {}}', "/src"),
        (f'{{"url": "https://host/{WHEEL}"}}', f"https://host/{WHEEL}"),
        *((text, "speccompile") for text in (None, "", "{", "[]", "null", "{}")),
    ],
)
def test_elsewhere_it_is_what_pip_has_recorded(record, source, tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "site-packages/speccompile/common/extras.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: record))
    assert extras.install_command("ort") == f"pip install '{source}[ort]'"


KINDS = ("code", "dialogue", "maths", "rewriting", "languages")


def test_each_conversation_is_there_once_and_waits_for_an_answer():
    chats = read_chats()
    assert len({chat.messages[-1]["content"] for chat in chats}) == len(chats) == 80
    for chat in chats:
        roles = [message["role"] for message in chat.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(message["content"].strip() and set(message) == {"role", "content"} for message in chat.messages)
    assert any(len(chat.messages) > 1 for chat in chats)


def test_the_kinds_take_turns():
    chats = read_chats()
    assert [chat.category for chat in chats] == list(KINDS) * 16
    assert Counter(chat.category for chat in chats[:20]) == dict.fromkeys(KINDS, 4)
