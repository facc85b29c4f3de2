# SPDX-License-Identifier: Apache-2.0
import numpy as np

from speccompile.runtime.requests import Request, StepOutput
from speccompile.serving.triton.request_parsing import Call
from speccompile.serving.triton.response_building import Answer

STATS = {
    "num_draft_tokens": 8,
    "num_accepted": 6,
    "num_steps": 3,
    "num_prompt_tokens": 4,
    "queue_ms": 1.0,
    "time_to_first_token_ms": 2.5,
}
ALL = frozenset(
    {"text_output", "acceptance_rate", "total_draft_tokens", "total_accepted_draft_tokens", "mean_acceptance_length"}
    | {"num_input_tokens", "num_output_tokens", "finish_reason", "batch_index", "sequence_index"}
    | {"arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"}
)


def make(num_rows=1, num_outputs=1, streams=False, echoes=False, wanted=ALL, has_batch=False):
    rows = tuple(Request("p", num_outputs=num_outputs) for _ in range(num_rows))
    prompts, texts = tuple([7, 8] for _ in rows), tuple("p" for _ in rows)
    return Answer(Call(rows, prompts, texts, streams, echoes, wanted, has_batch, end_id=1, arrival_ns=10**9))


def end(index=0, text="", tokens=(), reason="length", error=None):
    return StepOutput(index, text, list(tokens), finish_reason=reason, stats=STATS, error=error)


def test_one_answer_in_the_end():
    answer = make(echoes=True)
    answer.push(0, StepOutput(0, "ab", [3, 4]))
    assert not answer.is_done
    answer.push(0, end(text="é", tokens=[5]))
    assert answer.is_done
    outputs = answer.whole()
    assert outputs["text_output"].tolist() == ["pabé".encode()]
    assert outputs["acceptance_rate"].dtype == np.float32 and outputs["acceptance_rate"].tolist() == [0.75]
    assert outputs["mean_acceptance_length"].tolist() == [3.0]
    assert outputs["total_draft_tokens"].dtype == np.int32
    assert (outputs["num_input_tokens"].tolist(), outputs["num_output_tokens"].tolist()) == ([4], [3])
    assert outputs["finish_reason"].tolist() == [b"length"]
    assert outputs["first_scheduled_time_ns"].tolist() == [10**9 + 10**6]
    assert outputs["first_token_time_ns"].tolist() == [10**9 + 2_500_000]
    assert outputs["arrival_time_ns"].dtype == np.int64


def test_a_stream_sends_what_is_new_and_its_counts_last():
    answer = make(streams=True)
    answer.push(0, StepOutput(0, "", [3]))
    assert answer.step_outputs() == []  # half a character: nothing to show yet
    answer.push(0, StepOutput(0, "a", [4]))
    answer.push(0, StepOutput(0, "b", [5]))
    [first] = answer.step_outputs()
    assert first["text_output"].tolist() == [b"ab"]
    assert set(first) == {"text_output", "batch_index", "sequence_index"}
    answer.push(0, end(text="c"))
    [last] = answer.step_outputs()
    assert last["text_output"].tolist() == [b"c"] and last["total_draft_tokens"].tolist() == [8]
    assert answer.step_outputs() == []


def test_sequences_and_rows_have_dims_of_their_own():
    answer = make(num_rows=2, num_outputs=2, has_batch=True)
    for row in (1, 0):
        for index in (1, 0):
            answer.push(row, end(index, text=f"{row}{index}"))
    outputs = answer.whole()
    assert outputs["text_output"].tolist() == [[b"00", b"01"], [b"10", b"11"]]
    assert outputs["batch_index"].tolist() == [[0, 0], [1, 1]]
    assert outputs["sequence_index"].tolist() == [[0, 1], [0, 1]]


def test_streamed_rows_say_whose_they_are():
    answer = make(num_rows=2, streams=True, has_batch=True)
    answer.push(1, StepOutput(0, "x", [3]))
    [only] = answer.step_outputs()
    assert only["batch_index"].tolist() == [[1]] and only["text_output"].shape == (1, 1)


def test_ids_are_filled_up_and_begin_with_the_prompt_where_that_is_wanted():
    wanted = frozenset({"output_ids", "sequence_length"})
    answer = make(num_outputs=2, wanted=wanted, echoes=True)
    answer.push(0, end(0, tokens=[3, 4, 5]))
    answer.push(0, end(1, tokens=[6]))
    outputs = answer.whole()
    assert outputs["output_ids"].tolist() == [[7, 8, 3, 4, 5], [7, 8, 6, 1, 1]]
    assert outputs["sequence_length"].tolist() == [5, 3]
    assert outputs["output_ids"].dtype == np.int32


def test_an_end_that_is_no_answer_is_a_failure():
    for reason in ("error", "timeout", "cancelled"):
        answer = make()
        answer.push(0, end(reason=reason, error="why" if reason == "error" else None))
        assert answer.failure == (reason, "why" if reason == "error" else "")
    answer = make()
    answer.push(0, end(reason="cache_full"))
    assert answer.failure is None


def test_without_drafts_the_rate_is_zero():
    answer = make()
    answer.push(0, StepOutput(0, "a", [3], finish_reason="stop", stats={"num_draft_tokens": 0, "num_steps": 1}))
    outputs = answer.whole()
    assert outputs["acceptance_rate"].tolist() == [0.0]
    assert outputs["mean_acceptance_length"].tolist() == [1.0]
