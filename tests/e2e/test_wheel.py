# SPDX-License-Identifier: Apache-2.0
"""A wheel in a fresh environment, outside of the checkout: its packages, a build, a generation and a server.

`make test-wheel` gives the wheel with compiled kernels; else one without is made here. The other packages are links to
those of this environment, and pip checks without an index that they are all that the extras ask for.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.live
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/pycode-16m-draft"
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("SPECCOMPILE_WHEEL"):
        return Path(given)
    folder, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    # Of the files that deploy/Dockerfile copies alone: an image is built from no others.
    for words in re.findall(r"^COPY (.+) /src/\S+$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE):
        for name in words.split():
            (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    without_compiler = {**os.environ, "PATH": str(folder), "CXX": ""}
    subprocess.run(command, cwd=source, env=without_compiler, check=True, capture_output=True)
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fresh environment's programs."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (folder / "packages").mkdir()
    for entry in Path(np.__file__).parents[1].iterdir():
        if "speccompile" not in entry.name and entry.suffix != ".pth":
            (folder / "packages" / entry.name).symlink_to(entry)
    [site] = folder.glob("venv/lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{folder / 'packages'}\n")
    command = [sys.executable, "-m", "pip", "--python", folder / "venv/bin/python", "install", "--no-index"]
    done = subprocess.run([*command, f"{wheel}[build,ort,serve]"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [installed] = re.findall("Successfully installed (.*)", done.stdout)
    assert installed.startswith("speccompile-") and " " not in installed
    return folder / "venv/bin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


def run(program: Path, *arguments: object, cwd: Path) -> str:
    """Runs a program of the environment; returns what it printed."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment(cwd), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if os.environ.get("SPECCOMPILE_WHEEL"):  # its own kernels, not those of the tests
        given.pop("SPECCOMPILE_CPU_KERNELS", None)
    return {**given, "SPECCOMPILE_CACHE": str(folder / "cache"), "HOME": str(folder)}


def test_the_package_is_that_of_the_wheel(scripts, folder, wheel):
    code = """
import speccompile, json
from speccompile.common.extras import install_command
from speccompile.backends.onnxruntime.kernel_library import find_library, find_sources
print(json.dumps([speccompile.__file__, str(find_sources()), str(find_library()), install_command("serve")]))
"""
    file, sources, library, command = json.loads(run(scripts / "python", "-c", code, cwd=folder))
    package = Path(file).parent
    assert package.is_relative_to(scripts.parent) and sources == str(package / "plugin_sources/cpu")
    assert command == f"pip install '{wheel}[serve]'"
    if os.environ.get("SPECCOMPILE_WHEEL") and Path(library).parent.name != "cpu_kernels":
        pytest.skip(f"this CPU takes {library}: NO LIBRARY OF THE WHEEL IS TESTED")


@pytest.fixture(scope="module")
def bundle(scripts: Path, folder: Path) -> Path:
    settings = ("--quantization", "none", "--set", "engine.threads=1", "--set", "speculator={method: ngram}")
    run(scripts / "speccompile", "build", MODEL, "-o", "bundle", *settings, cwd=folder)
    return folder / "bundle"


def test_a_bundle_is_built_and_decoded(scripts, folder, bundle):
    out = run(scripts / "speccompile", "generate", bundle, "--prompt", PROMPT, "--max-new-tokens", 8, cwd=folder)
    assert out.startswith(f"{PROMPT}\n    ")
    assert "digests hold" in run(scripts / "speccompile", "inspect", bundle, cwd=folder)


@pytest.fixture
def address(scripts: Path, folder: Path, bundle: Path) -> Iterator[str]:
    """The address of a server of the bundle."""
    command = [str(scripts / "speccompile"), "serve", str(bundle), "--port", "0", "--drain-s", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment(folder), **pipes) as server:
        found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stdout)), None)
        assert found is not None
        yield found[0]
        server.terminate()
        server.communicate(timeout=60)


def test_a_server_answers_and_shows_its_page(address, scripts, folder, bundle):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = json.load(answer)["choices"][0]["text"]
    wanted = run(scripts / "speccompile", "generate", bundle, "-p", PROMPT, "--max-new-tokens", 8, cwd=folder)
    assert f"{PROMPT}{text}\n" == wanted
    with urllib.request.urlopen(f"{address}/", timeout=60) as page:
        assert b"<html" in page.read()
