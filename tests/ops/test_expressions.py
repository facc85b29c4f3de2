# SPDX-License-Identifier: Apache-2.0
"""Bodies as expressions: which nodes a statement makes, and what is refused."""

import pytest

from speccompile.ops.op import statements_from_body

ATTRIBUTES = {"window": 0, "scale": 1.0}
CASES = {
    "y = Relu(x)": ["y = Relu(x)"],
    "y = x": ["y = Identity(x)"],
    "y = a - b - c": ["y__0 = Sub(a, b)", "y = Sub(y__0, c)"],
    "y = a - (b - c)": ["y__0 = Sub(b, c)", "y = Sub(a, y__0)"],
    "y = ~(a < b) & c": ["y__0 = Less(a, b)", "y__1 = Not(y__0)", "y = And(y__1, c)"],
    "y = -x % [4]": ["constant_0 = Constant<value_ints = [4]>()", "y__0 = Neg(x)", "y = Mod(y__0, constant_0)"],
    "y = int64(x) + z": ["y__0 = Cast<to = 7>(x)", "y = Add(y__0, z)"],
    "y = Max(x, -1e30)": ["constant_0 = Constant<value_float = -1e+30>()", "y = Max(x, constant_0)"],
    "y = x * double(0.5)": ["constant_0 = Constant<value = double {0.5}>()", "y = Mul(x, constant_0)"],
    "y = Where(attr.window > 0, x, z)": [
        "constant_0 = Constant<value_int: int = @window>()",
        "constant_1 = Constant<value_int = 0>()",
        "y__0 = Greater(constant_0, constant_1)",
        "y = Where(y__0, x, z)",
    ],
    "y, z = speccompile.Two(\n  x, scale=attr.scale, axis=-1, mode='max'\n)": [
        'y, z = speccompile.Two<scale: float = @scale, axis = -1, mode = "max">(x)'
    ],
    "y = ConstantOfShape(x, value=[1.0])": ["y = ConstantOfShape<value = float[1] {1.0}>(x)"],
    "y = If(x) <\n  then_branch = a () => (b) {": ["y = If(x) <", "then_branch = a () => (b) {"],
}  # fmt: skip


@pytest.mark.parametrize("body", CASES)
def test_a_statement_makes_these_nodes(body):
    made = statements_from_body(body, ATTRIBUTES)
    assert [line.strip() for line in made.splitlines()] == CASES[body]


def test_equal_literals_are_one_constant():
    assert statements_from_body("y = x + 1\nz = y + 1", {}).count("Constant") == 1


@pytest.mark.parametrize("body", ["y = x if z else w", "y = Relu(x[0])", "y = a < b < c", "y = Relu(x ** 2)"])
def test_what_is_no_node_is_refused(body):
    with pytest.raises(ValueError, match="is no node"):
        statements_from_body(body, {})
