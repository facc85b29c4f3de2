# SPDX-License-Identifier: Apache-2.0
"""Ops with recurrent states on any executor: sequences of steps as an engine runs them, and what must be equal in bits.

A token is an index into tables of random rows. The last row of every table is NaN: padding, and whatever nobody may
read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from speccompile.core.specs import LENGTHS, STATE_LENGTHS, SURE_NODES, TREE_MASK
from speccompile.core.tree import TokenTree, chain_mask
from speccompile.ops.conv_rows import CONV_ROWS
from speccompile.ops.gated_delta import GATED_DELTA, pending_width
from speccompile.ops.op import Op
from tests.lab.graphs import open_session
from tests.ops.op_lab import model_of

Arrays = dict[str, Any]
Run = Callable[[Arrays], Sequence[np.ndarray]]
VOCAB = 60  # tokens; the row after them is NaN
PADDING = VOCAB


@dataclass(frozen=True)
class Layer:
    """An op with random constants and rows of every token.

    Args:
        op: the op.
        attributes: of the node.
        table: [VOCAB + 1, width] float32 by input that has a row for each node.
        constants: other inputs.
        states: dims of each state input without the batch, in the order of the outputs that update them.
        pending: rows that may be pending.
        settled: of the first state: its rows that do not depend on pending ones.
    """

    op: Op
    attributes: dict[str, int | float]
    table: Arrays
    constants: Arrays
    states: dict[str, tuple[int, ...]]
    pending: int
    settled: int

    def twin(self, inputs: Arrays) -> Sequence[np.ndarray]:
        """Runs the numpy twin."""
        return self.op.twin(**inputs, **self.attributes)

    def ordered(self, given: Mapping[str, Any]) -> Arrays:
        """Returns the inputs in the op's order."""
        return {t.name: given[t.name] for t in self.op.inputs}


def _table(rng: np.random.Generator, width: int, scale: float = 1.0) -> np.ndarray:
    rows = scale * rng.standard_normal((VOCAB + 1, width))
    rows[PADDING] = np.nan
    return rows.astype(np.float32)


def delta_layer(
    key_heads: int = 2, group: int = 2, key_dim: int = 6, value_dim: int = 5, pending: int = 8, delta: int = 1
) -> Layer:
    """A GatedDelta with normalised keys, decays between 0.2 and 1 and weights between 0 and 1."""
    rng, value_heads = np.random.default_rng(key_dim), key_heads * group
    keys = _table(rng, key_heads * key_dim).reshape(VOCAB + 1, key_heads, key_dim)
    keys /= np.linalg.norm(keys, axis=2, keepdims=True)
    decay, beta = rng.uniform(0.2, 1, (2, VOCAB + 1, value_heads)).astype(np.float32)
    decay[PADDING], beta[PADDING] = np.nan, np.nan
    table = {
        "q": _table(rng, key_heads * key_dim),
        "k": keys.reshape(VOCAB + 1, -1),
        "v": _table(rng, value_heads * value_dim),
        "g": np.log(decay),
        "beta": beta,
    }
    heads = {"num_key_heads": key_heads, "num_value_heads": value_heads}
    width = pending_width(key_heads, value_heads, key_dim, value_dim)
    states = {"state": (value_heads, key_dim, value_dim), "pending": (pending, width)}
    attributes = {**heads, "scale": key_dim**-0.5, "delta": delta}
    return Layer(GATED_DELTA, attributes, table, {}, states, pending, value_heads)


def conv_layer(channels: int = 10, kernel: int = 4, pending: int = 8, activation: int = 1) -> Layer:
    """A ConvRows."""
    rng = np.random.default_rng(channels)
    constants = {n: rng.standard_normal(shape) for n, shape in (("weight", (channels, kernel)), ("bias", (channels,)))}
    return Layer(
        CONV_ROWS,
        {"activation": activation},
        {"x": _table(rng, channels)},
        {name: array.astype(np.float32) for name, array in constants.items()},
        {"rows": (kernel - 1 + pending, channels)},
        pending,
        kernel - 1,
    )


