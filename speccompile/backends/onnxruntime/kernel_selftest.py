# SPDX-License-Identifier: Apache-2.0
"""Child process that tries a library of CPU kernels: every kernel against its numpy twin, and its rows for equal bits.

Run as `python -m speccompile.backends.onnxruntime.kernel_selftest LIBRARY`; exit code 0 means that it works.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort

from speccompile.backends.onnxruntime.attention_cases import attention_cases, chain_fault, cross_cases
from speccompile.backends.onnxruntime.linear_cases import (
    NUM_ROWS,
    expert_cases,
    expert_row_fault,
    integers_differ,
    linear_cases,
    low_rank_cases,
    row_cases,
    tail_cases,
)
from speccompile.backends.onnxruntime.state_cases import paths_fault, state_cases, steps_fault, with_trees
from speccompile.ops.op import DOMAIN, Op

TOLERANCE = 1e-4  # of the largest number; a wrong kernel is off by far more
LEVEL_TOLERANCE = 1e-2  # over int8 caches, where the last bit of a number may change its level by one of 127


@dataclass(frozen=True)
class Case:
    """One call of an op."""

    op: Op
    inputs: dict[str, Any]
    attributes: dict[str, int | float]
    by_row: tuple[str, ...]  # inputs whose second dim is rows that must not depend on each other


def run(session: ort.InferenceSession, inputs: dict[str, Any]) -> list[Any]:
    """Returns the outputs; inputs may be bfloat16, which numpy does not know."""
    values = {}
    for name, array in inputs.items():
        if array.dtype.name == "bfloat16":
            values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), 16)
        else:
            values[name] = ort.OrtValue.ortvalue_from_numpy(array)
    return [value.numpy() for value in session.run_with_ort_values(None, values)]


def session_options(library: str, threads: int) -> ort.SessionOptions:
    """Returns options with the library registered."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(library)
    return options


def open_case(case: Case, library: str, threads: int = 2) -> ort.InferenceSession:
    """Opens a session of the one node with the library's kernel."""
    options = session_options(library, threads)
    # Scales and minimums may have another element type than the op names.
    inputs = [(t.name, case.inputs[t.name].dtype.name if t.name in case.inputs else t.dtype) for t in case.op.inputs]
    outputs = [(t.name, t.dtype) for t in case.op.outputs]
    model = one_node_model(DOMAIN, case.op.name, inputs, outputs, case.attributes)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def fault_of(case: Case, library: str) -> str | None:
    """Returns what is wrong with the kernel of a case; None where nothing is."""
    session = open_case(case, library)
    return error_of(case, session) or row_fault(case, session)


def error_of(case: Case, session: ort.InferenceSession) -> str | None:
    """Returns which output is not the twin's; None where all are."""
    got = run(session, case.inputs)
    wanted = case.op.twin(*case.inputs.values(), **case.attributes)
    tolerance = LEVEL_TOLERANCE if any(t.dtype == "int8" for t in case.op.inputs) else TOLERANCE
    for spec, mine, theirs in zip(case.op.outputs, got, wanted, strict=True):
        if mine.shape != theirs.shape or integers_differ(mine, theirs):
            return f"{case.op.name}: {spec.name} is not the twin's"
        error = np.abs(mine.astype(np.float32) - theirs).max() / max(np.abs(theirs.astype(np.float32)).max(), 1e-30)
        if not error <= tolerance:
            return f"{case.op.name}: {spec.name} differs by {error:.2e} from the twin"
    return None


def row_fault(case: Case, session: ort.InferenceSession) -> str | None:
    """Returns which row has other bits alone; None where none has."""
    got = run(session, case.inputs)
    for row in range(NUM_ROWS):
        alone = {n: a[:, row : row + 1].copy() if n in case.by_row else a for n, a in case.inputs.items()}
        for mine, single in zip(got, run(session, alone), strict=True):
            if not np.array_equal(mine[:, row], single[:, 0]):
                return f"{case.op.name}: row {row} depends on the other rows"
    return None


def embedding_fault(library: str) -> str | None:
    """Returns what is wrong with a kernel of embeddings; None where nothing is."""
    cases = (Case(*call, by_row=("tokens",)) for call in row_cases())
    return next(filter(None, (fault_of(case, library) for case in cases)), None)


