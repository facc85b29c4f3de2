# SPDX-License-Identifier: Apache-2.0
"""The package and every `--help` come up without the export stack and without an engine."""

import json
import subprocess
import sys

import pytest

import speccompile
from speccompile.cli.main import app

HEAVY = (
    *("torch", "transformers", "accelerate", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "safetensors"),
    *("tensorrt", "tensorrt_rtx", "cuda"),
)
PUBLIC = sorted(speccompile.__all__)
COMMANDS = sorted(command.name or "" for command in app.registered_commands)
SCRIPT = """
import json, sys
{statement}
print("loaded " + json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
# Runs the help of every command; a module that one of them loads stays loaded, so the first one is named.
HELPS = """
import contextlib, io
from speccompile.cli.main import main
sys.argv = ["speccompile"]
pages, loaded = {{}}, {{}}
for command in {commands!r}:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main([*([command] if command else []), "--help"])
    pages[command] = (code, text.getvalue())
    loaded[command] = sorted({{name.partition(".")[0] for name in sys.modules}} & set({heavy!r}))
print(json.dumps([pages, loaded]))
"""


def loaded_by(statement):
    """Returns the top-level modules that a fresh interpreter holds after `statement`, and what it printed."""
    command = [sys.executable, "-c", SCRIPT.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text, _, names = done.stdout.rpartition("loaded ")
    return set(json.loads(names)), text


def test_the_promised_commands_are_there():
    assert {"build", "generate", "bench", "inspect"} <= set(COMMANDS)


def test_the_measure_sees_a_heavy_import():
    assert "onnx" in loaded_by("import onnx")[0]


@pytest.mark.parametrize("module", ["speccompile", "speccompile.recipe", "speccompile.runtime.engine"])
def test_importing_is_light(module):
    assert loaded_by(f"import {module}")[0] & set(HEAVY) == set()


def test_public_names_are_there_and_light():
    """All in one interpreter: what one of them loads is there in the end."""
    loaded, text = loaded_by("".join(f"from speccompile import {name}; print({name!r})\n" for name in PUBLIC))
    assert text.split() == PUBLIC
    assert loaded & set(HEAVY) == set()


def test_methods_and_the_layouts_that_they_read_are_light():
    names = "from speccompile.core import registry; print([m.name for m in registry.all_methods()])"
    loaded, text = loaded_by(names)
    assert loaded & set(HEAVY) == set() and "eagle3" in text
    assert {"pydantic", "rich"} & loaded == set()
    loaded, text = loaded_by(f"{names}; print(len(registry.load_formats()))")
    assert loaded & set(HEAVY) == set() and int(text.split()[-1]) >= 12


def test_only_public_names_are_listed():
    assert dir(speccompile) == PUBLIC
    assert {"load", "build", "SamplingParams"} <= set(dir(speccompile))
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        speccompile.lode  # noqa: B018 -- the access is what is tested


@pytest.fixture(scope="module")
def helps():
    """Returns {command: (exit code, page)} and {command: heavy modules loaded by then}, of one fresh interpreter."""
    text = loaded_by(HELPS.format(commands=["", *COMMANDS], heavy=HEAVY))[1]
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize("command", ["", *COMMANDS], ids=lambda name: name or "top")
def test_help_is_light_and_helps(helps, command):
    pages, loaded = helps
    code, text = pages[command]
    assert (code, loaded[command]) == (0, [])
    assert "Usage: speccompile" in text
    for name in [] if command else COMMANDS:
        assert name in text
