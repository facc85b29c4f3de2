# SPDX-License-Identifier: Apache-2.0
"""Random changes of valid documents, and the loop that tries them: seeded, bounded in time, repeatable one by one.

A case is a number: `FUZZ_CASE=17 pytest tests/fuzz/test_recipes.py` repeats case 17 alone. FUZZ_CASES says how many
there are, FUZZ_SEED where their numbers begin.
"""

import contextlib
import copy
import io
import json
import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from speccompile.cli.main import main
from speccompile.errors import SpecCompileError

DEFAULT_CASES = 40  # of the ordinary suite
MAX_SECONDS = 10.0
Path = tuple[Any, ...]

NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 255, 1000, 1_000_000, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1e-45, 1e-300, 1e300, -1e300, 1.5, math.nan, math.inf, -math.inf),
)
TEXTS = (
    *(
        "",
        " ",
        "x",
        "0",
        "1",
        "true",
        "null",
        "auto",
        "none",
        "..",
        ".",
        "/",
        "~",
        "~no-such-user",
        "/nonexistent",
        "a/b",
    ),
    *("\x00", "a\x00b", "\x01", "\x1b[31m", "\x7f", "\u2028", "\ufeff", "é", "日本語", "🦙", "\u202egnp", "\ud800"),
    *(
        "[red]x[/red]",
        "%s%n",
        "{0}",
        "{x}",
        "$(id)",
        "'",
        '"',
        "\\",
        "x" * 300,
        "y" * 5000,
        "-1",
        "1e999",
        "\n",
        "\r\n",
    ),
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"": None}, [None], [0], ["x"], {"x": {"x": {}}})


def nested(depth: int, kind: str = "list") -> Any:
    """Returns a value nested so deep, made without recursion."""
    value: Any = None
    for _ in range(depth):
        value = [value] if kind == "list" else {"a": value}
    return value


def odd_value(rng: random.Random) -> Any:
    """Returns a value that stands where another type or size is expected."""
    choice = rng.random()
    if choice < 0.4:
        return rng.choice(NUMBERS)
    if choice < 0.65:
        return rng.choice(TEXTS)
    if choice < 0.9:
        return copy.deepcopy(rng.choice(OTHERS))
    if choice < 0.96:
        return [rng.choice(NUMBERS)] * rng.choice((1, 2, 3, 100))
    return nested(rng.choice((10, 40, 70, 500)), rng.choice(("list", "dict")))


def paths_in(value: Any, at: Path = ()) -> list[Path]:
    """Returns the paths of all values below the outermost, containers among them."""
    found: list[Path] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found += [(*at, key), *paths_in(part, (*at, key))]
    return found


