# SPDX-License-Identifier: Apache-2.0
"""The five models of the removed TensorRT-LLM backend, asked as its clients ask."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bench.triton_server import post
from tests.serving.triton.live.clients import GrpcStream, Sse, settled_metrics, text_of, wait_until

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
NUM_TOKENS = 80


@pytest.fixture(scope="module")
def texts(offline, prompts):
    return [result["text"] for result in offline(prompts, NUM_TOKENS)]


def row(values, dtype=np.int32):
    """Returns [1, n]: one row of a batch."""
    return np.array([values], dtype=dtype)


def words(*values):
    return row([value.encode() for value in values], np.object_)


def infer(server, model, values):
    """Returns one answer over gRPC."""
    stream = GrpcStream(server, values, model)
    [result] = stream.results()
    stream.close()
    return result


def old_request(prompt, **values):
    """Returns what `inflight_batcher_llm` clients send with every request."""
    return {
        "text_input": words(prompt),
        "max_tokens": row([NUM_TOKENS]),
        "bad_words": words(""),
        "stop_words": words(""),
        "top_k": row([1]),
        "top_p": row([0.0], np.float32),
        "temperature": row([1.0], np.float32),
        "length_penalty": row([1.0], np.float32),
        "repetition_penalty": row([1.0], np.float32),
        "seed": row([0], np.uint64),
        "beam_width": row([1]),
        "stream": row([False], np.bool_),
        **values,
    }


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_comes_with_the_prompt_and_the_counts(old_server, prompts, texts, model):
    wish = {"return_perf_metrics": row([True], np.bool_), "num_draft_tokens": row([4])}  # drafts in any case
    result = infer(old_server, model, old_request(prompts[0], **wish))
    assert text_of(result) == prompts[0] + texts[0]
    rate, accepted, drafted = (
        result.as_numpy(name) for name in ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    )
    assert rate.shape == accepted.shape == drafted.shape == (1, 1)
    assert (rate.dtype, accepted.dtype, drafted.dtype) == (np.float32, np.int32, np.int32)
    assert 0 < accepted[0, 0] <= drafted[0, 0]
    assert rate[0, 0] == pytest.approx(accepted[0, 0] / drafted[0, 0])


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_comes_alone_where_that_is_asked(old_server, prompts, texts, model):
    body = {"text_input": prompts[1], "max_tokens": NUM_TOKENS, "bad_words": "", "stop_words": ""}
    status, answer = post(f"{old_server.url}/v2/models/{model}/generate", {**body, "exclude_input_in_output": True})
    assert (status, answer["text_output"]) == (200, texts[1])
    stop = texts[1][20:23]
    status, answer = post(f"{old_server.url}/v2/models/{model}/generate", {**body, "stop_words": [stop]})
    assert answer["text_output"] == prompts[1] + texts[1][: texts[1].index(stop)]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_streams_give_only_what_is_new(old_server, prompts, texts, model):
    stream = GrpcStream(old_server, old_request(prompts[2], stream=row([True], np.bool_)), model)
    step_outputs = [text_of(result) for result in stream.results()]
    stream.close()
    assert "".join(step_outputs) == texts[2]
    assert len(step_outputs) > 3


def test_sixteen_requests_through_bls_and_ensemble_are_not_mixed(old_server, prompts, texts):
    def ask(index):
        model = TEXT_MODELS[index % 2]
        stream = GrpcStream(old_server, old_request(prompts[index], stream=row([True], np.bool_)), model)
        text = "".join(text_of(result) for result in stream.results())
        stream.close()
        return text

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == texts


def test_the_engine_speaks_ids_and_the_tokenizer_models_read_and_write_them(old_server, prompts, offline):
    wanted = offline(prompts[:2], NUM_TOKENS)
    made = infer(old_server, "preprocessing", {"QUERY": words(prompts[0]), "REQUEST_OUTPUT_LEN": row([NUM_TOKENS])})
    ids, length = made.as_numpy("INPUT_ID"), made.as_numpy("REQUEST_INPUT_LEN")
    assert ids.shape == (1, length[0, 0])
    inputs = {"input_ids": ids, "input_lengths": length, "request_output_len": made.as_numpy("REQUEST_OUTPUT_LEN")}
    inputs |= {"runtime_top_k": row([1]), "exclude_input_in_output": row([True], np.bool_)}
    result = infer(old_server, "tensorrt_llm", inputs)
    assert result.as_numpy("output_ids").tolist() == [[wanted[0]["tokens"]]]
    assert result.as_numpy("sequence_length").tolist() == [[len(wanted[0]["tokens"])]]
    result = infer(old_server, "tensorrt_llm", {**inputs, "exclude_input_in_output": row([False], np.bool_)})
    assert result.as_numpy("output_ids").tolist() == [[ids[0].tolist() + wanted[0]["tokens"]]]
    step_outputs = {"TOKENS_BATCH": row([wanted[0]["tokens"]]), "SEQUENCE_LENGTH": row([len(wanted[0]["tokens"])])}
    assert infer(old_server, "postprocessing", step_outputs).as_numpy("OUTPUT")[0, 0].decode() == wanted[0]["text"]


def test_rows_of_a_batch_are_answered_row_by_row(old_server, prompts, texts):
    values = {
        "text_input": np.array([[prompt.encode()] for prompt in prompts[:3]], dtype=np.object_),
        "max_tokens": np.full((3, 1), NUM_TOKENS, dtype=np.int32),
        "exclude_input_in_output": np.ones((3, 1), dtype=np.bool_),
    }
    result = infer(old_server, "tensorrt_llm_bls", values)
    assert [text.decode() for text in result.as_numpy("text_output")[:, 0]] == texts[:3]
    assert result.as_numpy("batch_index").tolist() == [[0], [1], [2]]


def test_a_temperature_alone_is_greedy_as_it_was(old_server, prompts, texts):
    body = {"text_input": prompts[3], "max_tokens": NUM_TOKENS, "temperature": 0.9, "exclude_input_in_output": True}
    url = f"{old_server.url}/v2/models/tensorrt_llm_bls/generate"
    assert post(url, body)[1]["text_output"] == texts[3]
    sampled = [post(url, {**body, "top_p": 0.95, "seed": seed})[1]["text_output"] for seed in (1, 2, 1)]
    assert sampled[0] == sampled[2] != sampled[1]


def test_a_bias_of_words_moves_the_text(old_server, prompts, texts):
    body = {"text_input": prompts[0], "max_tokens": 5, "exclude_input_in_output": True}
    for model in TEXT_MODELS:
        url = f"{old_server.url}/v2/models/{model}/generate"
        biased = post(url, {**body, "embedding_bias_words": ["é"], "embedding_bias_weights": [90.0]})[1]
        assert biased.get("error") is None, biased
        assert set(biased["text_output"]) <= {"é", "\ufffd"} and not texts[0].startswith(biased["text_output"])


REFUSED = [
    ({"beam_width": 4}, "beam_width: got 4"),
    ({"min_tokens": 9}, "min_tokens: got 9"),
    ({"bad_words": ["x"]}, "no words: none can be forbidden"),
    ({"return_log_probs": True}, "return_log_probs: got True"),
    ({"return_generation_logits": True}, "return_generation_logits: got True"),
    (
        {"guided_decoding_guide": "[0-9]"},
        "guided_decoding_guide: got a field or parameter that the model does not know",
    ),
    ({"lora_task_id": 3}, "lora_task_id: got a field or parameter that the model does not know"),
    ({"embedding_bias_words": ["x", "y"], "embedding_bias_weights": [1.0]}, "2 words, 1 weights"),
]


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize(("values", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_would_change_the_answer_in_silence_is_refused(old_server, model, values, message):
    body = {"text_input": "x", "max_tokens": 3, **values}
    status, answer = post(f"{old_server.url}/v2/models/{model}/generate", body)
    assert status == 400
    assert message in answer["error"]


def cancelled(server):
    return server.metrics()["speccompile_cancelled_total"]


LONG = {"max_tokens": 950, "end_id": -1, "num_draft_tokens": 0}


def test_cancelling_a_bls_request_reaches_the_engine(old_server, prompts):
    before = cancelled(old_server)
    stream = Sse(old_server, {"text_input": prompts[0], **LONG}, "tensorrt_llm_bls")
    assert next(stream.events())["text_output"]
    stream.close()
    wait_until(lambda: cancelled(old_server) == before + 1, "a cancelled output")
    assert settled_metrics(old_server)["speccompile_active"] == 0


def test_a_stop_request_ends_the_one_of_its_id(old_server, prompts):
    import tritonclient.grpc as triton

    ids = infer(old_server, "preprocessing", {"QUERY": words(prompts[0]), "REQUEST_OUTPUT_LEN": row([1])})
    inputs = {
        "input_ids": ids.as_numpy("INPUT_ID"),
        "input_lengths": ids.as_numpy("REQUEST_INPUT_LEN"),
        "request_output_len": row([950]),
        "end_id": row([-1]),
        "num_draft_tokens": row([0]),
        "streaming": row([True], np.bool_),
    }
    stream = GrpcStream(old_server, inputs, "tensorrt_llm", request_id="long one")
    results = stream.results()
    assert next(results).as_numpy("sequence_length")[0, 0] >= 1
    stop = GrpcStream(old_server, {**inputs, "stop": row([True], np.bool_)}, "tensorrt_llm", request_id="long one")
    assert list(stop.results()) == []
    with pytest.raises(triton.InferenceServerException, match="The request was cancelled"):
        list(results)
    stop.close()
    stream.close()
