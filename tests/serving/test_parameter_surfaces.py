# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters are declared once: a new one is on every surface, and the pages of the surfaces name them all."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.core.sampling_params import SAMPLING_PARAMETERS
from speccompile.serving.triton.contract import SAMPLING

ROOT = Path(__file__).parents[2]
DECLARED = SAMPLING_PARAMETERS


def test_one_line_declares_a_parameter_on_every_surface():
    """The line stands in `core/sampling_params.py`; where the parameter acts in decoding is all that is missing."""
    command = [sys.executable, "-m", "tests.serving.toy_parameter"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(("recipe", "option", "prompt file", "body", "tensor"), 0.25)


@pytest.mark.parametrize("name", ["min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_no_surface_names_a_parameter(name):
    """Only its declaration does, what acts on it, and the table of a GGUF file's names."""
    pattern = re.compile(rf"\b{name}\b")
    named = []
    texts = {path: path.read_text() for path in sorted((ROOT / "speccompile").rglob("*.py"))}
    for path in (path for path, text in texts.items() if pattern.search(text)):
        for node in ast.walk(ast.parse(texts[path])):
            words = [node.attr] if isinstance(node, ast.Attribute) else [node.id] if isinstance(node, ast.Name) else []
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                words = [node.value]
            if any(pattern.fullmatch(word) for word in words):
                named.append(str(path.relative_to(ROOT / "speccompile")))
    assert set(named) - {"checkpoints/gguf/tokenizer.py"} == {"core/sampling_params.py", "runtime/logits_processors.py"}


def page(name):
    return (ROOT / "docs" / name).read_text()


def test_the_pages_name_every_parameter_as_their_surface_does():
    for name, declared in DECLARED.items():
        assert declared.flag is None or f"`--{name.replace('_', '-')}`" in page("reference/cli.md"), name
        assert not declared.in_prompts or f"`{name}`" in page("reference/cli.md"), name
        assert not declared.in_recipe or f"`decoding.{name}`" in page("reference/recipe.md"), name
        assert declared.body is None or f"`{declared.body.name or name}`" in page("reference/server.md"), name
        assert declared.tensor is None or f"`{SAMPLING[name].name}`" in page("how_to/triton.md"), name
