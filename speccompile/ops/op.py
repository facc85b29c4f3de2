# SPDX-License-Identifier: Apache-2.0
"""The record that an op file declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speccompile.core.specs import TensorSpec
from speccompile.ops.expressions import statements_from_body

if TYPE_CHECKING:
    from onnx import FunctionProto

DOMAIN = "speccompile"
VERSION = 1
OPSET = 24  # first opset with TensorScatter


@dataclass(frozen=True)
class Op:
    """A custom op.

    Args:
        twin: numpy function of the inputs in order, attributes by keyword; returns the outputs as a tuple.
        body: the statements of the ONNX function, see `speccompile.ops.expressions`.
        sized_body: the body for a vocabulary whose size is known at build; `body` is for any size.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    twin: Callable[..., tuple[Any, ...]]
    body: str  # the statements of the ONNX function, in ONNX's textual syntax
    attributes: Mapping[str, int | float] = field(default_factory=dict)  # name -> default
    uses: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()  # further domains whose ops the body calls, version 1 each
    sized_body: Callable[[int], str] | None = None

    def text(self, vocab: int | None = None) -> str:
        """Returns the function in ONNX's textual syntax; `vocab` is the size of the vocabulary where it is known."""
        body = self.body if vocab is None or self.sized_body is None else self.sized_body(vocab)
        kinds = {int: "int", float: "float"}
        statements = statements_from_body(body, self.attributes)
        declared = ", ".join(f"{n}: {kinds[type(v)]} = {v}" for n, v in self.attributes.items())
        arguments, results = (", ".join(t.name for t in side) for side in (self.inputs, self.outputs))
        others = "".join(f', "{domain}" : 1' for domain in self.domains)
        head = f'<opset_import: ["" : {OPSET}, "{DOMAIN}" : {VERSION}{others}], domain: "{DOMAIN}">\n'
        return (
            f"{head}{self.name} {f'<{declared}>' if declared else ''} ({arguments}) => ({results}) {{\n{statements}}}"
        )

    def function(self, vocab: int | None = None) -> FunctionProto:
        """Returns the op as a FunctionProto of standard ops (and of those in `uses`); `vocab` as in `text`."""
        import onnx.parser

        return onnx.parser.parse_function(self.text(vocab))
