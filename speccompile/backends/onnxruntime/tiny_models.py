# SPDX-License-Identifier: Apache-2.0
"""ONNX models of one node as bytes, written without the package onnx, which an installed runtime does not have."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

ELEMENT_TYPES = {"float32": 1, "uint8": 2, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}
_FLOAT_ATTRIBUTE, _INT_ATTRIBUTE, _STRING_ATTRIBUTE = 1, 2, 3  # AttributeProto.AttributeType
_IR_VERSION, _OPSET = 11, 24


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _value_info(name: str, dtype: str) -> bytes:
    tensor = _number(1, ELEMENT_TYPES[dtype])  # TypeProto.Tensor.elem_type; no shape: any
    return _bytes(1, name) + _bytes(2, _bytes(1, tensor))


def _attribute(name: str, value: int | float | str) -> bytes:
    if isinstance(value, str):
        return _bytes(1, name) + _bytes(4, value) + _number(20, _STRING_ATTRIBUTE)
    if isinstance(value, float):
        return _bytes(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _number(20, _FLOAT_ATTRIBUTE)
    return _bytes(1, name) + _number(3, value) + _number(20, _INT_ATTRIBUTE)


def one_node_model(
    domain: str,
    op_type: str,
    inputs: Iterable[tuple[str, str]],
    outputs: Iterable[tuple[str, str]],
    attributes: Mapping[str, int | float | str],
) -> bytes:
    """Returns a model whose inputs and outputs are those of its one node.

    Args:
        domain: of the op, version 1.
        inputs: (name, dtype) in order; an input of name "" is left out.
        outputs: (name, dtype) in order.
    """
    inputs, outputs = tuple(inputs), tuple(outputs)
    node = b"".join(_bytes(1, name) for name, _ in inputs) + b"".join(_bytes(2, name) for name, _ in outputs)
    node += _bytes(4, op_type) + _bytes(7, domain)
    node += b"".join(_bytes(5, _attribute(name, value)) for name, value in attributes.items())
    graph = _bytes(1, node) + _bytes(2, op_type)
    graph += b"".join(_bytes(11, _value_info(*value)) for value in inputs if value[0])
    graph += b"".join(_bytes(12, _value_info(*value)) for value in outputs)
    opsets = ((_OPSET, ""), (1, domain))
    imports = b"".join(_bytes(8, _bytes(1, name) + _number(2, version)) for version, name in opsets)
    return _number(1, _IR_VERSION) + imports + _bytes(7, graph)
