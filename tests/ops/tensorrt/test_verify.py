# SPDX-License-Identifier: Apache-2.0

import itertools

import numpy as np
import onnxruntime as ort
import pytest

from speccompile.core.tree import TokenTree, Verdict
from speccompile.ops.spec_verify import spec_verify
from speccompile.ops.tensorrt.bodies import drafts_from_width, tensorrt_ops
from tests.core.distribution_lab import CHAIN, SETTINGS, TREE, VOCAB, Setting, emit, exact_joint, p_value, spread
from tests.lab.graphs import open_session
from tests.ops.op_lab import check_unread_parent, is_at_boundary, mutated, same, verify_case
from tests.ops.tensorrt.lab import body_model

pytestmark = pytest.mark.plan

KINDS = list(itertools.product(("greedy", "sampled", "mixed"), (True, False), (True, False)))
BATCH, MUTANT_BATCH = 20000, 5000


@pytest.mark.parametrize("vocab", [5, 64, 97, 300])
@pytest.mark.parametrize("form", ["tokens", "dists", "both"])
def test_verdicts_are_the_twins(vocab, form):
    pins = {"vocab": vocab, **{"tokens": {"draft_vocab": 1}, "dists": {"draft_vocab": vocab}, "both": {}}[form]}
    session = open_session(body_model("SpecVerify", pins))
    rng = np.random.default_rng(vocab)
    num_accepted = num_excluded = 0
    for number in range(120):
        heat, is_chain, has_probs = KINDS[number % len(KINDS)]
        case = verify_case(rng, vocab, is_chain=is_chain, has_probs=has_probs, heat=heat)
        if form != "both" and has_probs != (form == "dists"):
            continue
        got, expected = session.run(None, case), spec_verify(**case)
        assert [(a.dtype, a.shape) for a in got] == [(a.dtype, a.shape) for a in expected]
        if not same(got, expected):
            assert is_at_boundary(case), f"case {number}, {heat}, chain {is_chain}, distributions {has_probs}"
            num_excluded += 1
        num_accepted += int(expected[1].sum())
    assert num_excluded <= 1
    assert num_accepted > 60


def test_the_form_follows_the_width_of_the_dists():
    assert [drafts_from_width(w, 97) for w in (1, 97, "draft_vocab", None, 40)] == [
        "tokens",
        "dists",
        "both",
        "both",
        "both",
    ]


def test_nodes_after_the_last_unrolled_one_are_never_kept():
    """A tree larger than the body's limit loses drafts but keeps the distribution."""
    rng = np.random.default_rng(2)
    small = open_session(body_model("SpecVerify", {"vocab": 5}, max_nodes=3))
    num_shorter = 0
    for heat, is_chain, has_probs in KINDS * 8:
        case = verify_case(rng, 5, is_chain=is_chain, has_probs=has_probs, heat=heat)
        got, expected = small.run(None, case), spec_verify(**case)
        assert (got[0] < 3).all()
        for slot in range(len(got[1]) * (not has_probs)):  # a shorter block may pass where the longer one does not
            kept = got[0][slot, : got[1][slot] + 1]
            np.testing.assert_array_equal(kept, expected[0][slot, : len(kept)])
            num_shorter += got[1][slot] < expected[1][slot]
    assert num_shorter > 10


def test_prefill_leaves_a_parent_at_the_root():
    session = open_session(body_model("SpecVerify", {"vocab": 97}))
    check_unread_parent(session)


def test_zero_residual_mass():
    """A one-hot target and a draft distribution equal to it, with a draft outside both."""
    session = open_session(body_model("SpecVerify", {"vocab": 5}, max_nodes=3))
    logits = np.full((1, 3, 5), -50, np.float32)
    logits[0, :, 2] = 50
    case = {
        "logits": logits,
        "tokens": np.array([[0, 1, 3]]),
        "parents": np.array([[-1, 0, 0]]),
        "draft_probs": np.eye(5, dtype=np.float32)[[[2, 2, 2]]],
        "uniforms": np.full((1, 3, 2), 0.999999, np.float32),
        "temperature": np.array([1.0], np.float32),
        "top_k": np.array([1]),
        "top_p": np.array([1.0], np.float32),
    }
    assert [o.tolist() for o in session.run(None, case)] == [[[0, -1, -1]], [0], [2]]


