# SPDX-License-Identifier: Apache-2.0
import asyncio
import contextlib
import threading

import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.runtime.service import ServiceOptions
from tests.serving.asgi_lab import ask, get, post
from tests.serving.mock_service import make_engine, serving, text_of

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def app():
    with serving() as (app, _, _):
        yield app


def error_of(reply, status):
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    [(key, error)] = reply.json().items()
    assert key == "error" and error.keys() == {"message", "type", "param", "code"}
    return error


def test_a_whole_answer(app):
    reply = post(app, PATH, {"model": "mock", "prompt": "bcd", "max_tokens": 12, "speculation": "on"})
    answer = reply.json()
    assert reply.status == 200 and answer["object"] == "text_completion" and answer["model"] == "mock"
    assert answer["id"].startswith("cmpl-") and answer["created"] > 0
    [choice] = answer["choices"]
    assert choice == {"index": 0, "text": text_of("bcd", 12), "logprobs": None, "finish_reason": "length"}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 12, 16)
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_several_prompts_and_outputs_are_numbered_prompt_by_prompt(app):
    prompts = ["bcd", "dab", [0, 1, 2, 3]]
    answer = post(app, PATH, {"prompt": ["bcd", "dab"], "n": 2, "max_tokens": 5}).json()
    wanted = [text_of(p, 5) for p in ("bcd", "bcd", "dab", "dab")]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == wanted
    assert answer["usage"]["prompt_tokens"] == 8 and answer["usage"]["completion_tokens"] == 20
    ids = post(app, PATH, {"prompt": prompts[2], "max_tokens": 5}).json()
    many = post(app, PATH, {"prompt": [prompts[2], [3, 0, 1]], "max_tokens": 5}).json()
    assert ids["choices"][0]["text"] == many["choices"][0]["text"] == text_of("bcd", 5)


def test_cached_tokens_are_those_of_every_prompt():
    with serving(slots=4) as (app, _, _):
        body = {"prompt": ["bcda" * 6, "dabc" * 6], "n": 2, "max_tokens": 2, "seed": 1}
        first, again = (post(app, PATH, body).json()["usage"] for _ in range(2))
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["prompt_tokens_details"]["cached_tokens"] == 2 * 23  # the last two tokens are read again


def test_a_seed_draws_the_same_text_and_no_seed_another(app):
    body = {"prompt": "b", "max_tokens": 30, "temperature": 3.0}
    drawn = [post(app, PATH, {**body, "seed": 5}).json()["choices"][0]["text"] for _ in range(2)]
    assert drawn[0] == drawn[1]
    params = SamplingParams(max_new_tokens=30, temperature=3.0, seed=5)
    offline = make_engine()[0].generate("b", params, speculative=False)
    assert drawn[0] == offline[0].text
    free = {post(app, PATH, body).json()["choices"][0]["text"] for _ in range(4)}
    assert len(free) == 4  # 24**30 texts
    several = {**body, "prompt": ["b"] * 4}
    assert len({choice["text"] for choice in post(app, PATH, several).json()["choices"]}) == 4
    seeded = post(app, PATH, {**several, "seed": 5}).json()["choices"]
    assert {choice["text"] for choice in seeded} == {drawn[0]}
    two = post(app, PATH, {**body, "seed": 5, "n": 2}).json()["choices"]
    assert two[0]["text"] == drawn[0] != two[1]["text"]
    assert post(app, PATH, {**body, "seed": -1}).status == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ignore_eos": True}, None),
        ({"ignore_eos": True, "min_tokens": 13}, "max_tokens of 12: raise it"),
        ({}, "add `ignore_eos: true`"),
        ({"ignore_eos": True, "stop": "b"}, "beside `stop` or `stop_token_ids`: leave these out"),
        ({"ignore_eos": True, "stop_token_ids": [1]}, "beside `stop` or `stop_token_ids`: leave these out"),
        ({"min_tokens": 0, "stop": "?"}, None),
    ],
)
def test_min_tokens_needs_texts_without_an_end(app, fields, message):
    """Load testers send both, so that answers have one length."""
    reply = post(app, PATH, {"prompt": "bcd", "max_tokens": 12, "min_tokens": 12, **fields})
    if message is None:
        assert reply.json()["usage"]["completion_tokens"] == 12
    else:
        error = error_of(reply, 400)
        assert error["param"] == "min_tokens" and message in error["message"]


