# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX for tests, imported through `import_helper` only: else the first plugin node would end the process."""

from __future__ import annotations

import importlib.util

import pytest

from speccompile.backends.tensorrt.import_helper import load_tensorrt
from speccompile.backends.tensorrt.variants import Variant


def load_rtx() -> Variant:
    """Returns the variant; the test, or the module that calls it, is skipped where it is not installed."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        reason = "TensorRT-RTX is not installed, NO PLAN IS BUILT: make setup"
        pytest.skip(reason, allow_module_level=True)
    return load_tensorrt("tensorrt_rtx")
