# SPDX-License-Identifier: Apache-2.0
"""The table of exit codes in docs/reference/cli.md is that of the errors."""

import re
import signal
from pathlib import Path

from speccompile import errors
from speccompile.cli.main import _EPILOG

PAGE = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()


def test_every_error_has_an_exit_code_of_its_own_and_a_row():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.SpecCompileError)]
    codes = sorted(c.exit_code for c in classes)
    assert codes == list(range(1, len(classes) + 1))
    rows = [int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)]
    assert rows == [0, *codes, 128 + signal.SIGINT, 128 + signal.SIGTERM]


def test_help_names_every_exit_code_of_the_page():
    rows = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert [code for code in rows if not re.search(rf"\b{code} [a-z]", _EPILOG)] == []
