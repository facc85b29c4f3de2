# SPDX-License-Identifier: Apache-2.0
"""The client says in one line that there is no server."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

CLIENT = Path(__file__).parents[2] / "examples/openai_client.py"


def test_no_server_is_one_line():
    pytest.importorskip("openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        command = [sys.executable, str(CLIENT), "def add(a, b):", "--url", url]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"no server answers at {url}; start a server: speccompile serve bundles/pycode\n"
