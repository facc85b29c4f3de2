# SPDX-License-Identifier: Apache-2.0
"""The reader of JSON from files that others wrote."""

import math
import os

import pytest

from speccompile.common import json_reader
from speccompile.common.json_reader import JsonFault, finite_number, parse_json, read_json_object, shown, whole_number
from speccompile.errors import CheckpointError


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "64 deep"),
        ("[" * 65 + "]" * 65, "64 deep"),
        ('{"a":' * 3_000, "64 deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "64 deep"),
        ("", "no JSON"),
        ("{", "no JSON"),
        (b'"\xff"', "no JSON"),
        ("9" * 5_000, "no JSON"),
        (r'{"a": "\ud800"}', "no Unicode"),
        (r'{"\udfff": 1}', "no Unicode"),
    ],
)
def test_texts_that_are_not_read(text, why):
    with pytest.raises(JsonFault, match=why):
        parse_json(text)


def test_texts_that_are_read():
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json(b'{"a": "\xc3\xa9"}') == {"a": "é"}
    assert math.isinf(parse_json("[0.0, Infinity]")[1])  # `time_step_limit` of a published config


@pytest.mark.parametrize("text", ["[]", "1", "null", "{", "[" * 100_000])
def test_a_file_without_an_object_is_refused_by_name(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_json_object(path, CheckpointError, "Download it again.")
    assert caught.value.where == str(path) and caught.value.todo == "Download it again."


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opened, it would wait for a writer
    for name, got in (("pipe", "no regular file"), (".", "no regular file"), ("absent", "no such file")):
        with pytest.raises(CheckpointError, match=got):
            read_json_object(tmp_path / name, CheckpointError, "Check it.")


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_reader, "MAX_BYTES", 3)
    (tmp_path / "a").write_text("{  }")
    with pytest.raises(CheckpointError, match="4 bytes"):
        read_json_object(tmp_path / "a", CheckpointError, "Check it.")


def test_numbers_are_distinguished_from_lookalikes():
    assert [whole_number(v, 1, 9) for v in (1, 9, 0, 10, True, 1.0, "1", None)] == [1, 9, *[None] * 6]
    assert [finite_number(v) for v in (1, 0.5, True, math.nan, math.inf, 10**400, "1", None)] == [1, 0.5, *[None] * 6]


def test_a_long_value_is_cut_where_it_is_shown():
    assert shown({"a": 1}) == "{'a': 1}"
    assert len(shown("x" * 10_000)) < 200
