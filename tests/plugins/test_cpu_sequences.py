# SPDX-License-Identifier: Apache-2.0
"""Sequences of kernels: the bits of their kernels in any number of threads, faults named, broken programs refused."""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.backends.onnxruntime.sequences import OP, put_together, sequence_ops
from speccompile.ops.op import DOMAIN, OPSET, VERSION
from speccompile.ops.registry import OPS
from tests.lab.graphs import open_session
from tests.plugins.cpu_lab import library, linear_case, linear_model, needs_compiler
from tests.plugins.cpu_mutants import mutated_library
from tests.plugins.mutants import Mutants, Swap, chosen

pytestmark = [needs_compiler, pytest.mark.plan]

PLUGINS = Path(__file__).parents[2] / "plugins/cpu"
SIZE = 96
CHAIN = [
    *("PackedLinearInt8", "NormPackedLinearF32", "PackedLinearInt4", "NormGatedPackedLinearBf16"),
    *("PackedLinearF32", "NormPackedLinearInt8", "PackedLinearBf16", "NormGatedPackedLinearInt4"),
]
SEQUENCE = "cpu/sequence.h"
MUTANTS: Mutants = {
    "a value's place is free before its last use": (
        Swap(SEQUENCE, "last_use[value] == step", "last_use[value] <= step + 1"),
    ),
    "all values in one place": (Swap(SEQUENCE, "free.back()", "0", within="places_[value] = free.back()"),),
    "real attributes are 0": (Swap(SEQUENCE, "std::strtof(attribute(name).c_str(), nullptr)", "0"),),
}


def chain_model() -> onnx.ModelProto:
    """Linears of all kinds one after the other, with residuals, and an addition of ONNX between them."""
    nodes, tensors, x, residual = [], [], "x", "x"
    for index, name in enumerate(CHAIN):
        op, num_out = OPS[name], 2 * SIZE if "Gated" in name else SIZE
        constants, attributes = linear_case(name, SIZE, num_out, seed=index)
        model = linear_model(name, constants, attributes)
        tensors += [_renamed(tensor, f"{index}.{tensor.name}") for tensor in model.graph.initializer]
        values = {"x": x, "residual": residual}
        inputs = [values.get(t.name, f"{index}.{t.name}") for t in op.inputs]
        outputs = [f"{index}.{t.name}" for t in op.outputs]
        nodes.append(helper.make_node(name, inputs, outputs, domain=DOMAIN, **attributes))
        residual = outputs[1] if len(outputs) > 1 else x
        x = outputs[0]
        if index == 3:
            nodes.append(helper.make_node("Add", [x, "x"], ["added"]))
            x = "added"
    rows = ["batch", "nodes", SIZE]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, rows) for name in (x, "1.y", "5.sum")]
    graph = helper.make_graph(
        nodes, "chain", [helper.make_tensor_value_info("x", TensorProto.FLOAT, rows)], outputs, tensors
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def _renamed(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    tensor.name = name
    return tensor


def rows_of(num: int) -> np.ndarray:
    return np.random.default_rng(num).standard_normal((1, num, SIZE)).astype(np.float32)


def with_sequences(model: onnx.ModelProto, path: Path) -> tuple[onnx.ModelProto, int]:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    return changed, put_together(changed, sequence_ops(path))


def same(mine: list[Any], theirs: list[Any]) -> bool:
    return all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sequences_have_the_bits_of_their_kernels(threads):
    model = chain_model()
    joined, num = with_sequences(model, library())
    assert num == len(CHAIN) and [node.op_type for node in joined.graph.node] == [OP, "Add", OP]
    alone, together = open_session(model, library()), open_session(joined, library(), threads)
    for count in (1, 5, 70, 2):
        feeds = {"x": rows_of(count)}
        assert same(together.run(None, feeds), alone.run(None, feeds)), f"{count} rows"


def test_runs_at_the_same_time_do_not_share_values():
    model = chain_model()
    joined, _ = with_sequences(model, library())
    alone, together = open_session(model, library()), open_session(joined, library(), 2)
    feeds = [{"x": rows_of(count)} for count in (3, 40, 8, 21)] * 5
    wanted = [alone.run(None, feed) for feed in feeds]
    with ThreadPoolExecutor(4) as pool:
        for got, right in zip(pool.map(lambda feed: together.run(None, feed), feeds), wanted, strict=True):
            assert same(got, right)


def test_a_fault_names_the_kernel_and_the_session_goes_on():
    model = chain_model()
    del model.graph.input[0].type.tensor_type.shape.dim[:]
    joined, _ = with_sequences(model, library())
    session = open_session(joined, library(), 2)
    right = session.run(None, {"x": rows_of(4)})
    with pytest.raises(FAULTS, match=r"KernelSequence: PackedLinearInt8: x has dims .1, 4, 95.*expected"):
        session.run(None, {"x": rows_of(4)[:, :, 1:].copy()})
    assert same(session.run(None, {"x": rows_of(4)}), right)


def attributes_of(model: onnx.ModelProto) -> Mapping[str, Any]:
    return {a.name: a for a in model.graph.node[0].attribute}


BROKEN = [
    ("PackedLinearInt8 ", "Conv ", "got the op Conv, which no sequence has"),
    ("in=0,", "in=40,", "reads value 40 before it is made"),
    ("out=", "out=9", "makes value 9.* out of order"),
    ("in=0,1,", "in=0,", "has other inputs or outputs than the op"),
    (" num_in=96", "", "PackedLinearInt8 without num_in"),
    (" num_in=96", " num_in", "got 'num_in', expected NAME=VALUE"),
    ("in=0,1,", "in=0,x,", "got 'x', expected the number of a value"),
    ("outputs ", "outputs 0,", "the outputs have a value that no kernel makes"),
]


@pytest.mark.parametrize(("old", "new", "fault"), BROKEN)
def test_a_broken_program_is_refused_at_load(old, new, fault):
    joined, _ = with_sequences(chain_model(), library())
    program = attributes_of(joined)["program"]
    text = program.s.decode()
    assert old in text
    program.s = text.replace(old, new, 1).encode()
    with pytest.raises(FAULTS, match=fault):
        open_session(joined, library())


def test_nodes_are_ordered_so_that_kernels_stay_together():
    def node(op: str, inputs: str, outputs: str, domain: str = DOMAIN, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs.split(), outputs.split(), domain=domain, **attributes)

    nodes = [
        node("K", "x w", "a", size=3, scale=1 / 3),
        node("Shape", "x", "s", ""),  # waits for nothing: before the kernels
        node("K", "a s", "b c"),
        node("Neg", "b", "n", ""),
        node("K", "c w", "d"),  # does not wait for Neg
        node("K", "n d", "e"),
        node("Other", "e", "f"),
        node("K", "f w", "g"),  # alone
    ]
    graph = helper.make_graph(nodes, "g", [], [], [])
    graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0]))
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]))
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("g", "d"))
    model = helper.make_model(graph)
    assert put_together(model, {"K"}) == 3
    assert [n.op_type for n in model.graph.node] == ["Shape", OP, "Neg", "K", "Other", "K"]
    sequence = model.graph.node[1]
    assert list(sequence.input) == ["x", "w", "s"] and list(sequence.output) == ["b", "d"]
    program = next(a.s.decode() for a in sequence.attribute if a.name == "program")
    assert program.splitlines() == [
        "K in=0,1 out=3 scale=0.333333343 size=3",
        "K in=3,2 out=4,5",
        "K in=5,1 out=6",
        "outputs 4,6",
    ]
    assert put_together(model, {"K"}) == 0


