# SPDX-License-Identifier: Apache-2.0
"""Hostile recipes: control characters, bombs of aliases, paths that no file can have."""

import pytest

from speccompile.errors import RecipeError
from speccompile.recipe import load_recipe

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ('target:\n  model: "a\x01b"\n', "r.yaml", "special characters are not allowed"),
        ("target: {model: \x7f}", "r.yaml", "special characters"),
        (BOMB + "target: {model: x}", "r.yaml:", "more than 10000 values"),
        ("target: &t [*t]", "r.yaml:1", "nested more than 32"),
        ("[" * 100_000, "r.yaml:1", "nested more than 32"),
        ("target: {model: " + "[" * 40 + "]" * 40 + "}", "r.yaml:1", "nested more than 32"),
        ("x: 2001-99-99", "r.yaml", "cannot be read"),
        ("#" * 300_000, "r.yaml", "300000 characters"),
        (r'target: {model: "\uD800"}', "r.yaml:1", "no Unicode"),
        (r'target: {model: "a\0b"}', "r.yaml:1 (target.model)", "names of at most 255 bytes"),
        ("target: {model: " + "x" * 5000 + "/y}", "r.yaml:1 (target.model)", "names of at most 255 bytes"),
        ("target: {model: ~no-such-user/x}", "r.yaml:1 (target.model)", "a user that exists"),
    ],
)
def test_a_hostile_recipe_is_refused_at_once(tmp_path, text, where, words):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert where in caught.value.where
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", ["a\x01b", "[" * 10_000, "&a [*a]", "2001-99-99", '"\\ud800"'])
def test_a_hostile_override_is_refused(tmp_path, value):
    (tmp_path / "r.yaml").write_text("target: {model: .}")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml", [f"target.model={value}"])
    assert caught.value.where.startswith("--set target.model=")