def look_up(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate(rng: random.Random, document: Any, num_changes: int | None = None) -> Any:
    """Returns a copy of the document with one or two changes of its structure or values."""
    changed = copy.deepcopy(document)
    for _ in range(num_changes or rng.choice((1, 1, 2))):
        paths = paths_in(changed)
        if paths:
            _change(rng, changed, rng.choice(paths))
    return changed


def _change(rng: random.Random, document: Any, path: Path) -> None:
    parent, key = look_up(document, path[:-1]), path[-1]
    value = parent[key]
    change = rng.choice((_replace, _replace, _replace, _near, _near, _drop, _repeat, _retype, _swap, _rename))
    change(rng, document, parent, key, value)


def _replace(rng: random.Random, document: Any, parent: Any, key: Any, value: Any) -> None:
    parent[key] = odd_value(rng)


def _near(rng: random.Random, document: Any, parent: Any, key: Any, value: Any) -> None:
    """Puts a value of the same type, which passes the first check more often."""
    if isinstance(value, bool) or value is None:
        parent[key] = not value
    elif isinstance(value, int):
        parent[key] = rng.choice((value + 1, value - 1, value * 2, -value, value // 2, 0, value * 1_000_003, 2**31))
    elif isinstance(value, float):
        parent[key] = rng.choice((value / 2, value * 2, -value, 0.0, value + 1e-9, 1e30))
    elif isinstance(value, str):
        tail = rng.choice(TEXTS)
        parent[key] = rng.choice((value + tail, tail + value, value[:-1], value.upper(), value * 2))
    elif isinstance(value, list):
        parent[key] = rng.choice((value * 2, value[1:], value[::-1], [*value, odd_value(rng)], value * 50))
    else:
        parent[key] = {**value, rng.choice(TEXTS): odd_value(rng)}


def _drop(rng: random.Random, document: Any, parent: Any, key: Any, value: Any) -> None:
    del parent[key]


def _repeat(rng: random.Random, document: Any, parent: Any, key: Any, value: Any) -> None:
    """Adds the same value again, under another name or as a further item."""
    if isinstance(parent, list):
        parent.insert(key, copy.deepcopy(value))
    else:
        parent[rng.choice((f"{key}_", f" {key}", str(key).upper(), rng.choice(TEXTS)))] = copy.deepcopy(value)


def _retype(rng: random.Random, document: Any, parent: Any, key: Any, value: Any) -> None:
    """Puts the same value in another type."""
    parent[key] = rng.choice((str(value), [value], {"value": value}, {str(value): value}, not value, json.dumps(None)))


def _swap(rng: random.Random, document: Any, parent: Any, key: Any, value: Any) -> None:
    """Puts a valid value of another key."""
    parent[key] = copy.deepcopy(look_up(document, rng.choice(paths_in(document))))


def _rename(rng: random.Random, document: Any, parent: Any, key: Any, value: Any) -> None:
    if isinstance(parent, dict):
        del parent[key]
        parent[rng.choice((f"{key}s", str(key)[:-1], rng.choice(TEXTS)))] = value
    else:
        parent.pop(key)


def damage(rng: random.Random, text: bytes) -> bytes:
    """Returns a text with a few bytes changed, as a broken disk or an attacker would."""
    at = rng.randrange(len(text) + 1)
    step_output = rng.choice(
        (b"", b"\x00", b"\xff", b"\xed\xa0\x80", b"{", b"[" * 5000, b'"', b"\n", b"\xef\xbb\xbf", b",,")
    )
    return rng.choice((text[:at] + step_output + text[at + 1 :], text[:at], text[:at] + step_output + text[at:]))


def text_of(value: Any) -> str:
    """JSON of a document however deep it is."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * 100_000


def cases() -> list[int]:
    """Returns the numbers of the cases that this run tries."""
    if (one := os.environ.get("FUZZ_CASE")) is not None:
        return [int(one)]
    first = int(os.environ.get("FUZZ_SEED", "0"))
    return list(range(first, first + int(os.environ.get("FUZZ_CASES", DEFAULT_CASES))))


def fuzz(name: str, make: Callable[[random.Random], Any], attempt: Callable[[Any], str]) -> dict[str, int]:
    """Make each case and try it; a case may end well or in one of our own errors, within `MAX_SECONDS`.

    Args:
        name: of the fuzzer, part of each case's seed.
        make: a document from a generator of its own.
        attempt: what is done with it; returns how it ended, or raises one of our errors.

    Returns:
        How many cases ended how: "ok", or the class of the error.
    """
    counts: dict[str, int] = {}
    for case in cases():
        document = make(random.Random(f"{name}/{case}"))
        try:
            with time_limit(MAX_SECONDS):
                end = attempt(document)
        except SpecCompileError as error:
            check_error(error, name, case, document)
            end = type(error).__name__
        except BaseException as fault:
            if isinstance(fault, KeyboardInterrupt):
                raise
            pytest.fail(describe(name, case, document, f"{type(fault).__name__}: {fault}"), pytrace=True)
        counts[end] = counts.get(end, 0) + 1
    print(f"{name}: {counts}")
    return counts


def command(*arguments: object) -> str:
    """Run a command with `--json` among its arguments; returns "ok", or the kind of the error that it printed.

    Raises:
        AssertionError: its output is no JSON document, or its exit code is not that of what it printed.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            code: Any = main([str(argument) for argument in arguments])
        except SystemExit as leave:
            code = leave.code or 0
    out.getvalue().encode()
    document = json.loads(out.getvalue()) if out.getvalue() else {}
    error = document.get("error") or document.get("fault") or {}
    kind = error.get("kind", "findings" if document.get("num_errors") else "ok")
    parts = [error[name] for name in ("where", "got", "expected", "todo")] if error else []
    assert all(isinstance(part, str) and part and len(part) < 20_000 for part in parts), error
    assert code == error.get("exit_code", document.get("exit_code", 0)), (code, document)
    return str(kind)


def check_error(error: SpecCompileError, name: str, case: int, document: Any) -> None:
    """Checks that an error has its four parts, can be printed, and is short enough to read."""
    parts = {part: getattr(error, part) for part in ("where", "got", "expected", "todo")}
    assert all(isinstance(p, str) and p for p in parts.values()), describe(name, case, document, f"parts {parts}")
    assert len(str(error)) < 20_000, describe(name, case, document, f"an error of {len(str(error))} characters")
    try:
        str(error).encode()
    except UnicodeEncodeError:
        pytest.fail(describe(name, case, document, "an error that cannot be printed"))


def describe(name: str, case: int, document: Any, fault: str) -> str:
    """Returns what a failing case prints: how to repeat it, and the document."""
    shown = text_of(document) if isinstance(document, dict | list) else repr(document)
    return f"{name}, case {case} (repeat it with FUZZ_CASE={case}): {fault[:2000]}\n{shown[:6000]}"


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the block with TimeoutError after so many seconds, in the main thread."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
