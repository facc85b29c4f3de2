# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.core import acceptance
from speccompile.core.acceptance import accept, residual
from speccompile.core.tree import TokenTree, Verdict
from tests.core.distribution_lab import (
    CHAIN,
    SETTINGS,
    TREE,
    Setting,
    decide_by_twin,
    emit,
    exact_joint,
    p_value,
    warped,
)

BATCH = 6000
RIGHT, WRONG = 1e-3, 1e-6  # p-values; the draws are seeded, so neither bound is a matter of luck


def probs(*rows: list[float]) -> np.ndarray:
    return np.array([rows], dtype=np.float32)


def draws(*rows: list[float]) -> np.ndarray:
    return np.array([rows], dtype=np.float32)


@pytest.mark.distribution
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("form", "sampled"),
    [((-1,), False), (CHAIN, True), (TREE, True), (TREE, False)],
    ids=["plain", "chain", "tree", "top-k"],
)
def test_emitted_tokens_follow_the_target(form, sampled, setting):
    emitted = emit(form, sampled, setting, BATCH, decide_by_twin)
    assert p_value(emitted, exact_joint(setting)) > RIGHT


@pytest.mark.distribution
def test_one_hot_probs_are_a_deterministic_draft():
    """A deterministic draft may also be given as one-hot probs; the text differs, the distribution does not."""
    rng = np.random.default_rng(1)

    def decide(tree: TokenTree, logits: np.ndarray, uniforms: np.ndarray, setting: Setting) -> Verdict:
        one_hot = np.eye(logits.shape[-1], dtype=np.float32)[tree.tokens]
        draws = rng.random(uniforms.shape, dtype=np.float32)  # those of deterministic drafts are a race's
        return accept(tree, warped(logits, setting), draws, one_hot)

    assert p_value(emit(TREE, False, SETTINGS[0], BATCH, decide), exact_joint(SETTINGS[0])) > RIGHT


def _shared_accept_draw(tree: TokenTree, logits: np.ndarray, uniforms: np.ndarray, setting: Setting) -> Verdict:
    uniforms[:, :, 0] = uniforms[:, 1:2, 0]
    return decide_by_twin(tree, logits, uniforms, setting)


def _reused_draw(tree: TokenTree, logits: np.ndarray, uniforms: np.ndarray, setting: Setting) -> Verdict:
    uniforms[:, :-1, 1] = uniforms[:, 1:, 0]
    return decide_by_twin(tree, logits, uniforms, setting)


def _top_p_before_temperature(tree: TokenTree, logits: np.ndarray, uniforms: np.ndarray, setting: Setting) -> Verdict:
    cut = np.log(warped(logits, Setting(1.0, setting.top_k, setting.top_p)) + np.float32(1e-30))
    return accept(tree, warped(cut, Setting(setting.temperature, 0, 1.0)), uniforms)


def _flatter_draft(tree: TokenTree, logits: np.ndarray, uniforms: np.ndarray, setting: Setting) -> Verdict:
    """Drafts are judged by another distribution than the one that they were drawn from."""
    assert tree.draft_probs is not None
    flat = np.sqrt(tree.draft_probs)
    return accept(tree, warped(logits, setting), uniforms, flat / np.maximum(flat.sum(-1, keepdims=True), 1e-9))


def _row_of_the_parent(tree: TokenTree, logits: np.ndarray, uniforms: np.ndarray, setting: Setting) -> Verdict:
    return decide_by_twin(
        tree, np.concatenate((logits[:, :1], logits[:, :1], logits[:, 2:]), axis=1), uniforms, setting
    )


@pytest.mark.distribution
@pytest.mark.parametrize(
    ("form", "setting", "decide"),
    [
        (TREE, SETTINGS[0], _shared_accept_draw),
        (CHAIN, SETTINGS[0], _reused_draw),
        (CHAIN, SETTINGS[4], _top_p_before_temperature),
        (CHAIN, SETTINGS[0], _flatter_draft),
        (CHAIN, SETTINGS[0], _row_of_the_parent),
    ],
)
def test_wrong_inputs_of_the_rule_are_noticed(form, setting, decide):  # type: ignore[no-untyped-def]
    assert p_value(emit(form, True, setting, 2 * BATCH, decide), exact_joint(setting)) < WRONG


