# SPDX-License-Identifier: Apache-2.0
"""Runs a neutral decoder graph under the reference evaluator, and transformers beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from speccompile.backends.onnxruntime.kernel_library import register_kernels
from speccompile.core import specs
from speccompile.graph_kinds.decoder import decoder_spec
from speccompile.ops.registry import attach_functions, reference_ops
from speccompile.passes.base import run_pipeline
from speccompile.passes.cleanup import remove_dead, share_common_subexpressions
from speccompile.passes.edit import OPS_DOMAIN
from speccompile.passes.fuse_latent_attention import fuse_latent_attention
from speccompile.passes.fuse_qkv_attention import fuse_qkv_attention
from speccompile.passes.lower_attention import lower_attention
from speccompile.passes.merge_heads import merge_heads
from speccompile.passes.merge_linears import merge_linears
from tests.lab.weights import randomize


def chain_parents(count: int, padded: int) -> list[int]:
    """Parents of a chain of `count` nodes, padded."""
    return [i - 1 if i < count else -1 for i in range(padded)]


def mask_from_parents(parents: np.ndarray) -> np.ndarray:
    """[batch, nodes] -> [batch, nodes, nodes] bool: each node and its ancestors."""
    batch, nodes = parents.shape
    mask = np.zeros((batch, nodes, nodes), bool)
    for b in range(batch):
        for n in range(nodes):
            node = n
            while node >= 0:
                mask[b, n, node], node = True, int(parents[b, node])
    return mask


@dataclass
class Decoder:
    """A graph with its caches, and the tokens that each cache row stands for.

    A neutral graph runs under the reference evaluator; a lowered one, or one with the bodies of its ops, under ONNX
    Runtime, with our kernels where `has_kernels`. Recurrent states hold the first `applied` tokens of each history;
    the rows of the last step after them are pending, `max_pending` at most.
    """

    model: ir.Model
    dims: specs.ModelDims
    batch: int
    max_seq: int = 24
    history: list[list[int]] = field(default_factory=list)
    has_kernels: bool = False
    max_pending: int = 8

    def __post_init__(self) -> None:
        proto = ir.to_proto(self.model)
        if any(node.domain == OPS_DOMAIN for node in self.model.graph) and not self.model.functions:
            self.session = ReferenceEvaluator(proto, new_ops=reference_ops())
        else:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.log_severity_level = 3  # the caches are copied here, which it warns about
            if self.has_kernels:
                register_kernels(options)
            text = proto.SerializeToString()
            self.session = ort.InferenceSession(text, options, providers=["CPUExecutionProvider"])
        self._begin()

    def fresh(self) -> Decoder:
        """Returns one of the same graph before its first step, without loading it again."""
        other = copy(self)
        other._begin()
        return other

    def _begin(self) -> None:
        spec = decoder_spec("decoder", self.dims, max_pending=self.max_pending)
        sizes = {"batch": self.batch, "max_seq": self.max_seq}
        shapes = {n: [sizes.get(str(d), d) for d in spec.input(n).dims] for n in spec.caches}
        # Stale rows must have no effect, so they are not zero.
        noise = np.random.default_rng(7)
        self.caches = {n: noise.standard_normal(shape, np.float32) * 5 for n, shape in shapes.items()}
        shapes = spec.state_shapes(self.batch)
        self.states = {n: noise.standard_normal(shape, np.float32) * 5 for n, shape in shapes.items()}
        self.history = [[] for _ in range(self.batch)]
        self.applied = [0] * self.batch

    def step(
        self, tokens: np.ndarray, parents: np.ndarray, scored: np.ndarray, sure: Sequence[int] | None = None
    ) -> dict[str, np.ndarray]:
        """One forward pass; afterwards the caches hold `history` and then all nodes.

        `sure` are the first nodes of each slot that recurrent states apply at once; none by default.
        """
        sure = [0] * self.batch if sure is None else sure
        feeds = {
            specs.TOKENS: tokens,
            specs.LENGTHS: np.array([len(h) for h in self.history], np.int64),
            specs.TREE_MASK: mask_from_parents(parents),
            specs.SCORED_NODES: scored,
            **self.states,
            **self.caches,
        }
        if self.states:
            feeds[specs.STATE_LENGTHS] = np.array(self.applied, np.int64)
            feeds[specs.SURE_NODES] = np.array(sure, np.int64)
            self.applied = [len(h) + s for h, s in zip(self.history, sure, strict=True)]
        names = [v.name for v in self.model.graph.outputs]
        outputs = dict(zip(names, self.session.run(None, feeds), strict=True))
        for held in (self.caches, self.states):
            held.update({n: outputs[specs.updated_cache_name(n)] for n in held})
        return outputs


def lowered(graph: ir.Model) -> ir.Model:
    """The graph as ONNX Runtime gets it, without a tail."""
    work = graph.clone()
    run_pipeline(work, (lower_attention, merge_linears, merge_heads, share_common_subexpressions, remove_dead))
    attach_functions(work)
    return work


def with_fused_attention(graph: ir.Model) -> ir.Model:
    """The graph with the attention ops of our CPU kernels and their bodies, without a tail."""
    work = graph.clone()
    run_pipeline(
        work, (merge_linears, fuse_latent_attention, fuse_qkv_attention, share_common_subexpressions, remove_dead)
    )
    attach_functions(work)
    return work


def paths_of(history: Sequence[int], tokens: np.ndarray, parents: np.ndarray) -> list[list[int]]:
    """For each node of one slot: the whole sequence from the first token to that node."""
    paths = []
    for n in range(len(tokens)):
        path, node = [], n
        while node >= 0:
            path.append(int(tokens[node]))
            node = int(parents[node])
        paths.append([*history, *reversed(path)])
    return paths


def make_checkpoint(config: Mapping[str, Any], folder: Path, seed: int = 0) -> Any:
    """Save a random model as a checkpoint; returns it with transformers' eager attention.

    Weights are large enough (0.3) for logits of order 1, norms' weights and biases are not trivial.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32
    )
    randomize(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # of Gemma 4
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model.eval()


def logits_of(model: Any, sequence: Sequence[int]) -> np.ndarray:
    """[vocab] float32: transformers' plain forward at the last position of `sequence`."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(sequence)]), use_cache=False).logits[0, -1].numpy()


def logits_after(model: Any, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """[sequences, vocab] float32: `logits_of` each, in one forward; a causal model sees no padding on the right."""
    import torch

    width = max(map(len, sequences))
    tokens = torch.tensor([[*sequence, *([0] * (width - len(sequence)))] for sequence in sequences])
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    return logits[torch.arange(len(sequences)), torch.tensor([len(s) - 1 for s in sequences])].numpy()
