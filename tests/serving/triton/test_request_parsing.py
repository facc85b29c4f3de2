# SPDX-License-Identifier: Apache-2.0
import base64
from dataclasses import replace

import numpy as np
import pytest

from speccompile.core.sampling import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.serving.triton.contract import text_inputs, text_outputs
from speccompile.serving.triton.request_parsing import Rules, call_from_arrays, check_parameters
from speccompile.serving.triton.trtllm import contract as trtllm
from speccompile.serving.triton.trtllm.contract import TrtllmRules, lists_from_words, sampling_fields, words_from_lists

KNOWN = frozenset(t.name for t in text_outputs(True))
DEFAULTS = SamplingParams(max_new_tokens=128, temperature=0.7, seed=9)


class Letters:
    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(96 + i) for i in ids)


def texts(*values):
    return np.array([value.encode() for value in values], dtype=np.object_)


def numbers(*values, dtype=np.int32):
    return np.array(values, dtype=dtype)


def flag(value):
    return np.array([value])


def call(requested=KNOWN, known=KNOWN, is_trtllm=False, has_batch=False, eos=(1,), **arrays):
    rules = (TrtllmRules if is_trtllm else Rules)(DEFAULTS, eos, Letters(), has_batch)
    return call_from_arrays(arrays, requested, known, rules)


def test_defaults_come_from_bundle():
    asked = call(text_input=texts("abc"))
    [request] = asked.rows
    assert request.prompt == "abc"
    assert request.sampling == DEFAULTS
    assert (request.num_outputs, request.speculation, request.timeout_s) == (1, "auto", None)
    assert not asked.streams and asked.echoes and asked.texts == ("abc",)
    assert asked.wanted == {"text_output"}


def test_every_decoding_input_reaches_the_sampler():
    given = {
        "max_tokens": numbers(5),
        "temperature": numbers(0.5, dtype=np.float32),
        "top_k": numbers(7),
        "top_p": numbers(0.25, dtype=np.float32),
        "min_p": numbers(0.125, dtype=np.float32),
        "repetition_penalty": numbers(1.5, dtype=np.float32),
        "presence_penalty": numbers(0.5, dtype=np.float32),
        "frequency_penalty": numbers(-0.5, dtype=np.float32),
        "random_seed": numbers(2**64 - 1, dtype=np.uint64),
        "stop_words": texts("x", "", "yy", "x"),
        "ignore_eos": flag(True),
        "num_return_sequences": numbers(3),
        "timeout_s": numbers(2.5, dtype=np.float32),
        "adapter": texts("tax"),
        "num_draft_tokens": numbers(4),
    }
    [request] = call(text_input=texts("a"), **given).rows
    wanted = SamplingParams(5, 0.5, 7, 0.25, 2**64 - 1, 0.125, 1.5, 0.5, -0.5, (), ("x", "yy"), (), True)
    assert request.sampling == replace(wanted, adapter="tax")
    assert (request.num_outputs, request.timeout_s, request.speculation) == (3, 2.5, "on")
    declared = {trtllm.SYNONYMS.get(t.name, t.name) for t in text_inputs(True)}
    assert {trtllm.SYNONYMS.get(name, name) for name in given} <= declared