def test_many_prompts_have_one_place_in_the_queue():
    with serving(service_options=ServiceOptions(max_queue=2)) as (app, service, _):
        answer = post(app, PATH, {"prompt": ["bcd"] * 65, "max_tokens": 2})
        assert answer.status == 200 and len(answer.json()["choices"]) == 65
        assert {choice["text"] for choice in answer.json()["choices"]} == {text_of("bcd", 2)}
        error = error_of(post(app, PATH, {"prompt": ["b", "c", [99]], "max_tokens": 2}), 400)
        assert error["param"] == "prompt" and service.stats()["num_requests"] == 1


def test_a_stop_string_ends_the_text_before_it(app):
    whole = text_of("bcd", 20)
    stop = whole[6:8]
    reply = post(app, PATH, {"prompt": "bcd", "max_tokens": 20, "stop": stop}).json()
    assert reply["choices"][0]["text"] == whole[: whole.index(stop)]
    assert reply["choices"][0]["finish_reason"] == "stop"
    many = post(app, PATH, {"prompt": "bcd", "max_tokens": 20, "stop": ["??", stop]}).json()
    assert many["choices"][0]["text"] == reply["choices"][0]["text"]


def test_speculation_can_be_switched_off_and_stats_asked_for(app):
    body = {"prompt": "bcd", "max_tokens": 20, "return_stats": True}
    plain = post(app, PATH, {**body, "speculation": "off"}).json()
    fast = post(app, PATH, {**body, "speculation": "on"}).json()
    assert plain["choices"][0]["text"] == fast["choices"][0]["text"]
    assert plain["choices"][0]["stats"]["num_draft_tokens"] == 0
    assert fast["choices"][0]["stats"]["num_steps"] < plain["choices"][0]["stats"]["num_steps"] == 19
    details = plain["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_a_stream_gives_the_same_text_and_its_usage(app):
    body = {"prompt": "bcd", "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
    reply = post(app, PATH, body)
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    *events, usage, done = reply.events()
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
    assert {event["id"] for event in events} == {usage["id"]}
    assert all(event["usage"] is None for event in events)
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == text_of("bcd", 12)
    assert [c["finish_reason"] for c in choices][-1] == "length"
    assert all(c["finish_reason"] is None for c in choices[:-1])
    assert len(choices) > 3, "it came in several chunks"
    plain = post(app, PATH, {**body, "stream_options": None}).events()
    assert plain[-1] == "[DONE]" and all("usage" not in event for event in plain[:-1])


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_field"),
        ({"prompt": 5}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": "b" * 80}, "prompt", "context_length_exceeded"),
        ({"prompt": [99]}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["b"] * 129}, "prompt", "invalid_value"),
        ({"prompt": ["b"] * 65, "n": 2}, "prompt", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"timeout_s": 0}, "timeout_s", "invalid_value"),
        ({"speculation": "perhaps"}, "speculation", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"3": 1, "03": 5}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream_options": {"extra": True}}, "stream_options.extra", "unknown_field"),
        ({"frequency": 1}, "frequency", "unknown_field"),
        ({"logprobs": 30}, "logprobs", "invalid_value"),
        ({"best_of": 2}, "best_of", "unsupported_field"),
        ({"suffix": "b"}, "suffix", "unsupported_field"),
        ({"suffix": "x"}, "suffix", "unsupported_field"),
        ({"min_tokens": 1}, "min_tokens", "unsupported_field"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(app, change, param, code):
    error = error_of(post(app, PATH, {"prompt": "b", **change}), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param.partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ([], None, "The body: got []; expected an object. Correct it."),
        ({"prompt": [1, "a"]}, "prompt", "`prompt`: got [1, 'a']; expected a text, or a whole number in a list, or "),
        ({"prompt": ["b" * 1000, 3]}, "prompt", "bbb...; expected a text, or "),
        ({"prompt": "b", "stop_token_ids": ["b"]}, "stop_token_ids.0", "got 'b'; expected a whole number. Correct it."),
        ({"prompt": "b", "logprobs": 30}, "logprobs", "`logprobs`: got 30; expected less than or equal to 20."),
    ],
)
def test_what_was_got_and_expected_is_said_in_our_words(app, body, param, message):
    error = error_of(post(app, PATH, body), 400)
    assert error["param"] == param and message in error["message"]


def test_fields_that_ask_for_nothing_may_be_there(app):
    neutral = {"logprobs": None, "best_of": 1, "echo": False, "suffix": "", "user": "me", "top_k": -1, "store": False}
    assert post(app, PATH, {"prompt": "b", "max_tokens": 1, **neutral}).status == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"[" * 100_000, b'{"prompt": "\xff"}', b'{"temperature": NaN}']
)
def test_what_is_no_json_object_is_refused(app, body):
    error = error_of(post(app, PATH, body), 400)
    assert error["type"] == "invalid_request_error"


