# SPDX-License-Identifier: Apache-2.0
"""speccompile: speculative decoding as compiled engines.

Importing the package is light: neither torch nor onnx nor onnxruntime is touched until it is needed.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load"]

if TYPE_CHECKING:
    from speccompile.runtime.engine import load


def __getattr__(name: str) -> Any:
    if name == "load":
        from speccompile.runtime.engine import load

        return load
    raise AttributeError(f"module 'speccompile' has no attribute {name!r}")
