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
COMMANDS = sorted(command.name or "" for command in app.registered_commands)
SCRIPT = """
import json, sys
{statement}
print("loaded " + json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""
HELP = """
from speccompile.cli.main import main
sys.argv = {argv!r}
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
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


@pytest.mark.parametrize("name", sorted(speccompile.__all__))
def test_public_names_are_there_and_light(name):
    assert loaded_by(f"from speccompile import {name}")[0] & set(HEAVY) == set()


def test_methods_and_the_layouts_that_they_read_are_light():
    names = "from speccompile.core import registry; print([m.name for m in registry.all_methods()])"
    loaded, text = loaded_by(names)
    assert loaded & set(HEAVY) == set() and "eagle3" in text
    assert {"pydantic", "rich"} & loaded == set()
    loaded, text = loaded_by(f"{names}; print(len(registry.load_formats()))")
    assert loaded & set(HEAVY) == set() and int(text.split()[-1]) >= 12


def test_only_public_names_are_listed():
    assert dir(speccompile) == sorted(speccompile.__all__)
    assert {"load", "build", "SamplingParams"} <= set(dir(speccompile))
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        speccompile.lode  # noqa: B018 -- the access is what is tested


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)], ids=lambda a: " ".join(a) or "top")
def test_help_is_light_and_helps(arguments):
    loaded, text = loaded_by(HELP.format(argv=["speccompile", *arguments, "--help"]))
    assert loaded & set(HEAVY) == set()
    assert "Usage: speccompile" in text
    for name in [] if arguments else COMMANDS:
        assert name in text
