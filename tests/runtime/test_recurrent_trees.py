# SPDX-License-Identifier: Apache-2.0
"""Trees on a target with recurrent states: the bits of a fresh prefill, and the texts of plain decoding."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from speccompile.backends.states import HostStates, SlotStates
from speccompile.core import registry
from speccompile.core.tree import TokenTree
from speccompile.drafting.tree_config import check_trees
from speccompile.errors import RecipeError, RuntimeFault
from speccompile.runtime.sequences import SequenceBatch, TokenSequence
from speccompile.runtime.verifier import Verifier
from speccompile.speculators.draft_model.config import DraftModelConfig
from tests.backends.hybrid_lab import MAX_SEQ, NUM_DRAFTS, VOCAB, Hybrid
from tests.runtime.test_recurrent import GREEDY, Bench, Script, check_last_rows, numbers, run_rounds

pytestmark = pytest.mark.distribution


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid"))


class Trees(Script):
    """Drafts the text of plain decoding as one path of a tree; wrong siblings stand beside it and have children."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.paths: list[list[int]] = []

    def propose(self, batch: Any) -> TokenTree:
        rows = [self._tree(sequence) for sequence in batch.sequences]
        nodes = max(len(tokens) for tokens, _ in rows)
        tokens, parents = np.zeros((len(rows), nodes), np.int64), np.full((len(rows), nodes), -1)
        for slot, (mine, above) in enumerate(rows):
            tokens[slot, : len(mine)], parents[slot, : len(mine)] = mine, above
        return TokenTree.tree(tokens, parents, np.array([len(mine) for mine, _ in rows]))

    def _tree(self, sequence: Any) -> tuple[list[int], list[int]]:
        text = self.texts[tuple(sequence.tokens[: sequence.num_prompt]), sequence.sampling]
        done, right = len(sequence.tokens) - sequence.num_prompt, 0
        tokens, parents = [sequence.tokens[-1]], [-1]
        for token in text[done : done + int(self.rng.integers(0, sequence.max_drafts + 1))]:
            room = NUM_DRAFTS + 1 - len(tokens)
            level = [token, *((token + 1 + i) % VOCAB for i in range(int(self.rng.integers(0, 3))))][:room]
            order = self.rng.permutation(len(level)).tolist()
            first = len(tokens)
            tokens += [level[i] for i in order]
            parents += [right] * len(level)
            if len(level) > 1 and len(tokens) <= NUM_DRAFTS:
                tokens.append(int(self.rng.integers(VOCAB)))
                parents.append(first + order.index(1))
            if not level:
                break
            right = first + order.index(0)
        return tokens, parents

    def commit(self, batch: Any, tree: TokenTree, verdict: Any, outputs: Any) -> None:
        super().commit(batch, tree, verdict, outputs)
        self.paths += [[node for node in path if node >= 0] for path in verdict.path.tolist()]


@pytest.mark.parametrize(("seed", "num_again"), [(0, 0), (1, 1)])
def test_200_rounds_keep_the_bits_of_a_fresh_prefill_and_the_texts_of_plain_decoding(hybrid, seed, num_again):
    bench = run_rounds(hybrid, seed, 200, num_again, Trees)
    paths, counters = bench.script.paths, bench.scheduler.counters
    moved = [path for path in paths if path != [*range(len(path))]]
    assert len(moved) > 60 and {len(path) for path in moved} >= {2, 3, 4}
    assert counters.num_prefix_hits > 5 and counters.num_reused_tokens > 100
    assert set(bench.reasons) == {"length", "cancelled"} and len(bench.handles) > 40


def test_the_reference_engine_scores_trees_with_the_same_texts(hybrid, tmp_path):
    bench = Bench(Hybrid(tmp_path, "reference"), script=Trees)
    prompts, plain = [numbers(num, num) for num in (9, 2)], Bench(hybrid)
    for prompt in prompts:
        bench.submit(prompt)
        plain.submit(prompt, speculation="off")
    bench.finish()
    plain.finish()
    assert bench.outputs == plain.outputs
    assert any(path != [*range(len(path))] for path in bench.script.paths)


def test_the_last_rows_of_the_cache_take_padded_trees(hybrid):
    check_last_rows(Bench(hybrid, script=Trees))


def test_a_conversation_goes_on_within_an_accepted_path(hybrid):
    """The rows of a path that ended at a limit are pending, in the order of its tokens."""
    bench, prompt = Bench(hybrid, script=Trees), numbers(20, 4)
    for num in range(3, 9):
        bench.ask(prompt, params=replace(GREEDY, max_new_tokens=num))
        whole = prompt + bench.outputs[-1]
        assert bench.ask(whole + numbers(6, 5)) == len(whole) - 1


def _commit_the_first_rows(states: HostStates, lengths: Any, path: Any) -> None:
    """Leaves the pending rows in the order of the nodes."""


def _move_one_kind(kind: int) -> Any:
    def compact(states: HostStates, lengths: Any, path: Any) -> None:
        kept = states._pending
        states._pending = kept[kind : kind + 1]
        COMPACT(states, lengths, path)
        states._pending = kept

    return compact


COMPACT = HostStates.compact
MUTANTS = {
    "the first rows are committed": _commit_the_first_rows,
    "only rows of the recurrence move": _move_one_kind(0),
    "only rows of the convolution move": _move_one_kind(1),
    "the path of the slot before": lambda states, lengths, path: COMPACT(states, lengths, np.roll(path, 1, axis=0)),
    "a row late": lambda states, lengths, path: COMPACT(states, lengths, np.maximum(path - (path > 1), -1)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(hybrid, name, monkeypatch):
    monkeypatch.setattr(HostStates, "compact", MUTANTS[name])
    with pytest.raises(AssertionError, match=r"other bits|request"):
        run_rounds(hybrid, 0, 60, script=Trees)


def test_a_tree_is_refused_where_states_follow_chains(hybrid):
    engine = hybrid.open(1)
    engine.states.scores_trees = False
    tree = TokenTree.tree([[1, 2, 3]], [[-1, 0, 0]])
    with pytest.raises(RuntimeFault, match="a tree to score; expected chains"):
        Verifier(engine, MAX_SEQ).score(tree, SequenceBatch([TokenSequence(0, [1], GREEDY, frozenset(), None)], 1))
    with pytest.raises(RuntimeFault, match="a tree to roll back; expected chains"):
        SlotStates.compact(engine.states, np.array([0]), np.array([[0, 2]]))


@pytest.mark.parametrize(("tree", "got"), [("auto", "auto"), ({"widths": (2, 1)}, "a tree")])
def test_a_recipe_of_trees_is_refused_by_name(hybrid, tree, got):
    config, spec = DraftModelConfig("d", tree=tree), hybrid.spec
    assert [registry.backend(n, d).state_trees for n, d in (("onnxruntime", "cuda"), ("tensorrt", "cuda"))] == [
        False
    ] * 2
    for target, has_paths, where in ((spec, False, "backend"), (replace(spec, state_trees=False), True, "built")):
        with pytest.raises(RecipeError, match=f"speculator.tree: got {got}; expected chain: a target with .*{where}"):
            check_trees(target, config.draft_bounds, has_paths)
        check_trees(target, DraftModelConfig("d").draft_bounds, has_paths)
    check_trees(spec, config.draft_bounds, registry.backend("onnxruntime").state_trees)
