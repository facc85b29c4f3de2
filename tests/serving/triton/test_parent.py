# SPDX-License-Identifier: Apache-2.0
"""A model's process ends with the server that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import time
from speccompile.serving.triton.backend import end_with_parent
end_with_parent(0.02)
print("up", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]]).pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_process_ends_with_its_parent_and_not_before():
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        words = [parent.stdout.readline().strip(), parent.stdout.readline().strip()]
        [child] = [int(word) for word in words if word != "up"]
        time.sleep(0.2)
        assert "up" in words and is_running(child)
        parent.kill()
        end_s = time.monotonic() + 60
        while is_running(child) and time.monotonic() < end_s:
            time.sleep(0.05)
        ended = not is_running(child)
        if not ended:
            os.kill(child, signal.SIGKILL)
        assert ended
