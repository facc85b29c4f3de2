# SPDX-License-Identifier: Apache-2.0
"""Commands, options and files that README and docs name exist."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import speccompile
from speccompile.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(program):
    """Returns (page, arguments) of every call of `program` in a shell block, continuation lines joined."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words.pop(0)
                if words and words[0].rpartition("/")[2] == program:
                    found.append((str(page.relative_to(ROOT)), words[1:]))
    return found


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {(page, w) for page, words in commands("make") for w in words if re.fullmatch(r"[a-z-]+", w)}
    assert {"setup", "demo", "test", "lint", "golden", "bench", "clean"} <= targets
    assert {w for _, w in asked} >= {"demo", "test"}
    assert {(page, w) for page, w in asked if w not in targets} == set()


def test_every_make_target_that_needs_the_venv_sets_up_first():
    rules = dict(re.findall(r"^([a-z]+):(.*?)(?:##.*)?$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in ("demo", "test", "lint", "golden"):
        assert "setup" in rules[name].split(), name


def test_setup_says_what_it_does_and_that_it_takes_minutes():
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    said, installs = shown.index("some minutes"), shown.index("pip install")
    assert said < installs < shown.index("source .venv/bin/activate")
    assert "--quiet" not in shown  # pip names each package as it comes


def test_nothing_is_promised_from_an_index():
    """The package is on none: pages say what works in a clone or with a wheel, messages see `install_command`."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "speccompile").rglob("*.py")]
    assert [str(file) for file in files if "speccompile[" in file.read_text()] == []
    assert f"dist/speccompile-{speccompile.__version__}-py3-none-linux_x86_64.whl[" in (ROOT / "README.md").read_text()


COMMANDS = ("build", "verify", "generate", "chat", "serve", "triton", "bench", "train", "inspect", "doctor", "convert")


@pytest.mark.parametrize("subcommand", [*COMMANDS, "cache"])
def test_every_option_shown_is_an_option(subcommand, capsys, monkeypatch):
    shown = [(page, words) for page, words in commands("speccompile") if words[0] == subcommand]
    assert shown, f"no page shows speccompile {subcommand}"
    monkeypatch.setenv("COLUMNS", "200")
    assert main([subcommand, "--help"]) == 0
    text = capsys.readouterr().out
    for page, words in shown:
        for option in (word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"{page}: {subcommand} has no {option}"


def test_every_recipe_shown_exists():
    recipes = {word for _, words in commands("speccompile") for word in words if word.startswith("recipes/")}
    assert recipes
    assert {name for name in recipes if not (ROOT / name).is_file()} == set()


def test_every_extra_is_in_the_readme_table():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = set(re.findall(r"^\| `\[([a-z-]+)\]`", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert table == set(extras)


def test_every_relative_link_leads_somewhere():
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_the_navigation_names_every_page():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = {path for entry in config["nav"] for path in paths_in(entry)}
    [notes] = config["not_in_nav"].split()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed == {page for page in pages if not page.startswith(notes)} != pages


def paths_in(entry):
    for value in entry.values() if isinstance(entry, dict) else [entry]:
        if isinstance(value, list):
            for child in value:
                yield from paths_in(child)
        else:
            yield value
