# SPDX-License-Identifier: Apache-2.0
"""A build in a process of its own, for tests that kill it or take its disk away.

Usage: build_child.py RECIPE DEST CACHE none|kill=N|fsize=BYTES|real=MESSAGE|real-fsize=BYTES [EXPORTS]
       build_child.py serve
serve: each line of standard input has the arguments, and the files for standard output and error, of a build in a
process of its own, forked after all imports; its exit code is a line of standard output.
Prints each progress message with a number. kill=N: SIGKILL at message N. fsize: no file may grow beyond BYTES.
real: with the real backend, and the real export of what is not in the folder EXPORTS; SIGKILL at a message.
"""

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from speccompile.bundle.stage_cache import StageCache
from speccompile.errors import SpecCompileError
from speccompile.pipeline import build
from tests import store
from tests.pipeline import fakes, kept_exports


def run(recipe: str, dest: str, cache: str, how: str, *exports: str) -> int:
    kind, _, value = how.partition("=")
    if not kind.startswith("real"):
        fakes.install_for_good()
    for folder in exports:
        kept_exports.install(setattr, Path(folder))
    if kind.endswith("fsize"):
        fakes.FakeBackend.weights_bytes = 4 * int(value)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(value), int(value)))
    seen = 0

    def progress(message: str) -> None:
        nonlocal seen
        print(seen, message, flush=True)
        if (kind == "kill" and seen == int(value)) or (kind == "real" and message == value):
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    try:
        with store.cheap_measurements():
            build(fakes.make_plan(Path(recipe)), Path(dest), progress, StageCache(Path(cache)))
    except SpecCompileError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    return 0


def serve() -> None:
    for line in sys.stdin:
        arguments, *files = json.loads(line)
        if (child := os.fork()) == 0:
            for number, file in enumerate(files, 1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            code = 1
            try:
                code = run(*arguments)
            finally:
                if sys.exc_info()[0] is not None:
                    traceback.print_exc()
                sys.stdout.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1] == "serve" else run(*sys.argv[1:]))
