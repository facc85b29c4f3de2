# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of verification give the verdicts of the numpy twins, in the same bits whatever runs beside them."""

import itertools
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
import pytest

from speccompile.backends.onnxruntime.engine import FAULTS
from speccompile.ops.finite_token import finite_token
from speccompile.ops.spec_verify import spec_verify
from tests.core.distribution_lab import CHAIN, SETTINGS, TREE, decide_by_session, emit, exact_joint, p_value, spread
from tests.lab.graphs import open_session
from tests.ops.op_lab import Case, check_unread_parent, model_of, same, verify_case
from tests.ops.test_finite_token import VALUES, case_of
from tests.plugins.cases import assert_same, wide_case
from tests.plugins.cpu_lab import library, library_for, needs_compiler
from tests.plugins.verify_cases import KINDS, WARP_CASES, empty_residual_case, one_warp_case, warp_case

pytestmark = [needs_compiler, pytest.mark.plan]


def open_op(name: str, threads: int = 1) -> ort.InferenceSession:
    return open_session(model_of(name), library(), threads)


@pytest.fixture(scope="module")
def session() -> ort.InferenceSession:
    return open_op("SpecVerify")


def part(case: Case, slots: Sequence[int]) -> Case:
    return {name: array[list(slots)] for name, array in case.items()}


@pytest.mark.parametrize("vocab", [2, 5, 64, 97, 300, 1300])
@pytest.mark.parametrize("variant", ["native", "avx2", "portable"])
def test_random_cases_are_decided_as_by_the_twin(variant, vocab):
    session, rng = open_session(model_of("SpecVerify"), library_for(variant)), np.random.default_rng(vocab)
    num_excused = num_accepted = 0
    for number in range(96):
        heat, is_chain, has_probs = KINDS[number % len(KINDS)]
        case = verify_case(rng, vocab, is_chain=is_chain, has_probs=has_probs, heat=heat)
        num_excused += assert_same(lambda case: session.run(None, case), case)
        num_accepted += int(spec_verify(**case)[1].sum())
    assert num_excused <= 1
    assert num_accepted > 96  # the cases do reach beyond the root


@pytest.mark.parametrize(("vocab", "kind", "has_probs"), WARP_CASES)
def test_extreme_cases_are_decided_as_by_the_twin(session, vocab, kind, has_probs):
    """Ties, equal logits, one token, masks; every temperature, top-k and top-p; draws at both ends."""
    assert_same(lambda given: session.run(None, given), warp_case(vocab, kind, has_probs))


@pytest.mark.parametrize(("vocab", "temperature"), [(50257, 0.0), (50257, 1.0), (128256, 1.0)])
def test_large_vocabularies_on_several_threads(vocab, temperature):
    sessions = [open_op("SpecVerify", threads) for threads in (1, 2)]
    rng = np.random.default_rng(vocab)
    for cuts in ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 2000, "top_p": 0.5}):
        case = wide_case(rng, vocab, 2, (-1, 0, 1), spread=2.0, dtype="float32", temperature=temperature, **cuts)
        for slots in ((0, 1), (0,), (1,)):
            some = part(case, slots)
            one, two = (run.run(None, some) for run in sessions)
            assert same(one, two)
            assert_same(lambda given: sessions[0].run(None, given), some)


def test_a_slot_does_not_depend_on_its_batch():
    """Slots of the large vocabulary run on two threads, one alone has its rows cut between them."""
    session, rng = open_op("SpecVerify", 2), np.random.default_rng(4)
    cases = [verify_case(rng, 300, is_chain=c, has_probs=p, heat=heat) for heat, c, p in KINDS]
    cases += [one_warp_case(rng, 40000, 4, 3, temperature=heat, top_p=0.8) for heat in (0.0, 1.0)]
    for case in cases:
        together = session.run(None, case)
        for slot in range(len(case["tokens"])):
            assert same(session.run(None, part(case, [slot])), [o[slot : slot + 1] for o in together])


@pytest.mark.parametrize("has_probs", [False, True])
def test_masked_tokens_are_never_drawn(session, has_probs):
    """Whatever the draw, also at the ends of chunks and of the vocabulary."""
    for vocab in (7, 256, 257, 1000):
        case = one_warp_case(np.random.default_rng(vocab), vocab, 2048, 2, temperature=1.5)
        allowed = np.arange(vocab) % 5 == 2
        case["logits"][..., ~allowed] = -np.inf
        case["uniforms"][:, 0, 1] = np.linspace(0, 1 - 2**-24, 2048, dtype=np.float32)
        case["tokens"][:, 1] = 3  # masked: it is always refused
        if has_probs:
            case["draft_probs"] = np.full((2048, 2, vocab), 1 / vocab, np.float32)
        path, num_accepted, drawn = session.run(None, case)
        assert allowed[drawn].all() and not num_accepted.any() and (path[:, 1] == -1).all()
        assert set(np.flatnonzero(allowed)) == set(drawn.tolist())


def test_an_unread_parent_of_the_root(session):
    check_unread_parent(session)


def test_nothing_is_left_of_a_target_equal_to_its_draft(session):
    """Both candidates are refused, and the target's token follows."""
    assert [o.tolist() for o in session.run(None, empty_residual_case())] == [[[0, -1, -1]], [0], [2]]


