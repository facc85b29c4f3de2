# SPDX-License-Identifier: Apache-2.0
"""Every method over numpy fakes, as a whole `SpecEngine`: for texts and traces that a refactor leaves as they are."""

from collections.abc import Callable
from typing import Any

from speccompile.core import registry
from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.specs import HIDDEN
from speccompile.drafting.block_drafts import BlockCache
from speccompile.drafting.proposer import DraftProposer
from speccompile.graph_kinds.heads import DraftForm, FormOptions
from speccompile.runtime.spec_engine import SpecEngine
from tests.lab.engines import Letters
from tests.mock_lm import MockEngine, MockLM
from tests.speculators.borrower_lab import lab_of
from tests.speculators.feature_lm import FusedTarget, MockFeatureDraft, MockFusion
from tests.speculators.hidden_lm import MockCandidateHeads, MockHeads, MockTarget, MockTreeHeads
from tests.speculators.test_dflash import MockBlocks

TARGET = MockLM(seed=1)
DRAFT = TARGET.blurred(seed=2, blur=0.7)
SLOTS, MAX_SEQ, MAX_NODES, HEADROOM, CHUNK = 3, 64, 8, 9, 7
# At these costs a tree is worth its time, so that a budget decides and does so alike everywhere.
COSTS = {"target": StepCosts(((1, 10.0), (16, 11.0)))} | {
    name: StepCosts(((1, 0.1), (16, 0.15))) for name in ("draft", "heads")
}

Parts = tuple[Any, dict[str, Any], Any]  # target, the method's engines, proposer


def _context() -> MethodContext:
    return MethodContext(SLOTS, MAX_SEQ, MAX_NODES, COSTS, {"draft": MAX_SEQ})


def _model(name: str, **config: Any) -> Parts:
    """A method without a graph, or with a draft model."""
    method = registry.method(name)
    made = method.Config(**config)
    has_draft = bool(method.graph_jobs(made))
    drafts = {"draft": MockEngine(DRAFT, "draft", SLOTS, MAX_SEQ, HEADROOM)} if has_draft else {}
    target = MockEngine(TARGET, "target", SLOTS, MAX_SEQ, HEADROOM)
    return target, drafts, method.make_proposer(made, drafts, _context())


def _heads(name: str, **config: Any) -> Parts:
    method = registry.method(name)
    made = method.Config("heads", **config)
    target = MockTarget(TARGET, SLOTS, MAX_SEQ, HEADROOM)
    (job,) = method.graph_jobs(made)
    heads: Any
    if made.tree == "chain":
        heads = MockHeads(DRAFT, target, 3, SLOTS)
    elif isinstance(job.options, FormOptions):
        heads = MockTreeHeads(DRAFT, target, DraftForm.from_options(job.options, 3), SLOTS)
    else:
        heads = MockCandidateHeads(DRAFT, target, 3, job.options.num_candidates, SLOTS)
    drafts = {job.name: heads}
    return target, drafts, method.make_proposer(made, drafts, _context())


def _features(name: str, **config: Any) -> Parts:
    method = registry.method(name)
    made = method.Config("draft", **config)
    jobs = [job.name for job in method.graph_jobs(made)]
    target = (FusedTarget if "fusion" in jobs else MockTarget)(TARGET, SLOTS, MAX_SEQ, HEADROOM)
    drafts = {"draft": MockFeatureDraft(DRAFT, target, SLOTS, MAX_SEQ, made.candidates_needed)}
    if "fusion" in jobs:
        drafts["fusion"] = MockFusion(SLOTS)
    return target, drafts, method.make_proposer(made, drafts, _context())


def _blocks(**config: Any) -> Parts:
    method = registry.method("dflash")
    target = MockTarget(TARGET, SLOTS, MAX_SEQ, HEADROOM)
    blocks = MockBlocks(target, SLOTS)
    blocks.max_rows = len(blocks.rows[0])
    cache = BlockCache(blocks, lambda outputs: outputs[HIDDEN], (HIDDEN,), MAX_SEQ, MAX_NODES + 1)
    drafts = method.Config("draft", **config).make_drafts(cache, blocks, "draft", _context(), 4)
    return target, {"draft": blocks}, DraftProposer(cache, *drafts)


def _borrowing(name: str, **config: Any) -> Parts:
    """A drafter on the target's own caches."""
    target = MockEngine(TARGET, "target", SLOTS, MAX_SEQ, HEADROOM)
    return target, {}, lab_of(name, **config).make(target, DRAFT, SLOTS)


HYBRID = ({"method": "suffix", "depth": 5}, {"method": "draft_model", "model": "draft"})
MAKERS: dict[str, Callable[[], Parts]] = {
    "none": lambda: _model("none"),
    "ngram": lambda: _model("ngram", min_match=1, max_match=3),
    "suffix": lambda: _model("suffix", depth=5),
    "suffix-tree": lambda: _model("suffix", depth=5, tree="auto"),
    "draft_model": lambda: _model("draft_model", model="draft", num_draft_tokens=4),
    "draft_model-auto": lambda: _model("draft_model", model="draft", num_draft_tokens="auto"),
    "draft_model-greedy": lambda: _model("draft_model", model="draft", drafts="greedy"),
    "draft_model-tree": lambda: _model("draft_model", model="draft", tree={"widths": [2, 1]}),
    "hybrid": lambda: _model("hybrid", drafters=HYBRID),
    "hybrid-tree": lambda: _model("hybrid", drafters=(HYBRID[0], {**HYBRID[1], "tree": "auto", "num_candidates": 4})),
    "medusa": lambda: _heads("medusa", tree="auto", num_candidates=3),
    "mlp": lambda: _heads("mlp"),
    "mlp-tree": lambda: _heads("mlp", tree={"widths": (2, 1, 1)}),
    "prophet": lambda: _heads("prophet", tree="auto", num_candidates=3, tree_width=2),
    "eagle": lambda: _features("eagle", tree="chain"),
    "eagle3": lambda: _features("eagle3"),
    "eagle3-chain": lambda: _features("eagle3", tree="chain", num_draft_tokens=4),
    "dflash": lambda: _blocks(tree="auto"),
    "dflash-chain": lambda: _blocks(tree="chain", num_draft_tokens=3),
    "glide": lambda: _borrowing("glide", num_draft_tokens=3),
    "early_exit": lambda: _borrowing("early_exit", num_draft_tokens=3),
    "self_draft": lambda: _borrowing("self_draft", num_draft_tokens=3),
}


def make_engine(name: str) -> SpecEngine:
    """Returns an engine of one of `MAKERS`."""
    target, drafts, proposer = MAKERS[name]()
    for engine in (target, *drafts.values()):
        engine.voids_moved = False  # prompts that begin alike share caches: these are copied
    return SpecEngine(target, drafts, proposer, Letters(), _context(), chunk=CHUNK)  # type: ignore[arg-type]
