# SPDX-License-Identifier: Apache-2.0
"""A build in a process of its own, so that the command that decodes never holds the memory that building takes.

It writes lines of JSON: ["stage", MESSAGE], ["log", [LOGGER, LEVEL, MESSAGE]], then ["error", ...] or ["bundle", ...].
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile import errors
from speccompile.cli.output import json_from_error, quiet_libraries
from speccompile.common.waiting import LOGGER

if TYPE_CHECKING:
    from speccompile.prepare import Prepared
    from speccompile.recipe.model_recipe import ModelOptions

_END_S = 5.0  # that a child gets to remove what it has not finished


def prepare_in_child(source: str, model: ModelOptions, progress: Callable[[str], None]) -> Prepared:
    """Returns the bundle of a model or a recipe as `prepare` does, whose errors and log are those of the child."""
    from speccompile.prepare import Prepared

    level = logging.getLogger("speccompile").getEffectiveLevel()
    command = [sys.executable, "-m", "speccompile.cli.child_build"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        found = None
        try:
            with child.stdin as stdin:
                stdin.write(json.dumps([source, asdict(model), level]))
            for line in child.stdout:
                kind, value = json.loads(line)
                if kind == "stage":
                    progress(value)
                elif kind == "log":
                    name, number, message = value
                    logging.getLogger(name).log(number, "%s", message)
                elif kind == "error":
                    raise _error_from_json(value)
                else:
                    found = Prepared(Path(value["path"]), value["name"], value["is_kept"])
            child.wait()
        finally:
            if child.poll() is None:
                _end(child)
    if found is not None:
        return found
    got, todo = f"a child process that ended with {child.returncode}", "Its output is above; -9: too little memory."
    raise errors.BuildError(source, got, "a bundle", todo)


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()


def _error_from_json(value: dict[str, Any]) -> errors.SpecCompileError:
    kind: type[errors.SpecCompileError] = getattr(errors, value["kind"])
    return kind(*(value[part] for part in ("where", "got", "expected", "todo")))


class _Lines(logging.Handler):
    """Writes records as lines."""

    def __init__(self, write: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write("log", [record.name, record.levelno, record.getMessage()])


def main() -> None:
    """Builds what stdin asks for."""
    from speccompile.prepare import prepare
    from speccompile.recipe.model_recipe import ModelOptions

    signal.signal(signal.SIGINT, lambda *_: None)  # of a terminal: the parent has it too, and ends this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print

    def write(kind: str, value: Any) -> None:
        print(json.dumps([kind, value]), file=lines, flush=True)

    source, options, level = json.load(sys.stdin)
    quiet_libraries()
    logger = logging.getLogger("speccompile")
    logger.addHandler(_Lines(write))
    logger.setLevel(level)
    logging.getLogger(LOGGER).setLevel(logging.INFO)
    try:
        found = prepare(source, ModelOptions(**options), lambda stage: write("stage", stage))
    except errors.SpecCompileError as fault:
        write("error", json_from_error(fault))
    else:
        write("bundle", {"path": str(found.path), "name": found.name, "is_kept": found.is_kept})


if __name__ == "__main__":
    main()