def low_rank_fault(library: str) -> str | None:
    """Returns what is wrong with a kernel of low-rank changes; None where nothing is."""
    cases = (Case(*call, by_row=("base", "x", "residual")) for call in low_rank_cases())
    return next(filter(None, (fault_of(case, library) for case in cases)), None)


def expert_fault(library: str) -> str | None:
    """Returns what is wrong with a kernel of experts; None where nothing is."""
    for op, inputs, attributes in expert_cases():
        case = Case(op, inputs, attributes, ())
        session = open_case(case, library)
        fault = error_of(case, session) or expert_row_fault(op, partial(run, session), inputs)
        if fault is not None:
            return fault
    return None


def attention_fault(library: str) -> str | None:
    """Returns what is wrong with an attention kernel; None where nothing is."""
    for op, inputs, attributes in attention_cases():
        case = Case(op, inputs, attributes, ())
        session = open_case(case, library)
        fault = error_of(case, session) or chain_fault(op, partial(run, session), inputs)
        if fault is not None:
            return fault
    cases = (Case(*call, by_row=("q", "positions", "limits")) for call in cross_cases())
    return next(filter(None, (fault_of(case, library) for case in cases)), None)


def tail_fault(library: str) -> str | None:
    """Returns what is wrong with a kernel of a tail; None where nothing is."""
    cases = (Case(*call, by_row=()) for call in tail_cases())
    return next(filter(None, (error_of(case, open_case(case, library)) for case in cases)), None)


def state_fault(library: str) -> str | None:
    """Returns what is wrong with a kernel of recurrent states; None where nothing is."""
    for op, inputs, attributes in state_cases():
        case = Case(op, inputs, attributes, ())
        session = open_case(case, library)
        trees, go = Case(op, with_trees(inputs), attributes, ()), partial(run, session)
        fault = error_of(case, session) or error_of(trees, session)
        fault = fault or steps_fault(op, go, inputs) or paths_fault(op, go, inputs)
        if fault is not None:
            return fault
    return None


def sequence_fault(library: str) -> str | None:
    """Returns what is wrong with a sequence of all packed linears; None where it gives the bits of its kernels."""
    inputs, outputs, lines, wanted = dict[str, Any](), list[tuple[str, str]](), list[str](), list[Any]()
    cases = [Case(*call, by_row=()) for call in linear_cases()]
    num_inputs = sum(len(case.inputs) for case in cases)
    for index, case in enumerate(cases):
        numbers = range(len(inputs), len(inputs) + len(case.inputs))
        made = range(num_inputs + len(outputs), num_inputs + len(outputs) + len(case.op.outputs))
        inputs |= {f"{index}.{name}": array for name, array in case.inputs.items()}
        outputs += [(f"{index}.{t.name}", t.dtype) for t in case.op.outputs]
        sides = f"in={','.join(map(str, numbers))} out={','.join(map(str, made))}"
        lines.append(" ".join([case.op.name, sides, *(f"{name}={value}" for name, value in case.attributes.items())]))
        wanted += run(open_case(case, library), case.inputs)
    lines.append("outputs " + ",".join(map(str, range(num_inputs, num_inputs + len(outputs)))))
    dtypes = [(name, array.dtype.name) for name, array in inputs.items()]
    attributes: dict[str, int | float | str] = {"program": "\n".join(lines), "num_inputs": num_inputs}
    options = session_options(library, 2)
    model = one_node_model(DOMAIN, "KernelSequence", dtypes, outputs, attributes)
    got = run(ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]), inputs)
    is_same = all(np.array_equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    return None if is_same else "KernelSequence: other numbers than those of its kernels"


def main() -> None:
    """Runs every case; the first fault is the last line of standard error."""
    library = sys.argv[1]
    for call in linear_cases():
        fault = fault_of(Case(*call, by_row=("x", "residual")), library)
        if fault is not None:
            sys.exit(fault)
    checks = (embedding_fault, low_rank_fault, expert_fault, attention_fault, tail_fault, state_fault, sequence_fault)
    sys.exit(next(filter(None, (check(library) for check in checks)), None))


ELEMENT_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}
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
    """Returns a model whose inputs and outputs, (name, dtype) in order, are those of its one node; "" is left out."""
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


if __name__ == "__main__":
    main()
