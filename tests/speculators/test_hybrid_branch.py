# SPDX-License-Identifier: Apache-2.0
"""What a lookup found as a branch of another drafter's tree: its form, its size, what is learned, and the text."""

import inspect
import random
import sys
from types import ModuleType

import numpy as np
import pytest

from speccompile.core.jobs import MethodContext, StepCosts
from speccompile.core.tree import TokenTree, Verdict
from speccompile.drafting.acceptance import AcceptanceEstimate, SharedPrior
from speccompile.drafting.budget import Budget
from speccompile.drafting.tree import DraftTrees
from speccompile.errors import RuntimeFault
from speccompile.speculators.hybrid import branch as module
from speccompile.speculators.hybrid.branch import Branches, find_branch, with_branches
from speccompile.speculators.hybrid.config import HybridConfig, HybridMethod
from speccompile.speculators.hybrid.proposer import Drafter
from speccompile.speculators.none.config import NoneProposer
from tests.mock_lm import MockEngine, MockLM
from tests.speculators.distribution_check import LEAST, WARPS, decode_many, fit_p_value

FLAT = AcceptanceEstimate(SharedPrior(1), 0.0, (1.0,))


def put_random(trees: DraftTrees, slot: int, rng: random.Random, num: int, most_tokens: int = 3) -> None:
    """Gives a sequence a random tree of `num` drafts, siblings distinct."""
    drafts: list[tuple[int, int]] = []  # parent, token
    while len(drafts) < num:
        draft = rng.randrange(1 + len(drafts)), rng.randrange(most_tokens)
        if draft not in drafts:
            drafts.append(draft)
        elif rng.random() < 0.1:
            most_tokens += 1
    trees.put(slot, [t for _, t in drafts], [p for p, _ in drafts], [rng.uniform(0.1, 0.9) for _ in drafts])


def grown(rng: random.Random, nums: list[int]) -> DraftTrees:
    trees = DraftTrees([9] * len(nums), max(nums))
    for slot, num in enumerate(nums):
        put_random(trees, slot, rng, num)
    return trees


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def check_form(make, seed):
    """Compares merged trees with their definition: the paths of both, of which the likeliest new ones are kept."""
    rng = random.Random(seed)
    slots = rng.randint(1, 3)
    bases, found = (grown(rng, [rng.randint(0, most) for _ in range(slots)]) for most in (5, 6))
    tree, _ = bases.best(5)
    find, merge = make
    num = rng.randint(1, 6)
    branches = [find(tree, slot, found, FLAT) for slot in range(slots)]
    made = merge(tree, branches, num)
    made.validate()
    for slot, branch in enumerate(branches):
        size, before = int(made.num_nodes[slot]), int(tree.num_nodes[slot])
        tokens, parents = made.tokens[slot, :size].tolist(), made.parents[slot, :size].tolist()
        assert tokens[:before] == tree.tokens[slot, :before].tolist()
        assert parents[:before] == tree.parents[slot, :before].tolist()
        paths = paths_of(tokens, parents)
        assert len(set(paths)) == size  # siblings are distinct
        own = {tuple(bases.path(slot, node)) for node in range(1 + bases.count(slot))}
        theirs = {tuple(found.path(slot, node)): found.paths[slot, node] for node in range(1 + found.count(slot))}
        new = {path: prob for path, prob in theirs.items() if path not in own}
        assert set(paths) - own <= set(new) and size - before == min(num, len(new)) == len(set(paths) - own)
        np.testing.assert_allclose(sorted(branch.probs), sorted(new.values()))
        kept = [new[path] for path in paths[before:]]
        assert not kept or min(kept) >= max([p for path, p in new.items() if path not in paths], default=0.0) - 1e-9


@pytest.mark.parametrize("seed", range(40))
def test_a_merged_tree_has_the_paths_of_both(seed):
    check_form((find_branch, with_branches), seed)


