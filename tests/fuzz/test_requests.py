# SPDX-License-Identifier: Apache-2.0
"""Requests with any values of their fields: each is answered or refused with an error of four parts.

None harms a later one.

`FUZZ_CASES` says how many; `make fuzz` asks for more than the suite does.
"""

import math
import os
import threading

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from speccompile.core.sampling import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.control import FixedLength
from speccompile.runtime.requests import Request
from speccompile.runtime.service import Service
from tests.mock_lm import VOCAB
from tests.runtime.test_not_finite import BAD, make_engine
from tests.runtime.test_spec_engine import TARGET

CASES = int(os.environ.get("FUZZ_CASES", "40"))
CLEAN = [0, 1, 2]
WANTED = TARGET.greedy(CLEAN, 8)
SAMPLED = SamplingParams(max_new_tokens=8, temperature=0.8, top_k=9, top_p=0.9, seed=11)
REASONS = {"stop", "length", "cache_full", "error"}


def _floats(*bounds: float) -> st.SearchStrategy[float]:
    """Without subnormal ones: ONNX Runtime lets its threads take these for 0, and hypothesis notices."""
    return st.floats(*bounds, allow_subnormal=False)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**5000, -1, 0, 1]),
    _floats(),
    st.lists(st.integers(-3, VOCAB + 3), max_size=3),
    st.binary(max_size=3),
)
TINY = st.sampled_from([0.0, 5e-324, 1e-300, 1e-46, 1e-45, 1e-39, 1e-37, 2.0**-64, 1e-19, 1e-10, 1e-3, 1.0, 2.0])
HEATS = st.one_of(TINY, _floats(0, 3), st.sampled_from([1e20, 1e30, 1e39, 1e300, 1.7e308]))
TOKENS = st.integers(0, VOCAB - 1)
FIELDS = {
    "temperature": HEATS,
    "top_k": st.one_of(st.integers(0, VOCAB + 2), st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63])),
    "top_p": st.one_of(_floats(0, 1), TINY),
    "seed": st.integers(0, 2**64),
    "min_p": st.one_of(_floats(0, 1), TINY),
    "repetition_penalty": st.one_of(_floats(0.5, 2), TINY, st.sampled_from([1e30, 1e39, 1e300])),
    "presence_penalty": _floats(-2, 2),
    "frequency_penalty": _floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB + 1), _floats(-100, 100), max_size=4),
    "stop": st.lists(st.text("abcdeåx", max_size=3), max_size=3).map(tuple),
    "stop_token_ids": st.lists(st.integers(-2, 2**64), max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "max_new_tokens": st.one_of(st.integers(1, 70), st.sampled_from([2**31, 2**63, 10**20])),
}


@st.composite
def requests(draw) -> dict:
    """Returns fields of SamplingParams: mostly those that are allowed or nearly so, one of any kind now and then."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=6))
    given_fields = {"max_new_tokens": draw(st.integers(1, 12))} | {name: draw(FIELDS[name]) for name in names}
    if draw(st.integers(0, 3)) == 0:
        given_fields[draw(st.sampled_from(sorted(FIELDS)))] = draw(ODD)
    return given_fields


PROMPTS = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=60), st.lists(st.integers(-2, VOCAB + 2), max_size=5), st.just([BAD] * 3)
)
BOUNDED = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def params_or_refusal(fields: dict) -> SamplingParams | None:
    """Returns the parameters; None where the fields are refused, which must be a short error with four parts."""
    try:
        return SamplingParams(**fields)
    except RuntimeFault as fault:
        check_refusal(fault, "SamplingParams.")
        return None


def check_refusal(fault: RuntimeFault, where: str = "prompt") -> None:
    """Four parts, and short."""
    assert fault.where.startswith(where) and fault.expected and fault.todo
    assert len(str(fault)) < 600


def check_result(reason: str, tokens: list[int], error: str | None, params: SamplingParams) -> None:
    assert reason in REASONS and all(0 <= token < VOCAB for token in tokens)
    assert len(tokens) <= params.max_new_tokens
    if reason == "error":
        assert error is not None and "not finite" in error, error


@pytest.fixture(scope="module", params=["chain", "tree", "ngram"])
def engine(request):
    return make_engine(request.param, bad_target=True, bad_draft=True)


@pytest.fixture(scope="module")
def service():
    made = make_engine("chain", bad_target=True, bad_draft=True)
    for one in made.engines:
        one.voids_moved = False  # prompts that begin alike are copied
    running = Service(made, planner=FixedLength())
    running.start()
    yield running
    running.close()


@seed(1)
@BOUNDED
@given(fields=requests(), prompts=st.lists(PROMPTS, min_size=1, max_size=4))
def test_after_any_call_an_engine_answers_as_a_fresh_one(engine, fields, prompts):
    params = params_or_refusal(fields)
    if params is not None:
        try:
            results = engine.generate([*prompts, CLEAN], [params] * len(prompts) + [SamplingParams(max_new_tokens=8)])
        except RuntimeFault as fault:
            check_refusal(fault)
        else:
            for result in results[:-1]:
                check_result(result.finish_reason, result.tokens, result.error, params)
            assert results[-1].tokens == WANTED
    assert [g.tokens for g in engine.generate([CLEAN] * 3, SamplingParams(max_new_tokens=8))] == [WANTED] * 3


PLAIN = make_engine("plain", bad_target=False).generate([CLEAN], SAMPLED)[0].tokens


@seed(2)
@BOUNDED
@given(
    many=st.lists(st.tuples(requests(), PROMPTS), min_size=1, max_size=4),
    speculation=st.sampled_from(["auto", "on", "off"]),
)
def test_after_any_request_a_service_answers_as_a_fresh_one(service, many, speculation):
    waits = []
    for fields, prompt in many:
        params = params_or_refusal(fields)
        if params is None:
            continue
        try:
            waits.append((params, ask(service, prompt, params, speculation)))
        except RuntimeFault as fault:
            check_refusal(fault)
    clean = [ask(service, CLEAN, SamplingParams(max_new_tokens=8), speculation) for _ in range(3)]
    drawn = ask(service, CLEAN, SAMPLED, speculation)
    for params, wait in waits:
        check_result(*wait(), params)
    assert [wait()[1] for wait in clean] == [WANTED] * 3
    assert drawn()[1] == PLAIN
    assert service.fault is None and service.stats()["num_engine_faults"] == 0


def ask(service: Service, prompt: list[int], params: SamplingParams, speculation: str):
    """Submit; the result waits for (finish reason, tokens, error)."""
    step_outputs, done = [], threading.Event()

    def take(step_output):
        step_outputs.append(step_output)
        if step_output.finish_reason is not None:
            done.set()

    service.submit(Request(prompt, params, speculation=speculation), take)

    def wait():
        assert done.wait(20), "a request without an end"
        return step_outputs[-1].finish_reason, [t for p in step_outputs for t in p.tokens], step_outputs[-1].error

    return wait


@seed(3)
@BOUNDED
@given(fields=st.dictionaries(st.sampled_from(sorted(FIELDS)), ODD, max_size=4))
def test_values_of_any_kind_are_taken_or_refused_in_words(fields):
    params = params_or_refusal(fields)
    if params is not None:
        assert isinstance(params.top_k, int) and math.isfinite(params.temperature)
        assert hash(params) is not None