class Slots:
    """Sequences in slots whose buffers hold NaN at first.

    Args:
        layer: what is run.
        run: inputs by name -> outputs.
        batch: slots.
    """

    def __init__(self, layer: Layer, run: Run, batch: int) -> None:
        self.layer, self.run = layer, run
        self.buffers = {n: np.full((batch, *dims), np.nan, np.float32) for n, dims in layer.states.items()}
        self.lengths, self.state_lengths = np.zeros(batch, np.int64), np.zeros(batch, np.int64)

    def inputs(self, tokens: np.ndarray, sure: Any, parents: Any = None) -> Arrays:
        """Returns the inputs of a step; without `parents` [batch, nodes] its nodes are chains."""
        rows = {name: table[tokens] for name, table in self.layer.table.items()}
        counts = {LENGTHS: self.lengths, STATE_LENGTHS: self.state_lengths, SURE_NODES: np.asarray(sure, np.int64)}
        mask = chain_mask(*tokens.shape) if parents is None else mask_of(parents)
        return self.layer.ordered({**rows, **self.layer.constants, **self.buffers, **counts, TREE_MASK: mask})

    def step(self, tokens: Any, sure: Any, accepted: Any, parents: Any = None) -> np.ndarray:
        """Runs a step.

        Args:
            tokens: [batch, nodes], padded on the right.
            sure: [batch] nodes that are applied.
            accepted: [batch] nodes that the sequences keep, at least the sure ones.
            parents: [batch, nodes] of trees, whose accepted path `keep_paths` moves; None: chains.

        Returns:
            The output [batch, nodes, width].
        """
        out, *updated = self.run(self.inputs(np.asarray(tokens), sure, parents))
        self.buffers = {name: np.array(array) for name, array in zip(self.buffers, updated, strict=True)}
        self.state_lengths = self.lengths + np.asarray(sure)
        self.lengths = self.lengths + np.asarray(accepted)
        return np.array(out)

    def keep_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """Moves the pending rows of accepted paths, by slot from the root on, to the front; no node was sure."""
        for slot, path in enumerate(paths):
            for name, buffer in self.buffers.items():
                if name != "state":
                    first = self.layer.settled if name == "rows" else 0
                    buffer[slot, first : first + len(path)] = buffer[slot, [first + node for node in path]]

    def flushed(self) -> np.ndarray:
        """Returns the first state after the accepted rows are applied, by a step that all slots sit out."""
        none = np.zeros(len(self.lengths), np.int64)
        self.step(np.full((len(none), 1), PADDING), none, none)
        return next(iter(self.buffers.values()))[:, : self.layer.settled]


def mask_of(parents: Any) -> np.ndarray:
    """Returns the tree mask [batch, nodes, nodes] of parents [batch, nodes]; -1 begins a path."""
    held = np.asarray(parents, np.int64)
    return TokenTree(held, held, np.full(len(held), held.shape[1])).mask()


def assert_near(got: np.ndarray, wanted: np.ndarray, bound: float = 3e-6) -> None:
    """Compares with a tolerance that is a share of the largest number."""
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound * max(1.0, float(np.abs(wanted).max(initial=0))))


def body_run(layer: Layer) -> Run:
    """Runs the function body with ONNX Runtime."""
    session = open_session(model_of(layer.op.name, **layer.attributes))
    return lambda inputs: session.run(None, inputs)


def bound_run(session: ort.InferenceSession, layer: Layer, copies: bool = True) -> Run:
    """Runs with each state bound as input and output at one address.

    Args:
        session: of the layer's op.
        layer: names the states.
        copies: the states of a call are copied first, so that the caller's arrays stay.
    """

    def run(inputs: Arrays) -> Sequence[np.ndarray]:
        held = {n: inputs[n].copy() if copies else inputs[n] for n in layer.states}
        binding = session.io_binding()
        for name, array in {**inputs, **held}.items():
            whole = np.ascontiguousarray(array)
            if name in held:
                binding.bind_input(name, "cpu", 0, whole.dtype.type, whole.shape, whole.ctypes.data)
            else:
                binding.bind_cpu_input(name, whole)
        binding.bind_output("out", "cpu")
        for tensor, name in zip(layer.op.outputs[1:], held, strict=True):
            binding.bind_output(tensor.name, "cpu", 0, np.float32, held[name].shape, held[name].ctypes.data)
        session.run_with_iobinding(binding)
        return [binding.copy_outputs_to_cpu()[0], *held.values()]

    return run