MUTANTS = {
    "shared nodes stay twice": ("children.setdefault((parent, token), num + len", "(lambda _, new: new)(0, num + len"),
    "any nodes are kept": ("key=b.probs.__getitem__, reverse=True)[:num]", "key=b.probs.__getitem__)[:num]"),
    "parents keep the numbers of a whole branch": ("node_of.get(above, above)", "above"),
    "a path begins at its branch": ("path = paths[above] if is_first", "path = 1.0 if is_first"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_merges_are_noticed(name, monkeypatch):
    right, wrong = MUTANTS[name]
    source = inspect.getsource(module)
    assert source.count(right) == 1, name
    mutant = ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutant)
    exec(compile(source.replace(right, wrong), "mutant", "exec"), mutant.__dict__)
    with pytest.raises((AssertionError, RuntimeFault)):  # noqa: PT012
        for seed in range(40):
            check_form((mutant.find_branch, mutant.with_branches), seed)


RECORD = StepCosts(tuple((nodes, 2.0 + 0.25 * nodes) for nodes in (1, 2, 4, 8, 16)))


@pytest.mark.parametrize("seed", range(30))
def test_as_many_nodes_are_added_as_bring_the_most_tokens_a_millisecond(seed):
    rng = random.Random(seed)
    slots, spent_ms = rng.randint(1, 3), rng.uniform(0, 2)
    tree, _ = grown(rng, [rng.randint(1, 4) for _ in range(slots)]).best(4)
    lookup = grown(rng, [rng.randint(0, 6) for _ in range(slots)])
    found = [rng.choice((None, lookup)) for _ in range(slots)]
    branches, expected = Branches(Budget(8, 8, 1, RECORD)), rng.uniform(0, 2) * slots
    made = branches.add(tree, found, expected, spent_ms)
    new = [[] if f is None else find_branch(tree, s, f, branches.estimate).probs for s, f in enumerate(found)]
    ranked, held = [sorted(probs, reverse=True) for probs in new], int(tree.num_nodes.max()) - 1
    speeds = [
        (slots + expected + sum(sum(probs[:num]) for probs in ranked))
        / (RECORD.ms(slots * (1 + held + num)) + spent_ms)
        for num in range(1 + min(max(map(len, ranked)), 8 - held))
    ]
    num = speeds.index(max(speeds))
    assert (made.num_nodes - tree.num_nodes).tolist() == [min(num, len(probs)) for probs in ranked]
    assert made.num_nodes.max() <= 9 and (made is tree) == (num == 0)


def test_a_branch_is_as_likely_as_earlier_ones_were_accepted_scored_or_not():
    """The tree says 1, 2; the lookup 1, 3. Of the text, only what comes after an accepted 1 decides on the branch."""
    found = DraftTrees([9], 2)
    found.put(0, [1, 3], [0, 1], [0.8, 0.8])
    tree = TokenTree.chain(np.array([[9, 1, 2]]))
    rates = {}
    for following, is_scored in ((3, True), (3, False), (4, True), (4, False)):
        branches = Branches(Budget(8, 8, 1))
        first = find_branch(tree, 0, found, branches.estimate).probs
        for _ in range(60):
            branches.begin()
            made = branches.add(tree, [found], 1.0, 0.0) if is_scored else tree
            if not is_scored:
                branches.budget, full = Budget(2, 2, 1), branches.budget
                assert branches.add(tree, [found], 1.0, 0.0) is tree
                branches.budget = full
            path = [0, 1, 3] if following == 3 and is_scored else [0, 1]
            branches.learn(
                made,
                Verdict(np.array([path]), np.array([len(path) - 1]), np.array([5 if len(path) > 2 else following])),
            )
        rates[following, is_scored] = find_branch(tree, 0, found, branches.estimate).probs[0]
        refused = Verdict(np.array([[0]]), np.array([0]), np.array([7]))
        branches.learn(made, refused)  # the root's own child was wrong: nothing is known of the branch
        assert find_branch(tree, 0, found, branches.estimate).probs[0] == rates[following, is_scored]
    assert rates[3, True] == rates[3, False] > first[0] > rates[4, True] == rates[4, False]


class Rambling(NoneProposer):
    """A lookup that finds random trees; it expects less of them than any drafter of its own."""

    def __init__(self, seed=0):
        self.rng, self.offered, self.foreseen = random.Random(seed), DraftTrees([], 0), []

    def propose(self, batch):
        self.offered = DraftTrees([sequence.tokens[-1] for sequence in batch.sequences], 4)
        for slot, sequence in enumerate(batch.sequences):
            most = 4 if sequence.max_drafts > 2 else 0
            put_random(self.offered, slot, self.rng, self.rng.randint(0, min(most, sequence.max_drafts)), 24)
        return self._score()

    def _score(self):
        tree, _ = self.offered.best(4)
        self.foreseen = [0.01 * (num > 1) for num in tree.num_nodes.tolist()]
        return tree


MOCK = MockLM(seed=5, vocab=6)
SECTIONS = {
    "grown": {"tree": "auto", "num_candidates": 2, "tree_width": 1, "tree_depth": 2},
    "fixed": {"tree": {"widths": [2, 1]}},
    "chain": {"num_draft_tokens": 2},
}


def rambling_hybrid(kind, slots):
    """A drafter with a graph beside random trees, which are branches of its own in most steps."""
    draft = MockEngine(MOCK.blurred(6, 0.7), "draft", slots, 64, headroom=9)
    section = {"method": "draft_model", "model": "draft", **SECTIONS[kind]}
    config = HybridConfig(({"method": "suffix", "tree": "auto"}, section))
    hybrid = HybridMethod().make_proposer(config, {"draft": draft}, MethodContext(slots, 64, 8))
    lookup = Rambling()
    hybrid.drafters = (Drafter(lookup, None), hybrid.drafters[1])
    hybrid._foresees[0] = True
    merged, add = [0], hybrid._branches.add

    def counted(tree, *rest):
        made = add(tree, *rest)
        merged[0] += made is not tree
        return made

    hybrid._branches.add = counted
    return hybrid, merged


@pytest.mark.distribution
@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("heat", [(0.0, 0, 1.0), WARPS[0]])
def test_text_follows_the_targets_distribution(kind, heat):
    is_greedy = heat[0] == 0
    hybrid, merged = rambling_hybrid(kind, 8)
    sequences = decode_many(
        MockEngine(MOCK, "target", 8, 64, headroom=9), hybrid, heat, 40 if is_greedy else 700, 64, 5
    )
    assert merged[0] > (5 if is_greedy else 50)
    if is_greedy:
        assert {tuple(sequence.tokens) for sequence in sequences} == {(3, 1, 4, *MOCK.greedy([3, 1, 4], 5))}
    else:
        assert fit_p_value(sequences, MOCK, heat) > LEAST


def test_sampled_text_is_plain_decodings():
    """Drafts are kept by match, so the seed alone decides: also with branches that are accepted."""
    texts = []
    for proposer in (NoneProposer(), rambling_hybrid("grown", 4)[0]):
        target = MockEngine(MOCK, "target", 4, 64, headroom=9)
        texts.append([s.tokens for s in decode_many(target, proposer, (0.9, 0, 1.0), 20, 64, 12)])
    assert texts[0] == texts[1]


def test_chains_beside_chains_stay_chains():
    config = HybridConfig(({"method": "suffix"}, {"method": "draft_model", "model": "draft"}))
    draft = MockEngine(MOCK, "draft", 2, 64, headroom=9)
    assert HybridMethod().make_proposer(config, {"draft": draft}, MethodContext(2, 64, 8))._branches is None


class Knowing(Rambling):
    """A lookup that finds what the target says next, but is never chosen alone."""

    def propose(self, batch):
        self.offered = DraftTrees([sequence.tokens[-1] for sequence in batch.sequences], 4)
        for slot, sequence in enumerate(batch.sequences):
            tokens = MOCK.greedy(sequence.tokens, min(4, sequence.max_drafts))
            self.offered.put(slot, tokens, range(len(tokens)), [0.9] * len(tokens))
        return self._score()


def test_branches_bring_tokens_and_each_drafter_learns_its_own():
    lengths = []
    for is_merged in (False, True):
        hybrid, _ = rambling_hybrid("fixed", 1)
        hybrid.drafters = (Drafter(Knowing(), None), hybrid.drafters[1])
        if not is_merged:
            hybrid._branches = None
        owns = []
        learn = AcceptanceEstimate.learn_length

        def noted(self, was_drafted, num, owns=owns, learn=learn):
            owns.append((was_drafted, num))
            learn(self, was_drafted, num)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AcceptanceEstimate, "learn_length", noted)
            target = MockEngine(MOCK, "target", 1, 64, headroom=9)
            [sequence] = decode_many(target, hybrid, (0.0, 0, 1.0), 1, 64, 40)
        lengths.append(sequence.stats.num_tokens / sum(sequence.stats.outcomes.values()))
        own = [num for was_drafted, num in owns if was_drafted]
        assert max(own) <= 2  # the depth of the drafter's shape
        others = sum(num * times for (_, num), times in sequence.stats.outcomes.items()) - sum(own)
        assert others > 10 if is_merged else others == 0
    assert lengths[1] > 1.3 * lengths[0] and lengths[1] > 4
