# SPDX-License-Identifier: Apache-2.0
"""One row a method: how a tiny speculator for the tiny target is written, and its recipe's fields for chain and tree.

What every method must do is tested over these rows: greedy text on every backend (tests/e2e/test_methods.py) and plans
(tests/backends/tensorrt/test_methods.py). A method without a tree has a chain alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from speccompile.core import registry
from speccompile.core.jobs import DecoderOptions, GraphJob, SourceContext
from speccompile.core.registry import Method
from tests.speculators.heads_lab import write_medusa, write_prophet

MAX_SEQ, MAX_NODES = 60, 10
MAX_ROWS = MAX_SEQ + MAX_NODES + 1


def write_learnt_eagle(folder: Path, target: Path) -> None:
    """EAGLE-1 or 2."""
    from tests.speculators import eagle_lab

    eagle_lab.write_learnt_eagle(folder, target)


def write_learnt_eagle3(folder: Path, target: Path) -> None:
    """EAGLE-3."""
    from tests.speculators import eagle_lab

    eagle_lab.write_learnt_eagle3(folder, target)


@dataclass(frozen=True)
class Row:
    """A method.

    Args:
        write: (folder, target's folder): writes the speculator's checkpoint; None: it has none.
        chain: fields of its `Config` besides `model`.
        tree: the same for a tree; None: it drafts chains alone.
        method: its name in recipes, where that is not the row's.
    """

    write: Callable[[Path, Path], Any] | None
    chain: dict[str, Any] = field(default_factory=dict)
    tree: dict[str, Any] | None = None
    method: str = ""


def write_draft(folder: Path, target: Path) -> None:
    """Writes a draft model: the target itself with noise on its weights."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += 0.12 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())


def successors(target: Path) -> np.ndarray:
    """Returns [vocab, vocab]: how often a token follows another in the target's greedy texts."""
    import torch
    from transformers import LlamaForCausalLM

    from tests.speculators.eagle_lab import PROMPTS, VOCAB

    model, counts = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), np.zeros((VOCAB, VOCAB))
    for prompt in PROMPTS:
        text = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
        np.add.at(counts, (text[1:], text[:-1]), 1)
    return counts / (1 + counts.sum(axis=0))


def write_mlp(folder: Path, target: Path, num_heads: int = 3) -> None:
    """Writes an MLP speculator that is a table of successor tokens; the target's state has no influence."""
    from safetensors.numpy import save_file

    from tests.speculators.eagle_lab import HIDDEN, VOCAB

    table = successors(target)
    folder.mkdir()
    sizes = {"emb_dim": HIDDEN, "inner_dim": VOCAB, "vocab_size": VOCAB, "n_predict": num_heads}
    (folder / "config.json").write_text(json.dumps({"model_type": "mlp_speculator", **sizes}))
    tensors = {}
    for i in range(num_heads):
        tensors[f"emb.{i}.weight"] = np.eye(VOCAB)
        tensors[f"proj.{i}.weight"] = 1e-3 * np.ones((VOCAB, HIDDEN if i == 0 else VOCAB))
        tensors[f"head.{i}.weight"] = table
        tensors[f"ln.{i}.weight"], tensors[f"ln.{i}.bias"] = np.ones(VOCAB), np.zeros(VOCAB)
    save_file({f"speculator.{n}": t.astype(np.float32) for n, t in tensors.items()}, folder / "model.safetensors")


def write_glide(folder: Path, target: Path) -> None:
    """Writes a GLIDE drafter; see `tests.speculators.borrower_files`."""
    from tests.speculators import borrower_files

    borrower_files.write_glide(folder, target)


def write_exit(folder: Path, target: Path) -> None:
    """Writes an early-exit head; see `tests.speculators.borrower_files`."""
    from tests.speculators import borrower_files

    borrower_files.write_exit(folder, target)


def write_learnt_mtp(folder: Path, target: Path) -> None:
    """Writes a multi-token prediction module."""
    from tests.speculators import mtp_lab

    mtp_lab.write_learnt(folder, target)


def write_learnt_dflash(folder: Path, target: Path) -> None:
    """Writes a DFlash 2 drafter."""
    from tests.speculators import dflash_lab

    dflash_lab.write_learnt(folder, target)


def write_learnt_lilicorr(folder: Path, target: Path) -> None:
    """Writes a LiLiCorr drafter."""
    from tests.speculators import dflash_lab

    dflash_lab.write_learnt_corrected(folder, target)


def write_learnt_domino(folder: Path, target: Path) -> None:
    """Writes a Domino drafter."""
    from tests.speculators import dflash_lab

    dflash_lab.write_learnt_path(folder, target)


def write_pard(folder: Path, target: Path) -> None:
    """Writes a draft model that reads masks."""
    from tests.speculators import mask_lab

    mask_lab.write_pard(folder, target)


def write_peagle(folder: Path, target: Path) -> None:
    """Writes an EAGLE-3 drafter that reads masks."""
    from tests.speculators import peagle_lab

    peagle_lab.write_learnt(folder, target)


