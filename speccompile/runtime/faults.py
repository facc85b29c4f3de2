# SPDX-License-Identifier: Apache-2.0
"""Faults that end a request without ending others."""

from __future__ import annotations

from speccompile.errors import RuntimeFault, SpecCompileError

# What an engine, a method or a bug in the code for one request may raise. Exits and interrupts are not among them.
FAULTS = (
    SpecCompileError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    NameError,
    ArithmeticError,
    LookupError,
    MemoryError,
    BufferError,
    OSError,
)


class NotFinite(RuntimeFault):
    """The target's logits for a sequence are NaN or infinite: no token can be chosen."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"logits after {num_tokens} tokens",
            "a row that is not finite",
            "numbers: neither NaN nor infinity",
            "Look for NaN in the checkpoint's weights (embeddings first), or build with a dtype of a larger range; "
            "other requests are not affected.",
        )


def text_from_fault(fault: BaseException) -> str:
    """Returns the error text of a request that a fault ended: our own errors as they are, others with their type."""
    return str(fault) if isinstance(fault, SpecCompileError) else f"{type(fault).__name__}: {fault}"