def test_images_are_files_or_base64_of_them():
    files = (b"\x89PNG..", b"\xff\xd8\xff..", b"RIFF....WEBP")
    names = ("png", "jpeg", "webp")
    coded = [base64.b64encode(file) for file in files]
    urls = [b"data:image/" + name.encode() + b";base64," + code for name, code in zip(names, coded, strict=True)]
    for sent in (files, coded, urls, (files[0], coded[1], urls[2].decode())):
        [request] = call(text_input=texts("a"), image=np.array(sent, dtype=np.object_)).rows
        assert tuple(request.images) == files
    rows = np.array([[files[0]], [coded[1]]], dtype=np.object_)
    requests = call(has_batch=True, text_input=texts("a", "b").reshape(2, 1), image=rows).rows
    assert [tuple(request.images) for request in requests] == [files[:1], files[1:2]]
    assert call(text_input=texts("a")).rows[0].images == ()
    with pytest.raises(
        RuntimeFault, match=r"image: got 'https://a\.b/cat\.png', which is neither; .* nothing is fetched"
    ):
        call(text_input=texts("a"), image=texts("https://a.b/cat.png"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (0.0, 0, 1.0)),
        ({"temperature": 0.9}, (0.0, 0, 1.0)),
        ({"top_k": 1, "top_p": 0.9, "temperature": 0.9}, (0.0, 0, 1.0)),
        ({"top_k": 40}, (1.0, 40, 1.0)),
        ({"top_p": 0.9, "temperature": 0.5}, (0.5, 0, 0.9)),
        ({"top_k": 5, "top_p": 0.0}, (1.0, 5, 1.0)),
    ],
)
def test_trtllm_sampling_rules(given, wanted):
    made = sampling_fields(given)
    assert (made["temperature"], made["top_k"], made["top_p"]) == wanted


def test_trtllm_requests_take_only_the_length_from_the_bundle():
    [request] = call(is_trtllm=True, text_input=texts("a")).rows
    assert request.sampling == SamplingParams(max_new_tokens=128)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"beam_width": numbers(2)}, "beam_width: got 2; expected 1"),
        ({"min_tokens": numbers(4)}, "min_tokens: got 4"),
        ({"bad_words": texts("", "x")}, r"bad_words: got \['', 'x'\]"),
        ({"bad_words_list": numbers([3, 0], [1, -1])}, "bad_words_list"),
        ({"return_log_probs": flag(True)}, "return_log_probs: got True"),
        ({"return_context_logits": flag(True)}, "return_context_logits"),
        ({"return_generation_logits": flag(True)}, "return_generation_logits"),
    ],
)
def test_trtllm_inputs_that_would_change_the_answer_are_refused(arrays, message):
    with pytest.raises(RuntimeFault, match=message):
        call(is_trtllm=True, text_input=texts("a"), **arrays)


def test_trtllm_no_op_inputs_are_accepted():
    empty = {"beam_width": numbers(1), "bad_words": texts(""), "stop_words": texts(""), "min_tokens": numbers(1)}
    harmless = {"length_penalty": numbers(2.0, dtype=np.float32), "pad_id": numbers(2), "early_stopping": flag(True)}
    [request] = call(is_trtllm=True, text_input=texts("a"), **empty, **harmless).rows
    assert request.sampling == SamplingParams(max_new_tokens=128)


def test_end_ids():
    assert not call(text_input=texts("a"), end_id=numbers(1)).rows[0].sampling.ignore_eos
    other = call(text_input=texts("a"), end_id=numbers(7)).rows[0].sampling
    assert other.ignore_eos and other.stop_token_ids == (7,)
    never = call(text_input=texts("a"), end_id=numbers(-1)).rows[0].sampling
    assert never.ignore_eos and never.stop_token_ids == ()


def test_trtllm_ids_are_cut_to_length_and_word_lists_decoded():
    lists = {"input_lengths": numbers(3), "stop_words_list": numbers([1, 2, 3], [2, 3, -1])}
    asked = call(is_trtllm=True, input_ids=numbers(5, 6, 7, 0), **lists)
    assert asked.rows[0].prompt == [5, 6, 7]
    assert asked.rows[0].sampling.stop == ("ab", "c")
    assert asked.texts == ("efg",)
    with pytest.raises(RuntimeFault, match="input_lengths: got 9"):
        call(is_trtllm=True, input_ids=numbers(5), input_lengths=numbers(9))
    with pytest.raises(RuntimeFault, match="stop_words_list: got -1; expected token ids"):
        call(is_trtllm=True, input_ids=numbers(5), stop_words_list=numbers([1, -1], [2, -1]))


def test_word_lists_round_trip():
    for words in ([], [[1]], [[1, 2], [3]], [[4], [5, 6, 7], [8]]):
        lists = lists_from_words(words)
        assert lists.shape[0] == 2 and lists.dtype == np.int32
        assert words_from_lists(lists) == words


