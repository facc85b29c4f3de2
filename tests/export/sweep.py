# SPDX-License-Identifier: Apache-2.0
"""Which causal `model_type`s of the installed transformers export: equal to transformers' logits, or refused.

    python -m tests.export.sweep                    # all; writes sweep.json and docs/reference/families.md
    python -m tests.export.sweep phimoe qwen2_moe   # these alone, verdicts on the terminal; writes nothing

A verdict is kept in build/sweep under a digest of what can change it, so that a sweep may be interrupted.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speccompile.errors import CheckpointError, ExportError
from speccompile.ops.registry import attach_functions
from speccompile.passes.base import run_pipeline
from speccompile.passes.cleanup import remove_dead, share_common_subexpressions
from speccompile.passes.flat_linears import flat_linears
from speccompile.passes.lower_attention import lower_attention
from speccompile.passes.merge_heads import merge_heads
from speccompile.passes.merge_linears import merge_linears
from speccompile.passes.mix_rows import mix_rows
from tests.export.harness import (
    Decoder,
    chain_parents,
    logits_after,
    logits_of,
    lowered,
    make_checkpoint,
    paths_of,
    with_fused_attention,
)
from tests.export.sweep_configs import VOCAB, config_of

MAX_SEQ_LEN = 24
# Of the largest logit. Sums in another order differ by up to 2e-5, an ignored window by more than 1e-2.
MAX_RELATIVE_DIFFERENCE = 1e-4
_LARGEST_WEIGHT = 2**18


@dataclass(frozen=True)
class Verdict:
    """The verdict on a `model_type`.

    Args:
        kind: "equal", "refused", "wrong", "fault" (an exception that is no refusal) or "no model" (transformers
            itself makes or runs none from our config).
        decided: what a refusal needed: "name", "config" or "model"; "" for other kinds.
        reason: why it is not equal.
    """

    kind: str
    decided: str = ""
    reason: str = ""


def judge(model_type: str) -> Verdict:
    """Export a tiny model of `model_type` and compare it with transformers, or give the reason why not."""
    refused = refusal_of_config(model_type)
    if refused is not None:
        return refused
    from speccompile.export.decoder import export_decoder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            config = config_of(model_type)
            check_size(config)
            model = make_checkpoint(config, folder)
            assert np.isfinite(logits_of(model, [3, 4, 5])).all(), "logits that are not finite"
        except Exception as fault:  # noqa: BLE001
            return Verdict("no model", "", _first_line(fault))
        try:
            graph, dims = export_decoder(folder, max_seq_len=MAX_SEQ_LEN)
            difference = largest_difference(Decoder(lowered(graph), dims, batch=2, max_seq=MAX_SEQ_LEN), model)
            fault = bits_fault(graph, dims) if dims.recurrent_layers else None
        except (ExportError, CheckpointError) as refusal:
            return Verdict("refused", "model", refusal.got.replace(name, "."))
        except Exception as fault:  # noqa: BLE001
            return Verdict("fault", "", _first_line(fault))
    if not difference <= MAX_RELATIVE_DIFFERENCE:  # NaN counts as a difference
        return Verdict("wrong", "", f"logits differ by {difference:.1e} of the largest")
    return Verdict("equal") if fault is None else Verdict("wrong", "", fault)


def refusal_of_config(model_type: str) -> Verdict | None:
    """The refusal of a type by its name or by its config alone; None where a model is needed to decide."""
    from speccompile.checkpoints.config_values import check_architecture, check_config

    try:
        check_architecture({"model_type": model_type})
    except ExportError as refusal:
        return Verdict("refused", "name", refusal.got)
    try:
        check_config(config_of(model_type), MAX_SEQ_LEN)
    except ExportError as refusal:
        return Verdict("refused", "config", refusal.got)
    except Exception as fault:  # noqa: BLE001
        return Verdict("no model", "", _first_line(fault))
    return None


def _first_line(fault: Exception) -> str:
    return f"{type(fault).__name__}: {(str(fault).strip().splitlines() or ['no message'])[0]}"


def check_size(config: dict[str, Any]) -> None:
    """Fail where a size was left as large as the class has it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    shape = max((p.shape for p in model.parameters()), key=lambda s: s.numel())
    assert shape.numel() < _LARGEST_WEIGHT, f"a weight of shape {list(shape)}: sweep_configs leaves a size large"


