# SPDX-License-Identifier: Apache-2.0
"""Kernels with mutations, all in one library: a copy of plugins/ in which each fragment has its mutated form beside it.

A variable of the library chooses the mutation that runs; none is chosen at first. The original sources have no switch.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.plugins import host_lab

_CHOICE = """#pragma once
// The wrong form that runs; 0: none.
extern "C" { inline __attribute__((visibility("default"), used)) int host_mutant = 0; }
"""


@dataclass(frozen=True)
class Swap:
    """A fragment of a source and its wrong form: two expressions, or two statements (the fragment ends with `;`).

    Args:
        file: under plugins/.
        right: the fragment.
        wrong: its replacement.
        within: text around the fragment, where the fragment alone occurs in the file more than once.
    """

    file: str
    right: str
    wrong: str
    within: str = ""

    def span(self, text: str) -> tuple[int, int]:
        """Returns the bounds of the fragment in the file's text."""
        around = self.within or self.right
        assert text.count(around) == 1, f"{self.file} has {text.count(around)} times: {around}"
        assert around.count(self.right) == 1, f"{around} has {around.count(self.right)} times: {self.right}"
        start = text.index(around) + around.index(self.right)
        return start, start + len(self.right)

    def form(self, number: int) -> str:
        """Returns the fragment in C++ with both forms."""
        if self.right.endswith(";"):
            return f"{{ if (host_mutant == {number}) {{ {self.wrong} }} else {{ {self.right} }} }}"
        return f"(host_mutant == {number} ? ({self.wrong}) : ({self.right}))"


Mutants = Mapping[str, tuple[Swap, ...]]


def write_mutants(tree: Path, mutants: Mutants, header: str = "common.cuh") -> None:
    """Copies plugins/ to the new folder `tree`, with every mutant in it; their numbers count from 1.

    Args:
        tree: the new folder.
        mutants: by name.
        header: under plugins/, included by every source that has a mutant.
    """
    shutil.copytree(host_lab.PLUGINS, tree)
    (tree / "host/mutant.h").write_text(_CHOICE)
    common = tree / header
    include = f'#pragma once\n#include "{"../" * header.count("/")}host/mutant.h"\n'
    common.write_text(common.read_text().replace("#pragma once\n", include, 1))
    numbered = [(number, swap) for number, swaps in enumerate(mutants.values(), 1) for swap in swaps]
    for name in sorted({swap.file for _, swap in numbered}):
        text = (tree / name).read_text()
        spans = sorted((*swap.span(text), swap.form(number)) for number, swap in numbered if swap.file == name)
        (tree / name).write_text("".join(_spliced(text, spans)))


def _spliced(text: str, spans: Iterable[tuple[int, int, str]]) -> Iterator[str]:
    done = 0
    for start, end, form in spans:
        assert start >= done, f"two mutants share a fragment: {text[start:end]}"
        yield text[done:start]
        yield form
        done = end
    yield text[done:]


@contextmanager
def chosen(library: ctypes.CDLL, mutants: Mutants, name: str) -> Iterator[None]:
    """Runs the mutant inside the block."""
    choice = ctypes.c_int.in_dll(library, "host_mutant")
    choice.value = 1 + list(mutants).index(name)
    try:
        yield
    finally:
        choice.value = 0