def _decide(session: ort.InferenceSession):  # type: ignore[no-untyped-def]
    def decide(tree: TokenTree, logits: np.ndarray, uniforms: np.ndarray, setting: Setting) -> Verdict:
        batch, nodes = tree.tokens.shape
        dists = np.zeros((batch, nodes, 1), np.float32) if tree.draft_probs is None else tree.draft_probs
        warps = {
            "temperature": np.full(batch, setting.temperature, np.float32),
            "top_k": np.full(batch, setting.top_k, np.int64),
            "top_p": np.full(batch, setting.top_p, np.float32),
        }
        feeds = {"logits": logits, "tokens": tree.tokens, "parents": tree.parents, "draft_probs": dists}
        return Verdict(*session.run(None, {**feeds, "uniforms": uniforms, **warps}))

    return decide


@pytest.fixture(scope="module")
def verify() -> ort.InferenceSession:
    return open_session(body_model("SpecVerify", {"vocab": VOCAB}, max_nodes=len(TREE)))


@pytest.mark.parametrize(
    ("form", "sampled", "setting"),
    spread([((-1,), False), (CHAIN, True), (TREE, True), (TREE, False)], SETTINGS[2:], 1),
    ids=str,
)
def test_emitted_tokens_follow_the_target(verify, form, sampled, setting):  # type: ignore[no-untyped-def]
    emitted = emit(form, sampled, setting, BATCH, _decide(verify))
    assert p_value(emitted, exact_joint(setting)) > 1e-3


MUTANTS = {
    "accepts without the draft distribution": ("WalkProbs", "GatherND(chosen, at_token, batch_dims=1)", "1.0"),
    "is verified as if it had not been chosen": ("WalkProbs", "Identity(factored)", "Identity(draft_next)"),
    "counts one draw too many": ("WalkProbs", "Max(num_children, 1)", "num_children + 1"),
    "chooses the lowest class": ("WalkProbs", "preference = ", "preference = 0 - "),
    "factors are not by class": ("WalkProbs", "Where(is_above_0, factor_1, factor_0)", "factor_0"),
    "block does not weigh its residual": (
        "WalkProbs",
        "Unsqueeze(float32(weight), [-1]) * target_probs",
        "target_probs",
    ),
    "block does not look ahead": ("WalkProbs", "Where(nodes == end_alive, weight, pass_inside)", "Identity(weight)"),
    "block forgets the residual": ("WalkProbs", "Where(is_rest, ", "Where(is_rest & ~is_rest, "),
    "weights forget the draft": ("WalkProbs", "prefix_mass_1 / node_draft_1", "prefix_mass_1"),
    "top_p drops the token at its edge": ("Warp", "is_sure | is_tie & (index <= cut)", "is_sure"),
    "top_p ignores top_k": ("Warp", "Where(asks_k, low_k, -3.4e38)", "-3.4e38"),
    "no temperature": ("Warp", "logits / Where(is_hot, heat, 1.0)", "logits"),
    "draw ignores the mass": ("Draw", "Unsqueeze(uniforms, [-1]) * ReduceSum", "ReduceSum"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_body_is_noticed(mutant):
    name, right, wrong = MUTANTS[mutant]
    model = body_model("SpecVerify", {"vocab": VOCAB}, max_nodes=len(TREE))
    session = open_session(mutated(model, tensorrt_ops("both", len(TREE))[name], right, wrong, VOCAB))
    setting = SETTINGS[4]
    form = CHAIN if mutant.startswith(("block", "weights")) else TREE
    emitted = emit(form, True, setting, MUTANT_BATCH, _decide(session))
    assert p_value(emitted, exact_joint(setting)) < 1e-6


TOKEN_MUTANTS = {
    "keeps a child whose parent was refused": ("Min(alive_0, GatherElements(alive_0, jump_0, axis=1))", "alive_0"),
    "keeps both of two equal siblings": ("int64(is_match) - ReduceMax(shadow, [-1], keepdims=0)", "int64(is_match)"),
    "keeps any token": ("tokens == GatherElements(drawn, parent, axis=1)", "tokens == tokens"),
}


@pytest.mark.parametrize("mutant", TOKEN_MUTANTS)
def test_a_mutated_walk_is_noticed(mutant):
    right, wrong = TOKEN_MUTANTS[mutant]
    model = body_model("SpecVerify", {"vocab": VOCAB, "draft_vocab": 1}, max_nodes=10)
    session = open_session(mutated(model, tensorrt_ops("tokens", 10)["Walk"], right, wrong))
    rng = np.random.default_rng(4)
    cases = [verify_case(rng, VOCAB, is_chain=False, has_probs=False, heat="greedy") for _ in range(40)]
    assert not all(same(session.run(None, case), spec_verify(**case)) for case in cases)
