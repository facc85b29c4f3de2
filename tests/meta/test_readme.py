# SPDX-License-Identifier: Apache-2.0
"""Commands, options and files that README and docs name exist."""

import importlib
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import speccompile
from speccompile.cli.main import app

ROOT = Path(__file__).parents[2]
FOLDERS = ("bench", "docs", "examples", "plugins", "tests")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))),
]
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


PROGRAM = get_command(app)
CLI_PAGE = (ROOT / "docs/reference/cli.md").read_text()
SECTIONS = dict(re.findall(r"^## ([\w, ]+)\n(.*?)(?=^## |\Z)", CLI_PAGE, re.MULTILINE | re.DOTALL))
OF_MODELS = CLI_PAGE.partition("## A model instead of a bundle\n")[2].partition("\n## ")[0]
OPTION_PAGES = {"serve": "docs/reference/server.md", "triton": "docs/how_to/triton.md"}
OF_GENERATE = {"chat", "replay", "profile"}  # which have options of `generate`, as their sections say
OF_ALL = {"--help", "--log-level", "--json"}  # which the page has before the sections


def spellings(subcommand):
    """Returns the spellings of each option of a command: its names, and that which switches it off."""
    params = [param for param in PROGRAM.commands[subcommand].params if param.param_type_name == "option"]
    return [{*param.opts, *param.secondary_opts} for param in params]


def options_in(text):
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text))


def section_of(subcommand):
    """Returns the reference of a command: its section, and the table of options that this leads to."""
    own = next(text for title, text in SECTIONS.items() if subcommand in title.split(", "))
    page = (ROOT / OPTION_PAGES[subcommand]).read_text() if subcommand in OPTION_PAGES else ""
    return own + page.partition("## Options\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("subcommand", PROGRAM.commands)
def test_every_option_shown_is_an_option(subcommand):
    shown = [(page, words) for page, words in commands("speccompile") if words[0] == subcommand]
    assert shown, f"no page shows speccompile {subcommand}"
    known = set().union(*spellings(subcommand))
    for page, words in shown:
        asked = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert asked <= known | {"--help"}, f"{page}: {subcommand}"


def test_every_subcommand_shown_is_one():
    shown = {words[0] for _, words in commands("speccompile")}
    assert shown - set(PROGRAM.commands) <= {"--help", "COMMAND"} | {w for w in shown if w.startswith("--help=")}


@pytest.mark.parametrize("subcommand", PROGRAM.commands)
def test_the_reference_has_every_option_and_no_other(subcommand):
    text = section_of(subcommand)
    shared = OF_MODELS if any("--spec-model" in names for names in spellings(subcommand)) else ""
    shared += section_of("generate") if subcommand in OF_GENERATE else ""
    named = options_in(text + shared) | OF_ALL
    assert [names for names in spellings(subcommand) if not names & named] == []
    rows = {option for row in re.findall(r"^\| (`-[^|]*) \|", text, re.MULTILINE) for option in options_in(row)}
    title = next(title for title in SECTIONS if subcommand in title.split(", "))
    assert rows <= set().union(*(names for name in title.split(", ") for names in spellings(name)))


def test_every_name_that_a_page_imports_exists():
    code = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    found = [
        (str(page.relative_to(ROOT)), module, name.partition(" as ")[0])
        for page in PAGES
        for block in code.findall(page.read_text())
        for module, names in re.findall(r"^ *from (speccompile[\w.]*) import (.+)$", block, re.MULTILINE)
        for name in names.split(", ")
        if module != "speccompile.serving.ray"  # needs Ray; tests/serving/ray imports it
    ]
    assert len(found) > 20
    assert [row for row in found if not hasattr(importlib.import_module(row[1]), row[2])] == []


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