def largest_difference(decoder: Decoder, model: Any) -> float:
    """The largest difference of a node's logits from transformers', over the largest logit.

    A ragged prefill longer than every window, single steps, a tree for each sequence, and other tokens over the
    tree's rows after a rollback; with recurrent layers a chain for each sequence, partly accepted.
    """
    rng = np.random.default_rng(0)

    def step(parents: list[list[int]], kept: tuple[int, int] = (0, 0), sure: tuple[int, int] = (0, 0)) -> float:
        nodes = np.array(parents)
        tokens = rng.integers(3, VOCAB, nodes.shape)
        scored = np.tile(np.arange(nodes.shape[1])[::-1], (2, 1)).copy()
        logits = decoder.step(tokens, nodes, scored, sure)["logits"]
        paths = [paths_of(decoder.history[slot], tokens[slot], nodes[slot]) for slot in range(2)]
        each = [(slot, i) for slot in range(2) for i, n in enumerate(scored[slot]) if n == 0 or nodes[slot, n] >= 0]
        expected = logits_after(model, [paths[slot][scored[slot, index]] for slot, index in each])  # of no padding
        slots, nodes_of = np.array(each).T
        differences = np.abs(logits[slots, nodes_of] - expected).max(axis=-1) / np.abs(expected).max(axis=-1)
        for slot in range(2):
            decoder.history[slot] += tokens[slot, : kept[slot]].tolist()
        return float(np.nan_to_num(differences, nan=np.inf).max())

    worst = [step([chain_parents(11, 11), chain_parents(4, 11)], (11, 4), (11, 4))]
    worst += [step([[-1], [-1]], (1, 1), (1, 1)) for _ in range(3)]
    if decoder.states:
        worst += [step([chain_parents(7, 7), chain_parents(5, 7)], (4, 2))]
        return max(*worst, step([chain_parents(4, 4), chain_parents(3, 4)]))
    worst += [step([[-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1, 1, 0, 4, -1]])]
    decoder.history = [decoder.history[0][:-3], decoder.history[1][:-1]]
    return max(*worst, step([[-1, 0, 1, 2], [-1, 0, 1, 1]]))


def chain_difference(graph: Any, dims: Any, batch: int, sizes: Sequence[int] = (2, 4, 9)) -> float:
    """The largest difference between the logits of chains and of single steps on ONNX Runtime, over the largest."""
    work = graph.clone()
    run_pipeline(
        work,
        (lower_attention, mix_rows, flat_linears, merge_linears, merge_heads, share_common_subexpressions, remove_dead),
    )
    attach_functions(work)
    made = Decoder(work, dims, batch=batch, max_seq=MAX_SEQ_LEN)
    texts = np.random.default_rng(1).integers(3, VOCAB, (batch, 9))

    def read(size: int) -> np.ndarray:
        decoder, rows = made.fresh(), []
        for at in range(0, 9, size):
            part = texts[:, at : at + size]
            count = part.shape[1]
            nodes, scored = np.array([chain_parents(count, count)] * batch), np.tile(np.arange(count), (batch, 1))
            rows.append(decoder.step(part, nodes, scored, (count,) * batch)["logits"])
            decoder.history = [[*held, *new.tolist()] for held, new in zip(decoder.history, part, strict=True)]
        return np.concatenate(rows, 1)

    single = read(1)
    return max(float(np.abs(read(size) - single).max() / np.abs(single).max()) for size in sizes)


def bits_fault(graph: Any, dims: Any) -> str | None:
    """What of a model with recurrent layers has other bits than it must; None where nothing has.

    A text of chains of any size has the bits of single steps, a step after accepted drafts those after a fresh
    prefill, with the kernels of attention and states, of which a bundle's graph is made.
    """
    rng = np.random.default_rng(1)
    made = Decoder(with_fused_attention(graph), dims, batch=2, max_seq=MAX_SEQ_LEN, has_kernels=True).fresh
    texts, drafts, after = (rng.integers(3, VOCAB, (2, count)) for count in (9, 5, 3))

    def run(decoder: Decoder, rows: np.ndarray, sure: Sequence[int], kept: Sequence[int]) -> np.ndarray:
        count = rows.shape[1]
        nodes = np.array([chain_parents(count, count)] * 2)
        scored = np.tile(np.arange(count), (2, 1))
        logits = decoder.step(rows, nodes, scored, sure)["logits"]
        for slot in range(2):
            decoder.history[slot] += rows[slot, : kept[slot]].tolist()
        return logits

    single = made()
    rows = [run(single, texts[:, i : i + 1], (1, 1), (1, 1)) for i in range(9)]
    for size in (2, 4, 9):
        decoder = made()
        parts = [texts[:, i : i + size] for i in range(0, 9, size)]
        chains = [run(decoder, p, (0, 0) if size < 9 else (9, 9), (p.shape[1],) * 2) for p in parts]
        if not np.array_equal(np.concatenate(chains, 1), np.concatenate(rows, 1)):
            return f"chains of {size} nodes have other bits than single steps"
    for first in range(1, 6):
        accepted, decoder = (first, 6 - first), made()
        run(decoder, texts, (9, 9), (9, 9))
        run(decoder, drafts, (0, 0), accepted)
        got = run(decoder, after, (0, 0), (0, 0))
        for slot, count in enumerate(accepted):
            fresh, prompt = made(), np.concatenate([texts, drafts[:, :count]], 1)
            run(fresh, prompt, (9 + count,) * 2, (9 + count,) * 2)
            if not np.array_equal(got[slot], run(fresh, after, (0, 0), (0, 0))[slot]):
                return f"after {count} accepted drafts the bits are not those of a fresh prefill"
    return None


def answer_names() -> None:
    """Judge the types named on stdin, a JSON line for each; torch and transformers may print to stderr alone."""
    import os

    import torch
    from transformers import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(asdict(judge(line.strip()))), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--answer"]:
        answer_names()
    else:
        from tests.export.sweep_all import main

        main(sys.argv[1:])
