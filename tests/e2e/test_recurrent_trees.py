# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3.5 drafted for in trees: the text is the target's own, and drafts follow the accepted path."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speccompile.core import registry
from speccompile.core.jobs import DecoderOptions, GraphJob, MethodContext, SourceContext
from speccompile.core.protocols import Engine
from speccompile.core.sampling import SamplingParams
from speccompile.runtime.spec_engine import SpecEngine
from tests.greedy_check import differing

torch = pytest.importorskip("torch")

MAX_SEQ, MAX_NODES, SLOTS = 60, 10, 4
TREES = {"auto": {"tree": "auto"}, "fixed": {"tree": {"widths": [2, 2, 1]}}}
KINDS = ["linear_attention"] * 3 + ["full_attention"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.speculators import eagle_lab, mtp_lab

    folder = tmp_path_factory.mktemp("recurrent")
    with torch.random.fork_rng():
        torch.manual_seed(0)  # transformers draws the decay of its recurrent layers from torch's own generator
        mtp_lab.write_target(folder / "target", "qwen3_5_text", num_hidden_layers=4, layer_types=KINDS)
    eagle_lab.write_learnt_eagle3(folder / "eagle3", folder / "target")
    mtp_lab.write_alone(folder / "mtp", *mtp_lab.random_module(folder / "target"))
    return folder


@pytest.fixture(scope="module")
def engines(checkpoints: Path) -> dict[str, Engine]:
    """The target, and the graphs of EAGLE-3 and of a multi-token prediction module for trees."""
    from speccompile.export.decoder_source import DecoderSource
    from tests.speculators import eagle_lab as lab

    options = DecoderOptions(hidden=True, hidden_layers=lab.STREAMS)
    target = GraphJob("target", str(checkpoints / "target"), options=options)
    source = DecoderSource(target, SourceContext("checkpoint", MAX_SEQ, MAX_NODES))
    assert source.spec().state_trees
    sizes = {"slots": SLOTS, "rows": MAX_SEQ + MAX_NODES + 1}
    made = {"target": lab.compiled(source, checkpoints, **sizes)[0]}
    context = SourceContext("checkpoint", MAX_SEQ, MAX_NODES, source.dims, target)
    for name in ("eagle3", "mtp"):
        method = registry.method(name)
        for job in method.graph_jobs(method.Config(str(checkpoints / name), tree={"widths": [8]})):
            draft = registry.find_class(job.source)(job, context)
            made[f"{name}.{job.name}"] = lab.compiled(draft, checkpoints / name, **sizes)[0]
    return made


def load(engines: dict[str, Engine], method: str, **fields: Any) -> SpecEngine:
    """Returns an engine that drafts in trees."""
    chosen, context = registry.method(method), MethodContext(SLOTS, MAX_SEQ, MAX_NODES)
    drafts = {name.partition(".")[2]: engine for name, engine in engines.items() if name.startswith(f"{method}.")}
    config = chosen.Config(*([""] if drafts else []), **fields)
    return SpecEngine(engines["target"], drafts, chosen.make_proposer(config, drafts, context), None, context)


def decode(engine: SpecEngine, batch_size: int, params: Any) -> tuple[list[list[int]], int, int]:
    """Returns the texts, the accepted drafts, and in how many steps accepted paths were moved."""
    from tests.speculators.eagle_lab import PROMPTS

    states = engine.verifier.engine.states
    compact, moved = states.compact, []
    states.compact = lambda lengths, path: (moved.append(np.array(path)), compact(lengths, path))
    results = engine.generate(PROMPTS, params, batch_size=batch_size)
    del states.compact
    return [r.tokens for r in results], sum(r.stats["num_accepted"] for r in results), len(moved)


@pytest.fixture(scope="module")
def plain(engines: dict[str, Engine], checkpoints: Path) -> list[list[int]]:
    """The target's own greedy texts, which are transformers'."""
    from transformers import AutoModelForCausalLM

    from tests.speculators.eagle_lab import PROMPTS

    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    results = load(engines, "suffix").generate(PROMPTS, params, batch_size=1, speculative=False)
    texts = [r.tokens for r in results]
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "target", dtype=torch.float32).eval()
    assert differing(model, PROMPTS, texts) == []
    return texts


# What suffixes draft is mostly one path, which is right from its first node on.
METHODS = [
    ("eagle3", TREES["auto"], 3),
    ("eagle3", TREES["fixed"], 3),
    ("mtp", TREES["fixed"], 1),
    ("suffix", {"tree": "auto", "depth": 4}, 0),
]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(("method", "fields", "least_moved"), METHODS)
def test_greedy_text_equals_plain_decoding(engines, plain, method, fields, least_moved, batch_size):
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    texts, num_accepted, num_moved = decode(load(engines, method, **fields), batch_size, params)
    assert texts == plain
    assert num_accepted >= 10 and num_moved >= least_moved


def test_a_modules_tree_has_the_best_tokens_after_every_path(engines, checkpoints):
    """As transformers' own module gives them, prompts and texts after accepted and refused drafts alike."""
    from speccompile.speculators.mtp.model import MtpModule
    from tests.speculators import mtp_lab
    from tests.speculators.eagle_lab import PROMPTS

    config, module = mtp_lab.random_module(checkpoints / "target")
    assert isinstance(module, MtpModule) and config
    oracle, engine = mtp_lab.Oracle(checkpoints / "target", module), load(engines, "mtp", **TREES["fixed"])
    found, propose = {}, engine.proposer.propose

    def proposing(batch: Any) -> Any:
        tree = propose(batch)
        for row, sequence in enumerate(batch.sequences):
            if tree.num_nodes[row] == 11:
                found[tuple(sequence.tokens)] = tree.tokens[row].tolist(), tree.parents[row].tolist()
        return tree

    engine.proposer.propose = proposing
    engine.generate(PROMPTS[:4], SamplingParams(max_new_tokens=8, ignore_eos=True), batch_size=3)
    assert len(found) > 12
    for text, (tokens, parents) in list(found.items())[::3]:
        for node in sorted(set(parents[1:])):
            path, at = [], node
            while at > 0:
                path, at = [tokens[at], *path], parents[at]
            children = [tokens[child] for child, parent in enumerate(parents) if parent == node]
            assert children == oracle.best_after(list(text), path, len(children))


@pytest.mark.parametrize("fields", TREES.values(), ids=TREES)
def test_the_seed_alone_decides_sampled_text(engines, fields):
    """Drawn drafts of a tree of a fixed shape, deterministic ones of a grown tree."""
    engine, texts = load(engines, "eagle3", **fields), []
    params = [
        SamplingParams(max_new_tokens=20, temperature=heat, seed=seed, ignore_eos=True)
        for seed, heat in enumerate((0.5, 1.0, 1.3, 0.0, 0.8, 0.6, 1.0, 0.9))
    ]
    for batch_size in (1, 3):
        made, num_accepted, _ = decode(engine, batch_size, params)
        texts.append(made)
        assert num_accepted > 10
    assert texts[0] == texts[1]


def test_a_commit_of_the_first_rows_is_noticed(engines, plain, monkeypatch):
    monkeypatch.setattr(engines["target"].states, "_pending", [])
    texts, _, num_moved = decode(
        load(engines, "eagle3", **TREES["fixed"]), 3, SamplingParams(max_new_tokens=40, ignore_eos=True)
    )
    assert num_moved >= 3 and texts != plain