def fresh(layer: Layer, run: Run, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns output [nodes, width] and state of one run over these tokens of a new sequence."""
    slots = Slots(layer, run, 1)
    out = slots.step([list(tokens)], [len(tokens)], [len(tokens)])
    return out[0], slots.flushed()[0]


def steps_fault(layer: Layer, run: Run, num_tokens: int = 70) -> str | None:
    """Returns which size of steps gives other bits than one run; None where all give the same."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, num_tokens)
    out, state = fresh(layer, run, tokens)
    if not np.isfinite(out).all():
        return "a new sequence reads what the buffers hold"
    for size in (1, 2, 3, 4, 8, 16, 35, 0):
        slots, parts, done = Slots(layer, run, 1), [], 0
        while done < num_tokens:
            count = min(size or int(rng.integers(1, 9)), num_tokens - done)
            parts.append(slots.step([tokens[done : done + count]], [count], [count])[0])
            done += count
        if not np.array_equal(np.concatenate(parts), out):
            return f"steps of {size}: another output"
        if not np.array_equal(slots.flushed()[0], state):
            return f"steps of {size}: another state"
    return None


def rollback_fault(layer: Layer, run: Run) -> str | None:
    """Returns which number of accepted nodes is not as if only those had been run; None where all are."""
    rng = np.random.default_rng(1)
    for drafts in range(1, layer.pending + 1):
        for prompt in (0, 1, 6):
            batch = drafts + 1
            tokens = rng.integers(0, VOCAB, (batch, prompt + drafts + 3))
            slots, accepted = Slots(layer, run, batch), np.arange(batch)
            if prompt:
                slots.step(tokens[:, :prompt], [prompt] * batch, [prompt] * batch)
            scored = slots.step(tokens[:, prompt : prompt + drafts], [0] * batch, accepted)
            more = slots.step(tokens[:, -3:], [3] * batch, [3] * batch)
            states = slots.flushed()
            for slot in range(batch):
                where = f"{slot} of {drafts} nodes after {prompt}"
                alone, _ = fresh(layer, run, tokens[slot, : prompt + drafts])
                kept = [*tokens[slot, : prompt + slot], *tokens[slot, -3:]]
                out, state = fresh(layer, run, kept)
                if not np.array_equal(scored[slot], alone[prompt:]):
                    return f"{where}: another output of the nodes"
                if not np.array_equal(more[slot], out[-3:]):
                    return f"{where}: another output after them"
                if not np.array_equal(states[slot], state):
                    return f"{where}: another state"
    return None


@dataclass
class _Turn:
    """What a slot does in a round: its nodes, the sure ones and the accepted ones."""

    nodes: list[int]
    sure: int
    accepted: int


def _turn(rng: np.random.Generator, pending: int) -> _Turn:
    kind = rng.integers(5)
    if kind == 0:  # sits out
        return _Turn([], 0, 0)
    count = int(rng.integers(1, pending + 1))
    nodes = rng.integers(0, VOCAB, count * (1 + 2 * (kind == 1))).tolist()
    if kind == 1:  # a chunk of a prompt
        return _Turn(nodes, len(nodes), len(nodes))
    if kind == 2:  # a plain step
        return _Turn(nodes[:1], 1, 1)
    return _Turn(nodes, 0, int(rng.integers(0, count + 1)))  # drafts


def rounds_fault(layer: Layer, run: Run, num_rounds: int = 40, batch: int = 4) -> str | None:
    """Returns which slot of mixed rounds differs from a run of its tokens alone; None where none does.

    Prompts, plain steps, drafts and slots that sit out share steps; every third round one slot gets a new sequence.
    """
    rng = np.random.default_rng(2)
    slots, kept = Slots(layer, run, batch), [[] for _ in range(batch)]
    for number in range(num_rounds):
        if number % 3 == 2:
            slot = int(rng.integers(batch))
            kept[slot], slots.lengths[slot], slots.state_lengths[slot] = [], 0, 0
        turns = [_turn(rng, layer.pending) for _ in range(batch)]
        nodes = max(1, *(len(turn.nodes) for turn in turns)) + int(rng.integers(2))
        tokens = np.full((batch, nodes), PADDING)
        for slot, turn in enumerate(turns):
            tokens[slot, : len(turn.nodes)] = turn.nodes
        out = slots.step(tokens, [turn.sure for turn in turns], [turn.accepted for turn in turns])
        for slot, turn in enumerate(turns):
            if turn.nodes:
                wanted, _ = fresh(layer, run, kept[slot] + turn.nodes)
                if not np.array_equal(out[slot, : len(turn.nodes)], wanted[-len(turn.nodes) :]):
                    return f"round {number}, slot {slot}: another output"
            kept[slot] += turn.nodes[: turn.accepted]
    states = slots.flushed()
    for slot in range(batch):
        if kept[slot] and not np.array_equal(states[slot], fresh(layer, run, kept[slot])[1]):
            return f"slot {slot}: another state at the end"
    return None


def random_parents(rng: np.random.Generator, nodes: int, padded: int, sure: int = 0) -> list[int]:
    """Returns parents of a tree of so many nodes, padded; the first `sure` are a chain."""
    linked = [node - 1 if node < sure or rng.random() < 0.4 else int(rng.integers(0, node)) for node in range(1, nodes)]
    return [-1, *linked, *([-1] * (padded - nodes))]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Returns the nodes from the root to a node."""
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


def trees_fault(layer: Layer, run: Run, num_rounds: int = 15, batch: int = 3) -> str | None:
    """Returns which node of mixed rounds of trees differs from a run of its path alone; None where none does.

    Trees of which some path is accepted, chunks of prompts, plain steps and slots that sit out share steps; every third
    round one slot gets a new sequence.
    """
    rng = np.random.default_rng(5)
    slots, kept = Slots(layer, run, batch), [[] for _ in range(batch)]
    for number in range(num_rounds):
        if number % 3 == 2:
            slot = int(rng.integers(batch))
            kept[slot], slots.lengths[slot], slots.state_lengths[slot] = [], 0, 0
        turns = [_turn(rng, layer.pending) for _ in range(batch)]
        nodes = max(1, *(len(turn.nodes) for turn in turns)) + int(rng.integers(2))
        tokens, trees, paths = np.full((batch, nodes), PADDING), [], []
        for slot, turn in enumerate(turns):
            count = len(turn.nodes)
            tokens[slot, :count] = turn.nodes
            trees.append(random_parents(rng, max(count, 1), nodes, turn.sure))
            paths.append([] if turn.sure or not count else path_to(trees[slot], int(rng.integers(-1, count))))
        sure = [turn.sure for turn in turns]
        num_accepted = [turn.sure or len(path) for turn, path in zip(turns, paths, strict=True)]
        out = slots.step(tokens, sure, num_accepted, trees)
        slots.keep_paths(paths)
        for slot, turn in enumerate(turns):
            for leaf in set(range(len(turn.nodes))).difference(trees[slot][: len(turn.nodes)]):
                path = path_to(trees[slot], leaf)
                wanted, _ = fresh(layer, run, kept[slot] + [turn.nodes[at] for at in path])
                if not np.array_equal(out[slot, path], wanted[-len(path) :]):
                    return f"round {number}, slot {slot}: another output of the path {path}"
            kept[slot] += turn.nodes[: turn.sure] + [turn.nodes[at] for at in paths[slot]]
    states = slots.flushed()
    for slot in range(batch):
        if kept[slot] and not np.array_equal(states[slot], fresh(layer, run, kept[slot])[1]):
            return f"slot {slot}: another state at the end"
    return None


def fault_of(layer: Layer, run: Run) -> str | None:
    """Returns the first thing that is not equal in bits; None where all is."""
    return steps_fault(layer, run) or rollback_fault(layer, run) or rounds_fault(layer, run) or trees_fault(layer, run)


def random_step(
    layer: Layer, rng: np.random.Generator, batch: int, nodes: int, num_void: int = 2, is_tree: bool = False
) -> Arrays:
    """Returns inputs of a step of slots at different lengths, one of them new; `sure_nodes` are of all sizes."""
    slots = Slots(layer, layer.twin, batch)
    slots.buffers = {n: rng.standard_normal(a.shape).astype(np.float32) for n, a in slots.buffers.items()}
    owed = rng.integers(0, layer.pending - num_void + 1, batch)
    slots.state_lengths = rng.integers(1, 50, batch)
    slots.lengths = slots.state_lengths + owed
    slots.lengths[0] = slots.state_lengths[0] = 0
    if "pending" in slots.buffers:
        tokens = rng.integers(0, VOCAB, (batch, layer.pending))
        slots.buffers["pending"] = np.concatenate([layer.table[n][tokens] for n in ("k", "v", "g", "beta")], axis=2)
    tokens, sure = rng.integers(0, VOCAB, (batch, nodes)), rng.integers(0, nodes + 1, batch)
    if not is_tree:
        return slots.inputs(tokens, sure)
    num_nodes = [max(1, nodes - slot % 2) for slot in range(batch)]
    sure = np.minimum(sure, num_nodes)
    trees = [random_parents(rng, num, nodes, int(first)) for num, first in zip(num_nodes, sure, strict=True)]
    return slots.inputs(tokens, sure, trees)
