# SPDX-License-Identifier: Apache-2.0
"""README's three commands from a bundle to an answer, as they stand there; ports and folders are the test's."""

import json
import re
import shlex
import subprocess
import sys

from bench.triton_server import TritonServer
from tests.serving.triton.live.conftest import BUNDLE, ROOT


def quick_start():
    """Returns the block that begins with `speccompile triton`, comments left out."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if block.startswith("speccompile triton ")]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def test_the_quick_start_of_the_readme(launcher, tmp_path, offline):
    write, serve, ask = quick_start()
    assert write[:2] == ["speccompile", "triton"]
    write = [str(BUNDLE) if word == "bundles/pycode" else word for word in write]
    subprocess.run([sys.executable, "-m", *write], cwd=tmp_path, check=True, timeout=120)
    program, repository, *options = serve
    assert program == ".venv-triton/bin/tritonserver" and repository == "--model-repository=model_repository"
    server = TritonServer(launcher, tmp_path / "model_repository", tmp_path / "log", options)
    try:
        server.wait_ready()
        ask = [word.replace("localhost:8000", f"127.0.0.1:{server.http_port}") for word in ask]
        answer = json.loads(subprocess.run(ask, capture_output=True, check=True, timeout=60).stdout)
        body = json.loads(ask[-1])
        [wanted] = offline([body["text_input"]], body["max_tokens"])
        assert answer["text_output"] == body["text_input"] + wanted["text"]
        assert server.stop() == 0
    finally:
        server.kill()