def test_a_dense_bias_becomes_pairs():
    [request] = call(is_trtllm=True, input_ids=numbers(1), embedding_bias=numbers(0, 2.5, 0, -1, dtype=np.float32)).rows
    assert request.sampling.logit_bias == ((1, 2.5), (3, -1.0))


def test_rows_of_a_batch():
    asked = call(
        has_batch=True,
        text_input=np.array([[b"a"], [b"bc"]], dtype=np.object_),
        max_tokens=np.array([[3], [4]], dtype=np.int32),
        stream=np.array([[True], [True]]),
    )
    assert [(r.prompt, r.sampling.max_new_tokens) for r in asked.rows] == [("a", 3), ("bc", 4)]
    assert asked.streams and not asked.echoes
    assert {"batch_index", "sequence_index"} <= asked.wanted
    with pytest.raises(RuntimeFault, match="other values in other rows"):
        call(
            has_batch=True, text_input=np.array([[b"a"], [b"bc"]], dtype=np.object_), stream=np.array([[True], [False]])
        )


def test_rows_must_have_as_many_sequences():
    with pytest.raises(RuntimeFault, match="num_return_sequences"):
        call(
            has_batch=True,
            text_input=np.array([[b"a"], [b"bc"]], dtype=np.object_),
            num_return_sequences=np.array([[1], [2]], dtype=np.int32),
        )


def test_outputs_come_by_flags_or_by_name():
    flags = call(text_input=texts("a"), return_finish_reason=flag(True), return_num_input_tokens=flag(True))
    assert flags.wanted == {"text_output", "finish_reason", "num_input_tokens"}
    assert {"acceptance_rate", "total_draft_tokens"} <= call(
        text_input=texts("a"), return_perf_metrics=flag(True)
    ).wanted
    named = call(text_input=texts("a"), requested=["acceptance_rate", "output_ids"])
    assert named.wanted == {"acceptance_rate", "output_ids"}
    assert {"output_ids", "sequence_length"} <= call(input_ids=numbers(1)).wanted


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "got neither"),
        ({"text_input": texts("a"), "input_ids": numbers(1)}, "got both"),
        ({"input_ids": numbers(5, -1)}, "input_ids: got -1; expected token ids"),
        ({"input_ids": numbers(2**32, dtype=np.int64)}, "input_ids: got 4294967296; expected token ids"),
        ({"text_input": np.array([b"\xffa"], dtype=np.object_)}, "byte 0 is not UTF-8"),
        ({"text_input": texts("a", "b")}, "text_input: got shape"),
        ({"text_input": texts("a"), "seed": numbers(1), "random_seed": numbers(2)}, "two different values"),
        ({"text_input": texts("a"), "speculation": texts("maybe")}, "Request.speculation: got 'maybe'"),
        ({"text_input": texts("a"), "max_tokens": numbers(0)}, "max_new_tokens: got 0"),
    ],
)
def test_wrong_requests(arrays, message):
    with pytest.raises(RuntimeFault, match=message):
        call(**arrays)


def test_unknown_parameters_are_refused_unless_they_are_let_through():
    check_parameters([], "")
    check_parameters(["x-trace", "x-user"], "x-.*")
    with pytest.raises(RuntimeFault, match="max_token: got a field or parameter that the model does not know"):
        check_parameters(["max_token", "x-user"], "x-.*")


def test_no_name_is_declared_twice_and_the_text_models_agree():
    for tensors in (
        *(text_inputs(has, has) for has in (True, False)),
        *(text_outputs(has) for has in (True, False)),
        trtllm.text_inputs(),
        trtllm.text_outputs(),
        trtllm.engine_inputs(),
        trtllm.engine_outputs(),
    ):
        names = [t.name for t in tensors]
        assert len(set(names)) == len(names)
    assert {t.name for t in text_inputs(True)} - {"input_ids"} <= {t.name for t in trtllm.text_inputs()}
    assert {t.name for t in trtllm.text_outputs()} <= {t.name for t in trtllm.engine_outputs()}
