# SPDX-License-Identifier: Apache-2.0
"""Kernels of our CPU library one after the other as one op, `KernelSequence` (`plugins/cpu/sequence.h`).

Dispatching one takes ONNX Runtime about as long as a small model's kernel runs. The order of sums stays the same, so do
the bits. This graph without function bodies lies beside the one that runs everywhere, with the same weights.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from speccompile.backends.onnxruntime.kernel_library import find_library, sequences_path
from speccompile.common.disk import error_from_fault

if TYPE_CHECKING:
    import onnx

DOMAIN, OP = "speccompile", "KernelSequence"
MIXED_OP, MIXED_KERNEL = "MixedSequence", "Int8"  # where a kernel, whose name begins so, has outputs that are no floats
LEAST_KERNELS = 2


def sequence_ops(library: Path) -> tuple[str, ...]:
    list_ops = ctypes.CDLL(str(library)).speccompile_sequence_ops
    list_ops.restype = ctypes.c_char_p
    return tuple(list_ops().decode().split())


def write_sequences(path: Path) -> int:
    """Writes the graph with sequences beside a lowered graph, with its external data; returns the joined kernels."""
    import onnx

    library = find_library()
    if library is None:
        return 0
    model = onnx.load(path, load_external_data=False)
    if not (num := put_together(model, sequence_ops(library))):
        return 0
    try:
        with sequences_path(path).open("wb") as file:
            file.write(model.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
    except OSError as fault:
        raise error_from_fault(fault, sequences_path(path)) from fault
    return num


def put_together(model: onnx.ModelProto, ops: Collection[str]) -> int:
    """Replaces kernels that can run one after the other by sequences; returns how many became part of one."""
    graph, known = model.graph, frozenset(ops)
    groups = schedule(graph, known)
    readers: dict[str, set[int]] = {output.name: {-1} for output in graph.output}
    for index, group in enumerate(groups):
        for node in group:
            for name in node.input:
                readers.setdefault(name, set()).add(index)
    nodes: list[onnx.NodeProto] = []
    num = 0
    for index, group in enumerate(groups):
        if len(group) < LEAST_KERNELS:
            nodes += group
            continue
        read = {name for name, by in readers.items() if by - {index}}
        nodes.append(sequence := _sequence(group, read.__contains__))
        if sequence.op_type == MIXED_OP:
            _state_types(graph, sequence.output)
        num += len(group)
    del graph.node[:]
    graph.node.extend(nodes)
    return num


def _state_types(graph: onnx.GraphProto, names: Sequence[str]) -> None:
    # Values that leave a sequence are float32, but for outputs of the graph, which have their types.
    from onnx import TensorProto, helper

    known = {value.name for value in (*graph.output, *graph.value_info)}
    graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in known
    )


def schedule(graph: onnx.GraphProto, ops: frozenset[str]) -> list[list[onnx.NodeProto]]:
    """Returns the nodes in an order that keeps kernels together: groups of kernels, and other nodes one by one."""
    waiting = list(graph.node)
    made = {"", *(value.name for value in graph.input), *(value.name for value in graph.initializer)}
    groups: list[list[onnx.NodeProto]] = []

    def take(kernels: bool) -> list[onnx.NodeProto]:
        taken, left = [], []
        for node in waiting:  # in the graph's order, so that each sees what those before it make
            if _is_kernel(node, ops) == kernels and made.issuperset(node.input):
                made.update(node.output)
                taken.append(node)
            else:
                left.append(node)
        waiting[:] = left
        return taken

    while waiting:
        others, kernels = take(kernels=False), take(kernels=True)
        groups += [[node] for node in others]
        if kernels:
            groups.append(kernels)
        assert others or kernels, "the graph has a cycle"
    return groups


def _is_kernel(node: onnx.NodeProto, ops: frozenset[str]) -> bool:
    is_whole = "" not in node.input and "" not in node.output
    return node.domain == DOMAIN and node.op_type in ops and is_whole and all(a.type in (1, 2) for a in node.attribute)


def _sequence(group: Sequence[onnx.NodeProto], is_read: Callable[[str], bool]) -> onnx.NodeProto:
    from onnx import helper

    made = [name for node in group for name in node.output]
    own = set(made)
    inputs = list(dict.fromkeys(name for node in group for name in node.input if name not in own))
    outputs = [name for name in made if is_read(name)]
    numbers = {name: index for index, name in enumerate([*inputs, *made])}
    lines = [_line(node, numbers) for node in group]
    lines.append("outputs " + ",".join(str(numbers[name]) for name in outputs))
    attributes = {"program": "\n".join(lines), "num_inputs": len(inputs)}
    op = MIXED_OP if any(node.op_type.startswith(MIXED_KERNEL) for node in group) else OP
    return helper.make_node(op, inputs, outputs, f"{op}.{made[0]}", domain=DOMAIN, **attributes)


def _line(node: onnx.NodeProto, numbers: dict[str, int]) -> str:
    inputs, outputs = (",".join(str(numbers[name]) for name in names) for names in (node.input, node.output))
    words = [node.op_type, f"in={inputs}", f"out={outputs}"]
    # A float32 with 9 digits comes back as it is.
    words += [f"{a.name}={a.i}" if a.type == a.INT else f"{a.name}={np.float32(a.f):.9g}" for a in node.attribute]
    return " ".join(words)