@pytest.mark.distribution
@pytest.mark.parametrize("form", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda target, draft: target,
        lambda target, draft: np.abs(target - draft) / np.abs(target - draft).sum(),
        lambda target, draft: target * target / (target * target).sum(),
        lambda target, draft: draft,
    ],
    ids=["keeps the target", "absolute", "squares", "draws the draft"],
)
def test_wrong_residuals_are_noticed(form, wrong, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(acceptance, "residual", wrong)
    emitted = emit(form, True, SETTINGS[0], BATCH, decide_by_twin)
    assert p_value(emitted, exact_joint(SETTINGS[0])) < WRONG


def test_deterministic_drafts_do_not_change_the_text():
    plain = emit((-1,), False, SETTINGS[4], 500, decide_by_twin)
    for form in (CHAIN, TREE, (-1, 0, 0, 0)):
        np.testing.assert_array_equal(emit(form, False, SETTINGS[4], 500, decide_by_twin), plain)


def test_greedy_is_the_same_rule():
    setting = Setting(0.0, 2, 0.5)
    plain = emit((-1,), False, setting, 4, decide_by_twin)
    assert (plain == plain[0]).all()
    for form, sampled in ((CHAIN, True), (TREE, True), (CHAIN, False), (TREE, False)):
        np.testing.assert_array_equal(emit(form, sampled, setting, 40, decide_by_twin), plain[:1].repeat(40, axis=0))


def test_a_chain_is_kept_up_to_its_first_refusal():
    tree = TokenTree.chain(np.array([[9, 1, 2, 0]]))
    target = probs([0, 1, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0])
    verdict = accept(tree, target, draws(*[[0.5, 0.5]] * 4))
    assert verdict.path.tolist() == [[0, 1, 2, -1]]
    assert verdict.num_accepted.tolist() == [2]
    assert verdict.next_token.tolist() == [1]
    assert verdict.nodes_kept(0) == [0, 1, 2]


def test_a_whole_path_is_followed_by_a_bonus_token():
    tree = TokenTree.chain(np.array([[9, 1, 2]]))
    verdict = accept(tree, probs([0, 1, 0], [0, 0, 1], [1, 0, 0]), draws(*[[0.5, 0.5]] * 3))
    assert (verdict.path.tolist(), verdict.next_token.tolist()) == ([[0, 1, 2]], [0])


@pytest.mark.parametrize("is_drawn", [True, False])
@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, 0, 0, 1]])
def test_the_next_token_is_drawn_with_the_draw_and_distribution_of_the_last_node(parents, is_drawn):
    """Every node has a draw of its own here, so that another node's gives another token."""
    tokens = [9, 1, 2] if len(parents) == 3 else [9, 1, 0, 2]
    last = len(tokens) - 1
    rows = [[0.0, 1, 0, 0], [0.0, 0, 1, 0], [1.0, 0, 0, 0], [1.0, 0, 0, 0]][: len(tokens)]
    rows[last] = [0.25, 0.25, 0.25, 0.25]
    uniforms = [[0.0, 0.1], [0.0, 0.4], [0.0, 0.6], [0.0, 0.6]][: len(tokens)]
    uniforms[last] = [0.0, 0.9]
    dists = np.eye(10, 4, dtype=np.float32)[tokens][None] if is_drawn else None
    tree = TokenTree.tree([tokens], [parents], draft_probs=dists)
    verdict = accept(tree, probs(*rows), draws(*uniforms))
    assert (verdict.nodes_kept(0), verdict.next_token.tolist()) == ([0, 1, last], [3])
    refused = accept(tree, probs(rows[0], [0.5, 0, 0, 0.5], *rows[2:]), draws(*uniforms[:1], [0, 0.8], *uniforms[2:]))
    assert (refused.nodes_kept(0), refused.next_token.tolist()) == ([0, 1], [3])


