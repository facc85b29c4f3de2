# SPDX-License-Identifier: Apache-2.0
"""Ends a model's process when the server that started it is gone.

Triton's stub looks for its server as well, yet a model was once seen running 180 s after its server was killed.
"""

from __future__ import annotations

import os
import threading
import time

POLL_S = 1.0


def end_with_parent(poll_s: float = POLL_S) -> threading.Thread:
    """Starts a thread that ends this process, at once and with status 1, when its parent is another than now.

    Args:
        poll_s: seconds between two looks.

    Returns:
        The thread, a daemon.
    """
    thread = threading.Thread(target=_watch, args=(os.getppid(), poll_s), name="speccompile-parent", daemon=True)
    thread.start()
    return thread


def _watch(parent: int, poll_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(poll_s)
    os._exit(1)
