# SPDX-License-Identifier: Apache-2.0
"""Puts compiled CPU kernels into a wheel that is built on x86-64 Linux; without a compiler the wheel has none."""

from __future__ import annotations

import importlib.util
import platform
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = "speccompile/backends/onnxruntime/kernel_build.py"

STATIC = ("-static-libstdc++", "-static-libgcc")  # whose versions differ between machines


def load_module(path: Path) -> ModuleType:
    """Returns the module of a file, whose package cannot be imported here: its dependencies are not installed."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class KernelBuildHook(BuildHookInterface[Any]):
    """Compiles the variants of `kernel_build.VARIANTS` into speccompile/cpu_kernels."""

    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries and the platform's tag to a wheel."""
        if version == "editable" or sys.platform != "linux" or platform.machine() != "x86_64":
            return
        root = Path(self.root)
        build = load_module(root / BUILD)
        compiler = build.find_compiler()
        if compiler is None:
            return
        self._scratch = tempfile.TemporaryDirectory()
        for variant in build.VARIANTS:
            made = Path(self._scratch.name) / f"{variant.name}.so"
            fault = build.compile_library(root / "plugins/cpu", made, compiler, (*variant.flags, *STATIC))
            if fault is not None:
                self.app.display_warning(f"no CPU kernels for {variant.name}: {fault}")
                continue
            build_data["force_include"][str(made)] = f"speccompile/cpu_kernels/{made.name}"
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was compiled."""
        if self._scratch is not None:
            self._scratch.cleanup()
