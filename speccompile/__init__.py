# SPDX-License-Identifier: Apache-2.0
"""speccompile: speculative decoding as compiled engines.

Importing the package is light: neither torch nor onnx nor onnxruntime is touched until it is needed.
"""

import logging
from typing import TYPE_CHECKING, Any

from speccompile.version import VERSION as __version__

__all__ = [
    "Bundle",
    "Generation",
    "Request",
    "SamplingParams",
    "Service",
    "ServiceOptions",
    "SpecCompileError",
    "SpecEngine",
    "__version__",
    "build",
    "find_device",
    "load",
    "load_recipe",
    "load_service",
    "resolve",
]

# Modules log to loggers below this one; who uses the package decides whether that is shown.
logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from speccompile.bundle.bundle import Bundle
    from speccompile.core.sampling_params import SamplingParams
    from speccompile.errors import SpecCompileError
    from speccompile.pipeline import build
    from speccompile.prepare import load, load_service
    from speccompile.recipe import find_device, load_recipe, resolve
    from speccompile.runtime.requests import Generation, Request
    from speccompile.runtime.service import Service, ServiceOptions
    from speccompile.runtime.spec_engine import SpecEngine

_HOMES = {
    "Bundle": "speccompile.bundle.bundle",
    "Generation": "speccompile.runtime.requests",
    "Request": "speccompile.runtime.requests",
    "SamplingParams": "speccompile.core.sampling_params",
    "SpecCompileError": "speccompile.errors",
    "Service": "speccompile.runtime.service",
    "ServiceOptions": "speccompile.runtime.service",
    "SpecEngine": "speccompile.runtime.spec_engine",
    "build": "speccompile.pipeline",
    "find_device": "speccompile.recipe",
    "load": "speccompile.prepare",
    "load_recipe": "speccompile.recipe",
    "load_service": "speccompile.prepare",
    "resolve": "speccompile.recipe",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'speccompile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
