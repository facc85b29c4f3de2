# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.triton_server import post
from tests.serving.triton.live.clients import GrpcStream, Sse, settled_metrics, stream_text, text_of, wait_until

NUM_TOKENS = 100
ACCENTS = [
    "# é é é é é é é é é é é é",
    'table = {"→": "→", "→": "→", "→": "→", "',
    "'é', 'è', 'ê', 'ë', 'é', 'è', 'ê', 'ë', 'é', 'è', ",
]


@pytest.fixture(scope="module")
def texts(offline, prompts):
    return [result["text"] for result in offline(prompts, NUM_TOKENS)]


def generate(server, **body):
    return post(f"{server.url}/v2/models/speccompile/generate", body)


def test_generate_gives_the_prompt_and_the_offline_text(server, prompts, texts):
    status, answer = generate(server, text_input=prompts[0], max_tokens=NUM_TOKENS)
    assert status == 200
    assert answer == {"model_name": "speccompile", "model_version": "1", "text_output": prompts[0] + texts[0]}
    _, answer = generate(server, text_input=prompts[0], max_tokens=NUM_TOKENS, exclude_input_in_output=True)
    assert answer["text_output"] == texts[0]


def test_flags_bring_counts_and_times(server, prompts, offline):
    flags = ("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")
    [wanted] = offline(prompts[1:2], 40)
    wish = {"speculation": "on", **dict.fromkeys(flags, True)}  # what `auto` does depends on the machine
    _, answer = generate(server, text_input=prompts[1], max_tokens=40, **wish)
    assert answer["text_output"] == prompts[1] + wanted["text"]
    assert answer["finish_reason"] == wanted["finish_reason"]
    assert answer["num_output_tokens"] == len(wanted["tokens"])
    accepted, drafted = answer["total_accepted_draft_tokens"], answer["total_draft_tokens"]
    assert 0 < accepted <= drafted
    assert answer["acceptance_rate"] == pytest.approx(accepted / drafted)
    assert answer["mean_acceptance_length"] > 1
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    times = [answer[name] for name in names]
    assert times == sorted(times)


def test_speculation_can_be_refused_and_changes_no_text(server, prompts, texts):
    for wish in ({"speculation": "off"}, {"num_draft_tokens": 0}):
        body = {"text_input": prompts[2], "max_tokens": NUM_TOKENS, "return_perf_metrics": True, **wish}
        _, answer = generate(server, **body)
        assert answer["text_output"] == prompts[2] + texts[2]
        assert answer["total_draft_tokens"] == 0 and answer["acceptance_rate"] == 0


def test_ids_are_prompts_too(server, prompts, offline):
    [wanted] = offline(prompts[:1], 12)
    _, asked = generate(server, text_input=prompts[0], max_tokens=1, return_num_input_tokens=True)
    _, answer = generate(server, input_ids=[5, 6, 7], max_tokens=12)
    assert answer["output_ids"][:3] == [5, 6, 7] and answer["sequence_length"] == len(answer["output_ids"]) == 15
    assert asked["num_input_tokens"] > 0 and len(wanted["tokens"]) == 12


def test_several_sequences_come_in_order_and_differ_by_their_seeds(server, offline, prompts):
    body = {"text_input": prompts[3], "max_tokens": 20, "temperature": 0.9, "exclude_input_in_output": True}
    _, answer = generate(server, **body, seed=40, num_return_sequences=3)
    alone = [
        offline(prompts[3:4], 20, "--temperature", "0.9", "--seed", str(seed), "--plain")[0]["text"]
        for seed in (40, 41, 42)
    ]
    assert answer["text_output"] == alone
    assert len(set(alone)) == 3
    assert answer["sequence_index"] == [0, 1, 2]


def test_stop_words_end_the_text(server, prompts, texts):
    stop = texts[0][30:33]
    body = {"text_input": prompts[0], "max_tokens": NUM_TOKENS, "exclude_input_in_output": True}
    _, answer = generate(server, **body, stop_words=[stop, "never seen"], return_finish_reason=True)
    assert answer["text_output"] == texts[0][: texts[0].index(stop)]
    assert answer["finish_reason"] == "stop"


def test_sse_gives_the_offline_text_in_many_step_outputs(server, prompts, texts):
    stream = Sse(server, {"text_input": prompts[0], "max_tokens": NUM_TOKENS})
    step_outputs = [event["text_output"] for event in stream.events()]
    stream.close()
    assert "".join(step_outputs) == texts[0]
    assert len(step_outputs) > 5


def test_grpc_streams_give_the_offline_text_and_counts_in_the_end(server, prompts, texts):
    values = {"text_input": prompts[1], "max_tokens": NUM_TOKENS, "stream": True, "return_perf_metrics": True}
    stream = GrpcStream(server, values)
    results = list(stream.results())
    stream.close()
    assert "".join(text_of(result) for result in results) == texts[1]
    assert all(result.as_numpy("acceptance_rate") is None for result in results[:-1])
    assert results[-1].as_numpy("acceptance_rate").shape == (1,)
    assert results[-1].as_numpy("text_output").shape == (1,)


def test_sixteen_streams_at_once_are_not_mixed(server, prompts, texts):
    def over_grpc(prompt):
        stream = GrpcStream(server, {"text_input": prompt, "max_tokens": NUM_TOKENS, "stream": True})
        text = "".join(text_of(result) for result in stream.results())
        stream.close()
        return text

    def over_http(prompt):
        return stream_text(server, {"text_input": prompt, "max_tokens": NUM_TOKENS})

    with ThreadPoolExecutor(16) as pool:
        ways = [pool.submit(over_grpc if i % 2 else over_http, prompt) for i, prompt in enumerate(prompts)]
        assert [way.result() for way in ways] == texts


def test_a_character_of_several_tokens_comes_whole(server, offline):
    wanted = [result["text"] for result in offline(ACCENTS, 60)]
    assert any(ord(letter) > 127 for text in wanted for letter in text)
    for prompt, text in zip(ACCENTS, wanted, strict=True):
        for wish in ("off", "on"):
            stream = Sse(server, {"text_input": prompt, "max_tokens": 60, "speculation": wish})
            step_outputs = [event["text_output"] for event in stream.events()]
            stream.close()
            assert "".join(step_outputs) == text
            assert not any("\ufffd" in step_output for step_output in step_outputs[:-1])
            assert step_outputs[-1].count("\ufffd") == text.count("\ufffd") <= 1  # cut off by max_tokens


def test_metrics_count_what_was_done(server, prompts):
    before = settled_metrics(server)
    _, answer = generate(server, text_input=prompts[5], max_tokens=50, return_perf_metrics=True)
    wait_until(lambda: server.metrics()["speccompile_tokens_total"] > before["speccompile_tokens_total"], "tokens")
    now = settled_metrics(server)
    grown = {name: now[name] - before[name] for name in now}
    assert grown["speccompile_tokens_total"] == 50
    assert grown["speccompile_draft_tokens_total"] == answer["total_draft_tokens"]
    assert grown["speccompile_accepted_tokens_total"] == answer["total_accepted_draft_tokens"]
    assert 0 < now["speccompile_acceptance_rate"] <= 1 < now["speccompile_mean_acceptance_length"]
    assert now["speccompile_queued"] == now["speccompile_active"] == 0
