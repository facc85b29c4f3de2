# SPDX-License-Identifier: Apache-2.0

import itertools

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from speccompile.ops.op import DOMAIN
from speccompile.ops.registry import OPS
from speccompile.ops.spec_verify import spec_verify
from tests.core.distribution_lab import CHAIN, SETTINGS, TREE, decide_by_session, emit, exact_joint, p_value, spread
from tests.lab.graphs import open_session
from tests.ops.op_lab import (
    check_unread_parent,
    is_at_boundary,
    model_of,
    mutated,
    same,
    verify_case,
    zero_residual_case,
)
from tests.ops.tensorrt.lab import body_model

VOCABS = (5, 64, 97, 300)  # 300 is more than is sorted at first
KINDS = list(itertools.product(("greedy", "sampled", "mixed"), (True, False), (True, False)))
BATCH = 20000


@pytest.fixture(scope="module")
def session() -> ort.InferenceSession:
    return open_session(model_of("SpecVerify"))


def _compare(run, num_cases: int, seed: int) -> None:  # type: ignore[no-untyped-def]
    """The verdicts of `run` equal the twin's, except where a draw is within 1e-6 of a boundary."""
    rng = np.random.default_rng(seed)
    num_accepted = num_excluded = 0
    for number in range(num_cases):
        heat, is_chain, has_probs = KINDS[number % len(KINDS)]
        vocab = int(VOCABS[number // len(KINDS) % len(VOCABS)])
        case = verify_case(rng, vocab, is_chain=is_chain, has_probs=has_probs, heat=heat)
        got, expected = run(case), spec_verify(**case)
        assert [(a.dtype, a.shape) for a in got] == [(a.dtype, a.shape) for a in expected]
        if not same(got, expected):
            assert is_at_boundary(case), (
                f"case {number}, {heat}, chain {is_chain}, distributions {has_probs}, vocab {vocab}"
            )
            num_excluded += 1
        num_accepted += int(expected[1].sum())
    assert num_excluded <= num_cases // 100
    assert num_accepted > num_cases  # the cases do reach beyond the root


@pytest.mark.distribution
def test_onnxruntime_runs_the_body_as_the_twin(session):
    _compare(lambda case: session.run(None, case), 768, seed=1)


@pytest.mark.parametrize("vocab", [7, 128, 97])
def test_onnxruntime_with_a_static_vocabulary(vocab):
    fixed = open_session(model_of("SpecVerify", {"vocab": vocab}))
    rng = np.random.default_rng(vocab)
    for heat, is_chain, has_probs in KINDS * 3:
        case = verify_case(rng, vocab, is_chain=is_chain, has_probs=has_probs, heat=heat)
        assert same(fixed.run(None, case), spec_verify(**case)) or is_at_boundary(case)


@pytest.mark.distribution
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # 0/0 of a residual that is not taken
def test_reference_evaluator_runs_the_body_as_the_twin():
    evaluator = ReferenceEvaluator(model_of("SpecVerify"))
    _compare(lambda case: evaluator.run(None, case), 240, seed=2)


def test_no_function_call_is_left(session, tmp_path):  # type: ignore[no-untyped-def]
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "inlined.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    ort.InferenceSession(model_of("SpecVerify").SerializeToString(), options, providers=["CPUExecutionProvider"])
    inlined = onnx.load(tmp_path / "inlined.onnx")
    assert not inlined.functions
    assert DOMAIN not in {n.domain for n in _all_nodes(inlined.graph)}


def _all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    subgraphs = [a.g for n in graph.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    return [*graph.node, *(n for g in subgraphs for n in _all_nodes(g))]


def test_prefill_leaves_a_parent_at_the_root(session):
    check_unread_parent(session)


@pytest.mark.parametrize("has_probs", [True, False])
def test_zero_residual_mass(session, has_probs):
    case = zero_residual_case(has_probs)
    assert [o.tolist() for o in session.run(None, case)] == [[[0, -1, -1]], [0], [2]]


@pytest.mark.parametrize("parents", [[-1, 0, -1], [-1, 0, 0]], ids=["chain", "tree"])
def test_a_draft_is_refused_where_the_draw_meets_the_bound(session, parents):
    """Accepted is u * draft < target, also where the target has no mass and the draw is 0."""
    logits = np.full((3, 3, 4), -1e4, np.float32)
    logits[:, :, :2] = 0  # half of the mass each, exactly
    tokens, uniforms = np.array([[0, 0, 1], [0, 0, 1], [0, 3, 1]]), np.full((3, 3, 2), 0.25, np.float32)
    uniforms[:, 1, 0] = [0.5, 0.5 - 2**-24, 0]
    dists = np.zeros((3, 3, 4), np.float32)
    dists[np.arange(3), 1, tokens[:, 1]] = dists[np.arange(3), 2, tokens[:, 2]] = 1
    uniforms[:, 2, 0] = 1 - 2**-24
    case = {
        "logits": logits,
        "tokens": tokens,
        "parents": np.array([parents] * 3),
        "draft_probs": dists,
        "uniforms": uniforms,
        "temperature": np.ones(3, np.float32),
        "top_k": np.zeros(3, np.int64),
        "top_p": np.ones(3, np.float32),
    }
    expected, got = spec_verify(**case), session.run(None, case)
    assert same(got, expected)
    assert [1 in path for path in got[0].tolist()] == [False, True, False]


def test_a_slot_does_not_depend_on_its_batch(session):
    rng = np.random.default_rng(4)
    for heat, is_chain, has_probs in KINDS:
        case = verify_case(rng, 300, is_chain=is_chain, has_probs=has_probs, heat=heat)
        together = session.run(None, case)
        for slot in range(len(case["tokens"])):
            alone = session.run(None, {n: a[slot : slot + 1] for n, a in case.items()})
            assert same(alone, [o[slot : slot + 1] for o in together])


@pytest.mark.distribution
@pytest.mark.parametrize(
    ("form", "sampled", "setting"),
    spread([((-1,), False), (CHAIN, False), (CHAIN, True), (TREE, True), (TREE, False)], SETTINGS, 2),
    ids=str,
)
def test_emitted_tokens_follow_the_target(session, form, sampled, setting):  # type: ignore[no-untyped-def]
    emitted = emit(form, sampled, setting, BATCH, decide_by_session(session))
    assert p_value(emitted, exact_joint(setting)) > 1e-3


@pytest.mark.distribution
def test_deterministic_drafts_do_not_change_the_text(session):
    plain = emit((-1,), False, SETTINGS[4], BATCH, decide_by_session(session))
    for form in (CHAIN, TREE):
        np.testing.assert_array_equal(emit(form, False, SETTINGS[4], BATCH, decide_by_session(session)), plain)


LOOKS_AHEAD = "Where(nodes == end_alive, weight, pass_inside)"
MUTANTS = {
    "chain accepts without the draft distribution": (
        CHAIN,
        "WalkProbs",
        " - Log(Max(double(chosen_at), double(1e-300)))",
        "",
    ),
    "chain forgets the residual": (CHAIN, "WalkProbs", "Where(is_rest, ", "Where(is_rest & ~is_rest, "),
    "chain takes the residual of a bonus": ((-1, 0), "WalkProbs", "is_rest = (end < end_alive) & ", "is_rest = "),
    "chain does not weigh its residual": (
        CHAIN,
        "WalkProbs",
        "Unsqueeze(float32(weight), [-1]) * target_probs",
        "target_probs",
    ),
    "chain does not look ahead": (CHAIN, "WalkProbs", LOOKS_AHEAD, "Identity(weight)"),
    "chain ends like a prefix": (CHAIN, "WalkProbs", LOOKS_AHEAD, "Identity(pass_inside)"),
    "chain's weights are not capped on the way": (
        CHAIN,
        "WalkProbs",
        "Max(ReduceMax(log_before, [-1], keepdims=0), double(0.0))",
        "Max(log_sum, double(0.0))",
    ),
    "tree is verified as if it had not been chosen": (TREE, "WalkProbs", "has_siblings = ", "has_siblings = 0 * "),
    "tree counts one draw too many": (TREE, "WalkProbs", "Max(num_children, 1)", "num_children + 1"),
    "tree chooses the lowest class": (TREE, "WalkProbs", "preference = ", "preference = 0 - "),
    "tree's factors are not by class": (TREE, "WalkProbs", "Where(is_above_0, factor_1, factor_0)", "factor_0"),
    "top_p counts the token itself": (
        TREE,
        "Warp",
        "CumSum(double(falling), 2, exclusive=1)",
        "CumSum(double(falling), 2)",
    ),
    "top_p ignores top_k": (TREE, "Warp", "masked = Where(is_cut_k & ", "masked = Where(is_cut_k & ~is_cut_k & "),
    "no temperature": (TREE, "Warp", "logits / Where(is_hot, heat, 1.0)", "logits"),
    "draw ignores what stands before the block": (
        TREE,
        "DrawInBlocks",
        "bound = double(Unsqueeze(uniforms, [-1])) * ",
        "bound = double(Unsqueeze(uniforms * uniforms, [-1])) * ",
    ),
}


@pytest.mark.mutant
@pytest.mark.distribution
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutated_body_is_noticed(mutant):
    form, name, right, wrong = MUTANTS[mutant]
    model = mutated(model_of("SpecVerify"), OPS[name], right, wrong)
    setting = SETTINGS[4]
    emitted = emit(form, True, setting, BATCH, decide_by_session(open_session(model)))
    assert p_value(emitted, exact_joint(setting)) < 1e-6


def test_greedy_verification_is_cheap():
    """No softmax, no sorting and no Loop run for a greedy chain: they are in branches not taken."""
    names = {n.op_type for n in OPS["SpecVerify"].function().node}
    assert names <= {"Constant", "ReduceMax", "Greater", "Shape", "Equal", "Squeeze", "Not", "And", "If"}
    taken = {n.op_type for name in ("Walk", "FirstMax", "FirstMaxInBlocks") for n in OPS[name].function().node}
    assert not taken & {"Softmax", "TopK", "Loop", "Expand"}


def test_a_known_vocabulary_leaves_no_branch():
    """Bodies made for 640 and 97 tokens hold no If, those for any vocabulary do."""
    for name in ("FirstMax", "Draw"):
        assert "If" in {n.op_type for n in OPS[name].function().node}
        assert "Pad" not in {n.op_type for n in OPS[name].function(640).node}
        for vocab in (640, 97):
            assert "If" not in {n.op_type for n in OPS[name].function(vocab).node}


def test_the_signature_is_that_of_the_function():
    for op in OPS.values():
        function = op.function()
        assert list(function.input) == [t.name for t in op.inputs]
        assert list(function.output) == [t.name for t in op.outputs]
        defaults = {a.name: helper.get_attribute_value(a) for a in function.attribute_proto}
        assert defaults == pytest.approx(dict(op.attributes), rel=1e-7)  # floats have 32 bits there
        assert {n.op_type for n in _all_nodes(function) if n.domain == DOMAIN} == set(op.uses)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-40, 1e-37, 3e-37, 1e-25, 2.0**-65])
@pytest.mark.parametrize("has_probs", [False, True])
def test_the_lowest_temperatures_are_greedy_in_twin_and_bodies(session, temperature, has_probs):
    case = verify_case(np.random.default_rng(3), 97, is_chain=False, has_probs=has_probs, heat="greedy")
    case["logits"] = (case["logits"] * 100).astype(np.float32)
    greedy = spec_verify(**case)
    cold = {**case, "temperature": np.full(len(case["tokens"]), temperature, np.float32)}
    assert same(spec_verify(**cold), greedy) or has_probs
    assert same(session.run(None, cold), spec_verify(**cold))
    names = {"vocab": 97, "draft_vocab": case["draft_probs"].shape[-1], "batch": len(case["tokens"])}
    pins = {**names, "nodes": case["tokens"].shape[1]}
    got = ReferenceEvaluator(body_model("SpecVerify", pins, max_nodes=pins["nodes"])).run(None, cold)
    assert same(got, spec_verify(**cold))
