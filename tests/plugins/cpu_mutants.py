# SPDX-License-Identifier: Apache-2.0
"""The library of CPU kernels with all mutants of some families, compiled once for all workers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from speccompile.backends.onnxruntime import kernel_build
from tests import store
from tests.plugins.mutants import Mutants, write_mutants

# Header of each family of kernels, by the name in the function that adds its ops to the table of library.cpp.
FAMILIES = {
    "linear_ops": "linear.h",
    "expert_ops": "experts.h",
    "embedding_ops": "embedding.h",
    "attention_ops": "attention_ops.h",
    "low_rank_ops": "low_rank.h",
    "verify_ops": "verify_ops.h",
    "draft_ops": "draft_ops.h",
    "rollback_op": "rollback.h",
    "state_ops": "state_ops.h",
}


def mutated_library(folder: Path, mutants: Mutants, *families: str) -> Path:
    """Compiles a library without the kernels of other families, or takes the one of the same sources.

    Args:
        folder: empty.
        mutants: by name; none runs until it is chosen.
        families: names in `FAMILIES`; the fewer, the faster it compiles.

    Returns:
        The library's file.
    """
    sources = folder / "plugins/cpu"
    write_mutants(sources.parent, mutants, "cpu/kernel.h")
    keep_families(sources / "library.cpp", *families)
    compiler = kernel_build.find_compiler()
    assert compiler is not None
    flags = ("-O0", *kernel_build.native_flags())

    def make(dest: Path) -> None:
        assert kernel_build.compile_library(sources, dest / "mutants.so", compiler, flags) is None

    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    depends_on = {
        "sources": {p.relative_to(folder).as_posix(): p.read_text() for p in sorted(folder.rglob("*.*"))},
        "flags": [*kernel_build.FLAGS, *flags],
        "compiler": version,
        "cpu": sorted(kernel_build.cpu_features()),
    }
    store.fetch("cpu_mutants", depends_on, folder / "made", make)
    return folder / "made/mutants.so"


def keep_families(table: Path, *families: str) -> None:
    """Removes the other families of kernels from library.cpp, and the files that are theirs alone."""
    text = table.read_text()
    for name, header in FAMILIES.items():
        for line in (f"    add_{name}(table);\n", f'#include "{header}"\n'):
            assert text.count(line) == 1, line
            text = text if name in families else text.replace(line, "")
        if name not in families:
            for file in table.parent.glob(f"{header.removesuffix('.h')}*.cpp"):
                file.unlink()
    assert text.count("add_") == len(families), "a family of library.cpp that is not listed here"
    table.write_text(text)
