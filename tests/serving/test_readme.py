# SPDX-License-Identifier: Apache-2.0
"""The README's way from a recipe to an answer of the server, typed as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.engine import load
from tests import store

pytestmark = pytest.mark.export

pytest.importorskip("openai")
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


# As `real_wait_share` of tests/conftest.py: beside another worker each measurement would be taken three times.
MEASURE_ONCE = "from speccompile.backends import machine\nmachine.MAX_WAIT_SHARE = 1.0\n"


def commands(heading):
    """Returns the lines of the first shell block below a heading."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block, heading
    return [line.partition("  #")[0].strip() for line in block[1].splitlines()]


def test_build_serve_ask(pair, tmp_path):
    build, serve, ask = commands("Serve")
    bundle = tmp_path / "pycode"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["SPECCOMPILE_CACHE"] = str(store.root() / "build")  # what other tests have exported already
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    (tmp_path / "sitecustomize.py").write_text(MEASURE_ONCE)

    def run(command):
        typed = command.replace("bundles/pycode", str(bundle))
        return subprocess.run(
            ["bash", "-c", typed], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )

    run(build)
    typed = serve.replace("bundles/pycode", str(bundle)).replace("--port 8000", "--port 0")
    assert typed != serve
    process = subprocess.Popen(
        shlex.split(typed), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        found = re.match(r"serving at (\S+)", process.stdout.readline())
        assert found
        done = run(f"{ask} --url {found[1]}/v1")
    finally:
        process.terminate()
        assert process.wait(60) == 0
    prompt = shlex.split(ask)[2]
    text = load(bundle).generate(prompt, SamplingParams(max_new_tokens=64))[0].text
    answer, _, summary = done.stdout.rpartition("\n--- ")
    assert answer == prompt + text
    assert re.fullmatch(r"64 tokens, \d+ of them drafts\n", summary)