def test_kernels_without_an_input_or_with_other_attributes_stay_alone():
    nodes = [
        helper.make_node("K", ["x", ""], ["a"], domain=DOMAIN),
        helper.make_node("K", ["a"], ["b"], domain=DOMAIN, name_of="text"),
        helper.make_node("K", ["b"], ["c"], domain="other"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, [1])], [value("c", 1, [1])])
    assert put_together(helper.make_model(graph), {"K"}) == 0


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All mutants, without the kernels of other families."""
    return mutated_library(tmp_path_factory.mktemp("mutants"), MUTANTS, "linear_ops")


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_mutated_sequence_is_noticed(mutant, mutated):
    model = chain_model()
    joined, _ = with_sequences(model, mutated)
    feeds = {"x": rows_of(5)}
    right = open_session(model, mutated).run(None, feeds)
    loaded = ctypes.CDLL(str(mutated))
    if mutant is None:
        assert same(open_session(joined, mutated).run(None, feeds), right)
        return
    with chosen(loaded, MUTANTS, mutant):
        assert not same(open_session(joined, mutated).run(None, feeds), right)


TEAM = """
#include <cstdio>
#include <thread>
#include <vector>
#include "team.h"
int main() {
    for (int round = 0; round < 20; round++) {
        speccompile::cpu::Team team;
        std::vector<std::thread> helpers;
        for (int i = 0; i < 3; i++) helpers.emplace_back([&] { team.help(); });
        std::vector<long> counts(257, 0);  // written without atomics: a task that ran twice or early would race
        for (int loop = 0; loop < 300; loop++) {
            const std::size_t count = static_cast<std::size_t>(loop * 37 % 257);
            team.run(count, [](void* data, std::size_t i) { (*static_cast<std::vector<long>*>(data))[i]++; }, &counts);
        }
        team.end();
        for (std::thread& helper : helpers) helper.join();
        long sum = 0, wanted = 0;
        for (long count : counts) sum += count;
        for (int loop = 0; loop < 300; loop++) wanted += loop * 37 % 257;
        if (sum != wanted) return std::printf("%ld tasks, expected %ld\\n", sum, wanted), 1;
    }
    return 0;
}
"""


def test_a_team_runs_every_task_once_and_without_races(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("NO g++: races of a team WERE NOT LOOKED FOR")
    source, program = tmp_path / "team.cpp", tmp_path / "team"
    source.write_text(TEAM)
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{PLUGINS}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    # Addresses at random places are more than the detector can map on some kernels.
    done = subprocess.run(["setarch", "-R", str(program)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