def write_pair(folder: Path, target: Path) -> None:
    """Writes a draft model and EAGLE's layer."""
    folder.mkdir()
    write_draft(folder / "draft", target)
    write_learnt_eagle(folder / "eagle", target)


AUTO, FIXED = {"tree": "auto"}, {"tree": {"widths": [2, 2, 1]}}
SUFFIX = {"method": "suffix", "depth": 4}
CHAIN = {"method": "draft_model", "model": "draft", "num_draft_tokens": 3}
TREE = {"method": "eagle", "model": "eagle", "tree": "auto"}
ROWS: dict[str, Row] = {
    "draft_model": Row(write_draft, {"num_draft_tokens": 3}, FIXED),
    "pard": Row(write_pard, {"num_draft_tokens": 4}, {**AUTO, "tree_depth": 4}, "draft_model"),
    "eagle": Row(write_learnt_eagle, {"tree": "chain", "num_draft_tokens": 3}, AUTO),
    "eagle3": Row(write_learnt_eagle3, {"tree": "chain", "num_draft_tokens": 3}, AUTO),
    "peagle": Row(write_peagle, {"tree": "chain", "num_draft_tokens": 4}, {**AUTO, "tree_depth": 4}, "eagle3"),
    "dflash": Row(write_learnt_dflash, {"tree": "chain", "num_draft_tokens": 4}, {**AUTO, "tree_depth": 4}),
    "lilicorr": Row(
        write_learnt_lilicorr, {"tree": "chain", "num_draft_tokens": 4}, {**AUTO, "tree_depth": 4}, "dflash"
    ),
    "domino": Row(write_learnt_domino, {"tree": "chain", "num_draft_tokens": 4}, {**AUTO, "tree_depth": 4}, "dflash"),
    "mtp": Row(write_learnt_mtp, {"num_draft_tokens": 3}, FIXED),
    "ngram": Row(None, {"min_match": 1, "max_match": 2}),
    "suffix": Row(None, {"depth": 4}, {"tree": "auto", "depth": 4}),
    "hybrid": Row(write_pair, {"drafters": (SUFFIX, CHAIN)}, {"drafters": ({**SUFFIX, "tree": "auto"}, TREE)}),
    "mlp": Row(write_mlp, {"num_draft_tokens": 3}, FIXED),
    "medusa": Row(write_medusa, {"tree": "chain"}, AUTO),
    "prophet": Row(write_prophet, {"num_draft_tokens": 3}, {**AUTO, "tree_width": 2, "tree_depth": 3}),
    "glide": Row(write_glide, {"num_draft_tokens": 3}, FIXED),
    "early_exit": Row(write_exit, {"num_draft_tokens": 3}, {"tree": "auto", "tree_width": 2, "tree_depth": 3}),
    "self_draft": Row(None, {"num_draft_tokens": 3}, {"tree": "auto", "tree_width": 2, "tree_depth": 3}),
}


def method_of(name: str) -> Method:
    """Returns the method of a row."""
    return registry.method(ROWS[name].method or name)


def quantization_of(source: Any, backend: Any) -> str:
    """Returns the form that a source's job asks for by name, where a backend has it; else none."""
    return "int4" if source.job.quantization == "int4" and "int4" in backend.quantizations else "none"


def forms() -> list[tuple[str, str]]:
    """Returns (method, chain or tree) of all rows."""
    return [(name, form) for name, row in ROWS.items() for form in ("chain", "tree") if form == "chain" or row.tree]


def config_of(method: str, form: str, model: Path) -> Any:
    """Returns the method's `Config` for a form; raises where a tree of the row does not fit MAX_NODES."""
    row = ROWS[method]
    fields = row.chain if form == "chain" else row.tree
    assert fields is not None
    config = method_of(method).Config
    if "drafters" in fields:  # their models are inside the folder
        parts = [
            {**part, "model": str(model / part["model"])} if "model" in part else part for part in fields["drafters"]
        ]
        return config(parts)
    return config(**({"model": str(model)} if row.write else {}), **fields)


def sources(method: str, form: str, target: Path, model: Path, keep_logits: bool = False) -> Iterator[Any]:
    """Yields the sources of the target's graph, which is the same for all, and of the method's own graphs."""
    from speccompile.export.decoder_source import DecoderSource
    from tests.speculators.eagle_lab import STREAMS

    config, chosen = config_of(method, form, model), method_of(method)
    # One target that gives all that any method wants: it is exported once.
    options = DecoderOptions(hidden=True, hidden_layers=STREAMS, keep_logits=keep_logits)
    job = GraphJob("target", str(target), options=options)
    first = DecoderSource(job, SourceContext("checkpoint", MAX_SEQ, MAX_NODES))
    yield first
    for wanted in chosen.graph_jobs(config):
        context = SourceContext("checkpoint", MAX_SEQ, MAX_NODES, first.dims, job)
        source = registry.find_class(wanted.source)(wanted, context)
        if source.is_needed:
            yield source