def test_a_draft_is_refused_where_the_draw_meets_the_bound(session):
    """Accepted is u * draft < target: 0.5 of the target's 0.5 is not below it."""
    case = one_warp_case(np.random.default_rng(0), 4, 2, 2, temperature=1.0)
    case["logits"][:] = [0, 0, -1e4, -1e4]
    case["tokens"][:], case["draft_probs"] = 0, np.zeros((2, 2, 4), np.float32)
    case["draft_probs"][..., 0] = 1
    case["uniforms"][:, 1, 0] = [0.5, 0.5 - 2**-24]
    assert session.run(None, case)[1].tolist() == [0, 1] == spec_verify(**case)[1].tolist()


@pytest.mark.parametrize("temperature", [1e-40, 1e-25, 2.0**-65])
@pytest.mark.parametrize("has_probs", [False, True])
def test_the_lowest_temperatures_are_greedy(session, temperature, has_probs):
    case = verify_case(np.random.default_rng(3), 97, is_chain=False, has_probs=has_probs, heat="greedy")
    case["logits"] = (case["logits"] * 100).astype(np.float32)
    cold = {**case, "temperature": np.full(len(case["tokens"]), temperature, np.float32)}
    assert same(session.run(None, cold), spec_verify(**cold))


@pytest.mark.distribution
@pytest.mark.parametrize(
    ("form", "sampled", "setting"), spread([(CHAIN, True), (TREE, True), (TREE, False)], SETTINGS, 2), ids=str
)
def test_emitted_tokens_follow_the_target(session, form, sampled, setting):
    emitted = emit(form, sampled, setting, 20000, decide_by_session(session))
    assert p_value(emitted, exact_joint(setting)) > 1e-3


@pytest.mark.distribution
def test_deterministic_drafts_do_not_change_the_text(session):
    plain = emit((-1,), False, SETTINGS[4], 20000, decide_by_session(session))
    for form in (CHAIN, TREE):
        np.testing.assert_array_equal(emit(form, False, SETTINGS[4], 20000, decide_by_session(session)), plain)


# A parent is compared, never an index; a token is one only where drafts have distributions.
@pytest.mark.parametrize("value", [-1, 97, 1 << 40, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hostile_trees_read_nothing_outside(session, value, temperature):
    case = one_warp_case(np.random.default_rng(1), 97, 2, 4, temperature=temperature)
    case["parents"][:] = [-1, 0, 1, 2]
    case["parents"][1, 1:] = max(value, 4) if value > 0 else value
    assert session.run(None, case)[1][1] == 0
    case["parents"][1, 1:] = 0
    case["tokens"][1, 2] = value
    path, num_accepted, drawn = session.run(None, case)
    assert 2 not in path[1] and (drawn >= 0).all() and (drawn < 97).all() and (num_accepted < 4).all()
    case["draft_probs"] = np.full((2, 4, 97), 1 / 97, np.float32)
    with pytest.raises(FAULTS, match=rf"SpecVerify: token {value} of slot 1, node 2, expected 0 to 96"):
        session.run(None, case)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("logits", (2, 0, 97)),
        ("logits", (2, 4, 0)),
        ("tokens", (2, 3)),
        ("parents", (1, 4)),
        ("draft_probs", (2, 4, 96)),
        ("draft_probs", (2, 3, 1)),
        ("draft_probs", (2, 4, 0)),
        ("uniforms", (2, 4, 1)),
        ("temperature", (1,)),
        ("top_k", (3,)),
        ("top_p", (0,)),
    ],
)
def test_tensors_of_other_dims_are_refused(session, name, shape):
    model = model_of("SpecVerify")
    for value in model.graph.input:  # ONNX Runtime itself compares named dims
        value.type.tensor_type.ClearField("shape")
    case = one_warp_case(np.random.default_rng(1), 97, 2, 4, temperature=1.0)
    case[name] = np.zeros(shape, case[name].dtype)
    with pytest.raises(FAULTS, match=f"SpecVerify: .*{name} has dims"):
        open_session(model, library()).run(None, case)


@pytest.mark.parametrize("vocab", [5, 16, 64, 1000])
@pytest.mark.parametrize("name", VALUES)
def test_slots_with_a_row_that_is_not_finite_get_no_token(vocab, name):
    case = case_of(vocab, VALUES[name])
    wanted = [0, 1, 2, 3] if name == "masked" else [0, -1, 2, -1]
    [got] = open_op("FiniteToken").run(None, case)
    assert got.dtype == np.int64 and got.tolist() == wanted


def test_long_rows_are_checked_on_several_threads():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 4, 128_256)).astype(np.float32)
    logits[1, 3, -1], tokens = np.nan, np.array([5, 6, 7])
    for threads in (1, 2):
        [got] = open_op("FiniteToken", threads).run(None, {"logits": logits, "next_token": tokens})
        assert got.tolist() == [5, -1, 7] == finite_token(logits, tokens)[0].tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("has_probs", [False, True])
def test_rows_that_are_not_finite_still_give_a_token_of_the_vocabulary(session, value, has_probs):
    """FiniteToken replaces it; nothing is read or written outside, and no search runs on."""
    for heat, fraction, cut in itertools.product((0.0, 1.0), (0.5, 1.0), (0, 3)):
        case = one_warp_case(
            np.random.default_rng(1), 700, 4, 3, temperature=heat, top_k=cut, top_p=0.7 if cut else 1.0
        )
        case["logits"][np.random.default_rng(2).random(case["logits"].shape) < fraction] = value
        if has_probs:
            case["draft_probs"] = np.full((4, 3, 700), 1 / 700, np.float32)
        path, num_accepted, drawn = session.run(None, case)
        assert (drawn >= 0).all() and (drawn < 700).all() and (path < 3).all() and (num_accepted < 3).all()
