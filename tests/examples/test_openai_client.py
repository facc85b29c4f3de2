# SPDX-License-Identifier: Apache-2.0
"""The client says in one line that there is no server."""

import runpy
import socket
import sys
from pathlib import Path

import pytest

CLIENT = Path(__file__).parents[2] / "examples/openai_client.py"


def test_no_server_is_one_line(monkeypatch, capsys):
    pytest.importorskip("openai")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        monkeypatch.setattr(sys, "argv", [str(CLIENT), "def add(a, b):", "--url", url])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(CLIENT), run_name="__main__")
    # Python prints a text on stderr and exits with 1.
    assert stop.value.code == f"no server answers at {url}; start a server: speccompile serve bundles/pycode"
    assert capsys.readouterr() == ("", "")
