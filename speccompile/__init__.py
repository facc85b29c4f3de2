# SPDX-License-Identifier: Apache-2.0
"""speccompile: speculative decoding as compiled engines.

Importing the package is light: neither torch nor onnx nor onnxruntime is touched until it is needed.
"""

import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Bundle",
    "Generation",
    "SamplingParams",
    "SpecCompileError",
    "SpecEngine",
    "__version__",
    "build",
    "find_device",
    "load",
    "load_recipe",
    "resolve",
]

# Modules log to loggers below this one; who uses the package decides whether that is shown.
logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from speccompile.core.sampling_params import SamplingParams
    from speccompile.errors import SpecCompileError
    from speccompile.pipeline import build
    from speccompile.recipe import find_device, load_recipe, resolve
    from speccompile.runtime.bundle import Bundle
    from speccompile.runtime.engine import Generation, SpecEngine, load

_HOMES = {
    "Bundle": "speccompile.runtime.bundle",
    "Generation": "speccompile.runtime.engine",
    "SamplingParams": "speccompile.core.sampling_params",
    "SpecCompileError": "speccompile.errors",
    "SpecEngine": "speccompile.runtime.engine",
    "build": "speccompile.pipeline",
    "find_device": "speccompile.recipe",
    "load": "speccompile.runtime.engine",
    "load_recipe": "speccompile.recipe",
    "resolve": "speccompile.recipe",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'speccompile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