def test_another_model_is_not_found(app):
    assert error_of(post(app, PATH, {"model": "gpt", "prompt": "b"}), 404)["code"] == "model_not_found"
    assert get(app, "/v1/models/mock").json()["id"] == "mock"
    assert error_of(get(app, "/v1/models/gpt"), 404)["param"] == "model"
    [model] = get(app, "/v1/models").json()["data"]
    assert model["object"] == "model" and model["max_model_len"] == 64
    assert error_of(get(app, "/v1/nothing"), 404)["type"] == "not_found_error"
    assert error_of(get(app, PATH), 405)["type"] == "invalid_request_error"


def test_a_full_queue_says_when_to_come_back():
    async def run(app, service, gated):
        gated.gate.clear()
        first = asyncio.ensure_future(ask(app, "POST", PATH, {"prompt": "b", "max_tokens": 3}))
        while not await asyncio.to_thread(lambda: service._scheduler.has_work):
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(ask(app, "POST", PATH, {"prompt": "c", "max_tokens": 3}))
        await asyncio.sleep(0.05)
        refused = await ask(app, "POST", PATH, {"prompt": "d", "max_tokens": 3})
        streamed = await ask(app, "POST", PATH, {"prompt": "d", "max_tokens": 3, "stream": True})
        several = await ask(app, "POST", PATH, {"prompt": ["d", "e"], "max_tokens": 3})
        gated.gate.set()
        return refused, streamed, several, await first, await second

    with serving(service_options=ServiceOptions(max_queue=1)) as (app, service, gated):
        *refused, first, second = asyncio.run(run(app, service, gated))
    for reply in refused:
        error = error_of(reply, 429)
        assert error["code"] == "server_busy" and reply.headers["Retry-After".lower()] == "1"
    assert first.json()["choices"][0]["text"] == text_of("b", 3)
    assert second.json()["choices"][0]["text"] == text_of("c", 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(stream):
    async def run(app, service, gated):
        gated.gate.clear()
        body = {"prompt": "b", "max_tokens": 50, "stream": stream, "n": 2}
        reply = await ask(app, "POST", PATH, body, hang_up_after=0)
        gated.gate.set()
        return reply

    with serving() as (app, service, gated):
        asyncio.run(run(app, service, gated))
        stats = service.stats()
        while stats["num_active"] or stats["num_queued"]:
            stats = service.stats()
        assert stats["num_finished"] == {"cancelled": 2}
        assert post(app, PATH, {"prompt": "b", "max_tokens": 3}).json()["choices"][0]["text"] == text_of("b", 3)


def test_a_stream_that_is_read_in_part_ends_its_request():
    with serving(max_seq=2000) as (app, service, _):
        body = {"prompt": "b", "max_tokens": 1900, "stream": True}
        reply = asyncio.run(ask(app, "POST", PATH, body, hang_up_after=3))
        assert reply.status == 200 and b"[DONE]" not in reply.body
        assert service.stats()["num_finished"] == {"cancelled": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_ends_the_request_with_an_error(stream):
    with serving() as (app, _, gated):
        gated.fault = RuntimeError("out of memory")
        reply = post(app, PATH, {"prompt": "bcd", "max_tokens": 5, "stream": stream})
        if stream:
            *_, last, done = reply.events()
            assert reply.status == 200 and done == "[DONE]"
            error = last["error"]
        else:
            error = error_of(reply, 500)
        assert error["type"] == "server_error" and "out of memory" in error["message"]
        gated.fault = None
        assert post(app, PATH, {"prompt": "b", "max_tokens": 3}).json()["choices"][0]["text"] == text_of("b", 3)


def test_request_timeout_is_an_error():
    with serving() as (app, _, gated):
        gated.gate.clear()
        timer = threading.Timer(0.2, gated.gate.set)
        timer.start()
        error = error_of(post(app, PATH, {"prompt": "b", "max_tokens": 5, "timeout_s": 0.05}), 504)
        assert error["type"] == "timeout_error"
        timer.join()


def test_shutdown_refuses_requests():
    with serving() as (app, service, _):
        for reply in (get(app, "/health"), get(app, "/ping"), post(app, "/ping", {})):
            assert reply.json() == {"status": "ok", "model": "mock"}
        service.close()
        for fields in ({}, {"guided_regex": "a"}):
            reply = post(app, PATH, {"prompt": "b", **fields})
            assert error_of(reply, 503)["code"] == "shutting_down" and reply.headers["retry-after"] == "1"
        for health in (get(app, "/health"), post(app, "/ping", {})):
            assert health.status == 503 and health.json()["status"] == "shutting down"


def test_internal_error_is_json_without_details(monkeypatch):
    with serving() as (app, service, _):
        monkeypatch.setattr(service, "submit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # the server's log gets it
            post(app, PATH, {"prompt": "b"})
        reply = asyncio.run(ask_and_catch(app))
        error = error_of(reply, 500)
        assert error["code"] == "internal_error" and "zero" not in error["message"]


async def ask_and_catch(app):
    """Returns the answer of an application that raises after it."""

    async def caught(scope, receive, send):
        with contextlib.suppress(ZeroDivisionError):
            await app(scope, receive, send)

    return await ask(caught, "POST", PATH, {"prompt": "b"})


def test_no_value_of_a_field_ends_the_server():
    """Among them one that ended it: top_k = 2**63."""
    body = {"prompt": "bcd", "max_tokens": 4, "temperature": 1}
    with serving() as (app, service, _):
        for field, value in (
            ("top_k", 2**63),
            ("top_k", 2**31),
            ("top_p", 1e-300),
            ("temperature", 1e-300),
            ("temperature", 1e300),
            ("repetition_penalty", 1e-300),
            ("repetition_penalty", 1e300),
            ("seed", 2**64),
            ("seed", -(2**70)),
            ("max_tokens", 2**70),
            ("logit_bias", {str(2**63): 1}),
            ("stop_token_ids", [2**63]),
        ):
            reply = post(app, PATH, {**body, field: value})
            assert reply.status in (200, 400), reply.body
            if field == "top_k":
                assert "2**31 - 1" in error_of(reply, 400)["message"]
            after = post(app, PATH, {"prompt": "bcd", "max_tokens": 6}).json()
            assert after["choices"][0]["text"] == text_of("bcd", 6)
        assert get(app, "/health").status == 200 and service.stats()["num_engine_faults"] == 0


def test_logits_that_are_not_finite_are_reported():
    with serving() as (app, service, gated):
        gated.bad = 15
        error = error_of(post(app, PATH, {"prompt": [1, 15, 2], "max_tokens": 4}), 500)
        assert "not finite" in error["message"]
        after = post(app, PATH, {"prompt": "bcd", "max_tokens": 6}).json()
        assert after["choices"][0]["text"] == text_of("bcd", 6)
        assert service.fault is None
