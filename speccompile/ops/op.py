# SPDX-License-Identifier: Apache-2.0
"""The record that an op file declares, with its body as expressions, each call a node.

As in `rest = Relu(weight * probs - Gather(drafts, [1], axis=1))`. Statements are in Python's syntax. Operators, casts
(`int64(x)`) and literals are nodes: 1 is an int64 scalar, [1] an int64 vector, 1.0 a float32 scalar, double(1.0) one of
another type; keywords are attributes, and `attr.name` is the function's own attribute. Lines of another form, as the
heads of subgraphs, are ONNX's textual syntax.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speccompile.core.specs import TensorSpec

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
        body: the statements of the ONNX function, as the module describes them.
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


_TYPES = {"float32": ("float", 1), "uint8": ("uint8", 2), "int8": ("int8", 3), "int32": ("int32", 6)}
_TYPES |= {"int64": ("int64", 7), "boolean": ("bool", 9), "float16": ("float16", 10), "double": ("double", 11)}
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Div: "Div", ast.Mod: "Mod", ast.MatMult: "MatMul",
    ast.BitAnd: "And", ast.BitOr: "Or", ast.Invert: "Not", ast.USub: "Neg", ast.Eq: "Equal", ast.Lt: "Less",
    ast.LtE: "LessOrEqual", ast.Gt: "Greater", ast.GtE: "GreaterOrEqual",
}  # fmt: skip


def statements_from_body(body: str, attributes: Mapping[str, int | float]) -> str:
    """Returns the body in ONNX's textual syntax, one node a line; constants come first.

    Args:
        attributes: of the function, with their defaults.

    Raises:
        ValueError: an expression has a form that is no node.
    """
    writer, lines, text = _Writer(attributes), list[str](), ""
    for line in body.splitlines():
        text += line + "\n"
        if text.count("(") <= text.count(")"):
            lines += writer.lines(text)
            text = ""
    return "\n".join((*(f"    {name} = {made}" for made, name in writer.constants.items()), *lines, ""))


class _Writer:
    def __init__(self, attributes: Mapping[str, int | float]) -> None:
        self.attributes, self.constants = attributes, dict[str, str]()
        self.target, self.made = "", list[str]()

    def lines(self, text: str) -> list[str]:
        """Returns the nodes of a statement, in ONNX's textual syntax; other text as it is."""
        try:
            parsed = ast.parse(text.strip()).body
        except SyntaxError:
            return [text.rstrip()]
        if len(parsed) != 1 or not isinstance(parsed[0], ast.Assign):
            return [text.rstrip()]
        targets = parsed[0].targets[0]
        names = [ast.unparse(name) for name in (targets.elts if isinstance(targets, ast.Tuple) else [targets])]
        self.target, self.made = names[0], []
        self.made.append(f"    {', '.join(names)} = {self._node(parsed[0].value)}")
        return self.made

    def _node(self, value: ast.AST) -> str:
        """Returns the text of the node that computes a value; what its operands need is written before."""
        match value:
            case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
                return self._call(_OPERATORS[type(operator)], [left, right])
            case ast.UnaryOp(operator, operand) if not _is_literal(value):
                return self._call(_OPERATORS[type(operator)], [operand])
            case ast.Compare(left, [operator], [right]) if type(operator) in _OPERATORS:
                return self._call(_OPERATORS[type(operator)], [left, right])
            case ast.Call(ast.Name(name), [operand], []) if name in _TYPES and not _is_literal(operand):
                return self._call("Cast", [operand], f"<to = {_TYPES[name][1]}>")
            case ast.Call(function, operands, keywords) if not self._is_constant(value):
                attributes = ", ".join(self._attribute(str(word.arg), word.value) for word in keywords)
                return self._call(ast.unparse(function), operands, f"<{attributes}>" if attributes else "")
        if isinstance(value, ast.Name) or self._is_constant(value):
            return f"Identity({self._operand(value)})"
        raise ValueError(f"{ast.unparse(value)} is no node of a graph")

    def _call(self, name: str, operands: list[Any], attributes: str = "") -> str:
        return f"{name}{attributes}({', '.join(map(self._operand, operands))})"

    def _operand(self, value: ast.AST) -> str:
        if isinstance(value, ast.Name):
            return value.id
        if self._is_constant(value):
            made = f"Constant<{self._constant(value)}>()"
            return self.constants.setdefault(made, f"constant_{len(self.constants)}")
        node = self._node(value)
        name = f"{self.target}__{len(self.made)}"
        self.made.append(f"    {name} = {node}")
        return name

    @staticmethod
    def _is_constant(value: ast.AST) -> bool:
        is_typed = isinstance(value, ast.Call) and ast.unparse(value.func) in _TYPES and _is_literal(value.args[0])
        return is_typed or _is_own(value) or _is_literal(value)

    def _constant(self, value: Any) -> str:
        if isinstance(value, ast.Call):
            return f"value = {_TYPES[ast.unparse(value.func)][0]} {{{ast.literal_eval(value.args[0])}}}"
        if _is_own(value):
            return self._attribute("value_int" if type(self.attributes[value.attr]) is int else "value_float", value)
        literal = ast.literal_eval(value)
        first = literal[0] if isinstance(literal, list) else literal
        return f"value_{type(first).__name__}{'s' * isinstance(literal, list)} = {literal!r}"

    def _attribute(self, name: str, value: Any) -> str:
        if _is_own(value):
            kind = type(self.attributes[value.attr]).__name__
            return f"{name}: {kind} = @{value.attr}"
        literal = ast.literal_eval(value)
        if name == "value":  # a tensor
            return f"value = float[{len(literal)}] {{{', '.join(map(str, literal))}}}"
        return f'{name} = "{literal}"' if isinstance(literal, str) else f"{name} = {literal!r}"


def _is_own(value: ast.AST) -> bool:
    return isinstance(value, ast.Attribute) and ast.unparse(value.value) == "attr"


def _is_literal(value: ast.AST) -> bool:
    if isinstance(value, ast.List):
        return all(map(_is_literal, value.elts))
    operand = value.operand if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub) else value
    return isinstance(operand, ast.Constant)
