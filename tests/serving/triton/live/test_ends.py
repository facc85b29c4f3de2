# SPDX-License-Identifier: Apache-2.0
"""Requests that do not end well: cancelled, wrong, too late, too many."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bench.triton_server import post, serving
from tests.serving.triton.live.clients import GrpcStream, Sse, settled_metrics, text_of, wait_until

LONG = {"max_tokens": 950, "ignore_eos": True, "speculation": "off"}


def generate(server, **body):
    return post(f"{server.url}/v2/models/speccompile/generate", body)


def cancelled(server):
    return server.metrics()["speccompile_cancelled_total"]


def test_a_cancelled_grpc_stream_ends_the_request(server, prompts):
    before = cancelled(server)
    stream = GrpcStream(server, {"text_input": prompts[0], "stream": True, **LONG})
    assert text_of(next(stream.results()))
    stream.cancel()
    wait_until(lambda: cancelled(server) == before + 1, "a cancelled output")
    assert settled_metrics(server)["speccompile_active"] == 0


def test_a_client_that_leaves_an_sse_stream_ends_the_request(server, prompts):
    before = cancelled(server)
    stream = Sse(server, {"text_input": prompts[0], **LONG})
    assert next(stream.events())["text_output"]
    stream.close()
    wait_until(lambda: cancelled(server) == before + 1, "a cancelled output")
    assert settled_metrics(server)["speccompile_active"] == 0


def test_the_others_go_on_when_one_is_cancelled(server, prompts, offline):
    [wanted] = offline(prompts[1:2], 200)
    with ThreadPoolExecutor(1) as pool:
        doomed = GrpcStream(server, {"text_input": prompts[0], "stream": True, **LONG})
        next(doomed.results())
        other = pool.submit(generate, server, text_input=prompts[1], max_tokens=200, exclude_input_in_output=True)
        doomed.cancel()
        assert other.result()[1]["text_output"] == wanted["text"]


WRONG = [
    ({"text_input": "x", "max_tokens": 0}, "SamplingParams.max_new_tokens: got 0"),
    ({"text_input": "x", "temperature": -1.0}, "SamplingParams.temperature: got -1.0"),
    ({"text_input": "x", "top_p": 1.5}, "SamplingParams.top_p: got 1.5"),
    ({"text_input": "x", "speculation": "maybe"}, "Request.speculation: got 'maybe'"),
    ({"text_input": "x", "num_return_sequences": 0}, "Request.num_outputs: got 0"),
    ({"text_input": "x", "timeout_s": 0.0}, "Request.timeout_s: got 0.0"),
    ({"text_input": "x", "seed": 1, "random_seed": 2}, "two different values"),
    ({"text_input": "x", "beam_width": 4}, "beam_width: got a field or parameter that the model does not know"),
    ({"text_input": "", "max_tokens": 3}, "at least one"),
    ({"text_input": "x " * 3000}, "at most 1024"),
    ({"input_ids": [1, 999999]}, "token 999999"),
    ({"max_tokens": 3}, "text_input, input_ids: got neither"),
    ({"text_input": "x", "input_ids": [1]}, "text_input, input_ids: got both"),
    ({"text_input": "x", "max_tokens": "many"}, "signed-integer"),
    ({"text_input": ["x", "y"]}, "text_input"),
]


@pytest.mark.parametrize(("body", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_request_gets_the_reason(server, body, message):
    status, answer = generate(server, **body)
    assert status == (500 if body.get("max_tokens") == "many" else 400)  # that one Triton itself refuses
    assert message in answer["error"]


def test_text_that_is_not_utf8_is_refused_over_grpc(server):
    stream = GrpcStream(server, {"text_input": np.array([b"ab\xff"], dtype=np.object_), "max_tokens": 3})
    with pytest.raises(Exception, match="byte 2 is not UTF-8"):
        list(stream.results())
    stream.close()


def test_failed_stream_ends_with_an_error(server, prompts, offline):
    [whole] = offline(prompts[:1], 950, "--plain")
    for limit in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6):  # one of them lies between the first step output and the last
        stream = Sse(server, {"text_input": prompts[0], **LONG, "timeout_s": limit})
        assert stream.status in (200, 400)
        *step_outputs, last = stream.events() if stream.status == 200 else [{"error": ""}]
        stream.close()
        if step_outputs and "error" in last:
            break
    assert "took longer than its time-out" in last["error"]
    text = "".join(step_output["text_output"] for step_output in step_outputs)
    assert 0 < len(text) < len(whole["text"]) or whole["finish_reason"] == "stop"
    assert whole["text"].startswith(text) or text.startswith(whole["text"])


@pytest.mark.parametrize(("value", "status"), [(-3, "INVALID_ARGUMENT"), (3, None)])
def test_grpc_gives_an_error_a_status_where_it_is_asked_to(server, value, status):
    values = {"text_input": "x", "max_tokens": value, "stream": True}
    stream = GrpcStream(server, values, headers={"triton_grpc_error": "true"})
    if status is None:
        assert list(stream.results())
    else:
        with pytest.raises(Exception, match=r"SamplingParams\.max_new_tokens: got -3") as fault:
            list(stream.results())
        assert status in str(fault.value.status())
    stream.close()


def test_a_full_queue_refuses_at_once_and_the_rest_is_served(launcher, write_models, prompts, tmp_path):
    models = write_models("--link", "--max-queue", "1", "--name", "small")
    with serving(launcher, models, tmp_path / "log") as server:
        body = {"text_input": prompts[0], "max_tokens": 300, "ignore_eos": True}
        with ThreadPoolExecutor(32) as pool:
            done = list(pool.map(lambda _: post(f"{server.url}/v2/models/small/generate", body), range(32)))
        served = [answer["text_output"] for status, answer in done if status == 200]
        refused = [answer["error"] for status, answer in done if status != 200]
        assert served and len(set(served)) == 1
        assert refused and all("Send the request again later" in error for error in refused)
        status, answer = post(f"{server.url}/v2/models/small/generate", {**body, "max_tokens": 3})
        assert status == 200 and answer["text_output"].startswith(prompts[0])
        assert settled_metrics(server)["speccompile_refused_total"] == len(refused)