def test_a_draft_is_refused_where_the_draw_meets_the_bound():
    """Accepted is u * draft < target: a share target / draft of draws in [0, 1); never a token without mass."""
    tree = TokenTree.chain(np.array([[9, 0]]), draft_probs=probs([0, 0, 0], [0.5, 0.5, 0]))
    target = probs([0.25, 0.5, 0.25], [1, 0, 0])
    kept = [accept(tree, target, draws([0, 0], [u, 0])).num_accepted[0] for u in (0.5 - 2**-24, 0.5, 0.5 + 2**-24)]
    assert kept == [1, 0, 0]
    assert accept(tree, probs([0, 0.5, 0.5], [1, 0, 0]), draws([0, 0], [0, 0])).num_accepted[0] == 0


def test_of_equal_siblings_the_first_is_kept():
    tree = TokenTree.tree([[9, 2, 1, 1]], [[-1, 0, 0, 0]])
    assert accept(tree, probs(*[[0, 1, 0]] * 4), draws(*[[0, 0]] * 4)).path.tolist() == [[0, 2, -1, -1]]


def test_padding_is_never_reached():
    tree = TokenTree.chain(np.array([[9, 1, 1]]), np.array([2]))
    verdict = accept(tree, probs(*[[0, 1, 0]] * 3), draws(*[[0, 0]] * 3))
    assert (verdict.path.tolist(), verdict.next_token.tolist()) == ([[0, 1, -1]], [1])


def test_the_parent_of_node_0_is_not_read():
    """Prefill scores one node of many and leaves that node's own parent at index 0."""
    parents = np.array([[510]])
    tree = TokenTree(np.array([[7]]), parents, np.array([1]))
    assert accept(tree, probs([0, 0, 1]), draws([0, 0.3])).next_token.tolist() == [2]


def test_recovered_token_comes_from_the_residual():
    tree = TokenTree.chain(np.array([[9, 0]]), draft_probs=probs([0, 0, 0], [1, 0, 0]))
    target = probs([0.5, 0.25, 0.25], [1, 0, 0])
    refused = [accept(tree, target, draws([0, u], [0.5, 0])).next_token[0] for u in (0.0, 0.49, 0.51, 0.99)]
    assert refused == [1, 1, 2, 2]
    assert accept(tree, target, draws([0, 0.9], [0.49, 0])).path.tolist() == [[0, 1]]


def test_a_residual_of_little_mass_is_still_the_residual():
    target = np.float32([0.5, 0.5 - 2**-20, 2**-20])
    np.testing.assert_array_equal(residual(target, np.float32([0.5, 0.5, 0])), [0, 0, 1])


def test_residual_without_mass_keeps_the_target():
    one_hot = np.array([0, 1, 0], dtype=np.float32)
    assert residual(one_hot, one_hot) is one_hot
    np.testing.assert_allclose(residual(np.float32([0.5, 0.5, 0]), np.float32([0.8, 0.2, 0])), [0, 1, 0])
    # A draft outside both distributions is refused, and the residual is empty.
    tree = TokenTree.chain(np.array([[9, 0]]), draft_probs=probs([0, 0, 0], [0, 1, 0]))
    assert accept(tree, probs([0, 1, 0], [1, 0, 0]), draws([0, 0.7], [0.5, 0])).next_token.tolist() == [1]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_verdict_is_a_path_of_the_tree(data):
    nodes, vocab = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, nodes)]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dists = rng.dirichlet(np.ones(vocab), size=(2, 1, nodes)).astype(np.float32)
    tree = TokenTree.tree(rng.integers(0, vocab, (1, nodes)), [parents])
    uniforms = rng.random((1, nodes, 2)).astype(np.float32)
    verdict = accept(tree, dists[0], uniforms, dists[1] if data.draw(st.booleans()) else None)
    kept = verdict.nodes_kept(0)
    assert kept[0] == 0 and verdict.path[0, len(kept) :].tolist() == [-1] * (nodes - len(kept))
    assert [parents[n] for n in kept[1:]] == kept[:-1]
    assert 0 <= verdict.next_token[0] < vocab
