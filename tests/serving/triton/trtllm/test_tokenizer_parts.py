# SPDX-License-Identifier: Apache-2.0


import threading

import numpy as np
import pytest

from speccompile.errors import RuntimeFault
from speccompile.serving.triton.trtllm.bls_part import OpenRelays, Relay
from speccompile.serving.triton.trtllm.contract import words_from_lists
from speccompile.serving.triton.trtllm.tokenizer_parts import postprocess, preprocess, results_from_arrays


class Letters:
    """A token a letter; a text begins with token 0."""

    def encode(self, text, add_special_tokens=True):
        ids = [0] * add_special_tokens + [ord(letter) - 96 for letter in text]
        return type("Encoding", (), {"ids": ids})()

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(96 + i) for i in ids)

    def get_vocab_size(self):
        return 27


def texts(*values):
    return np.array([value.encode() for value in values], dtype=np.object_)


def ask(**arrays):
    return preprocess({"REQUEST_OUTPUT_LEN": np.array([7], dtype=np.int32), **arrays}, Letters())


def test_a_prompt_becomes_ids():
    made = ask(QUERY=texts("abc"))
    assert made["INPUT_ID"].tolist() == [0, 1, 2, 3] and made["INPUT_ID"].dtype == np.int32
    assert made["REQUEST_INPUT_LEN"].tolist() == [4]
    assert made["REQUEST_OUTPUT_LEN"].tolist() == [7]
    assert made["OUT_END_ID"].tolist() == made["OUT_PAD_ID"].tolist() == [-1]
    assert made["EMBEDDING_BIAS"].tolist() == [0.0]


def test_words_become_lists_without_the_tokens_that_begin_a_text():
    made = ask(QUERY=texts("a"), STOP_WORDS_DICT=texts("ab", "", "c"), BAD_WORDS_DICT=texts(""))
    assert words_from_lists(made["STOP_WORDS_IDS"]) == [[1, 2], [3]]
    assert words_from_lists(made["BAD_WORDS_IDS"]) == []


def test_a_bias_is_put_on_each_token_of_its_word():
    weights = np.array([1.5, -2.0], dtype=np.float32)
    bias = ask(QUERY=texts("a"), EMBEDDING_BIAS_WORDS=texts("ab", "b"), EMBEDDING_BIAS_WEIGHTS=weights)[
        "EMBEDDING_BIAS"
    ]
    assert bias.shape == (27,) and bias.dtype == np.float32
    assert {i: float(b) for i, b in enumerate(bias) if b} == {1: 1.5, 2: -0.5}
    with pytest.raises(RuntimeFault, match="1 words, 2 weights"):
        ask(QUERY=texts("a"), EMBEDDING_BIAS_WORDS=texts("ab"), EMBEDDING_BIAS_WEIGHTS=weights)


def test_text_that_is_not_utf8_is_refused():
    with pytest.raises(RuntimeFault, match="QUERY: got byte 1 is not UTF-8"):
        ask(QUERY=np.array([b"a\xff"], dtype=np.object_))


def test_ids_become_texts_and_texts_stay():
    row = {"TOKENS_BATCH": np.array([[1, 2, 3], [4, 0, 0]]), "SEQUENCE_LENGTH": np.array([3, 1])}
    assert postprocess(row, Letters())["OUTPUT"].tolist() == [b"abc", b"d"]
    assert postprocess({**row, "TEXT": texts("x", "y")}, Letters())["OUTPUT"].tolist() == [b"x", b"y"]


def test_rows_of_a_batch_are_filled_up():
    arrays = {
        "QUERY": np.array([[b"abc"], [b"a"]], dtype=np.object_),
        "REQUEST_OUTPUT_LEN": np.array([[7], [8]], dtype=np.int32),
    }
    made = results_from_arrays(lambda row: preprocess(row, Letters()), arrays, has_batch=True)
    assert made["INPUT_ID"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert made["REQUEST_INPUT_LEN"].tolist() == [[4], [2]]
    assert made["STOP_WORDS_IDS"].shape == (2, 2, 1)


class Sender:
    """A response sender whose answer waits for a thread that tries to close the request."""

    def __init__(self) -> None:
        self.relays, self.num_asked = OpenRelays(), 0
        self.relay = Relay(self, "1")
        self.closer = threading.Thread(target=self.relays.close, args=[self.relay])
        self.was_closed_while_asked: bool | None = None

    def is_cancelled(self) -> bool:
        self.num_asked += 1
        self.closer.start()
        self.closer.join(timeout=0.2)
        self.was_closed_while_asked = not self.closer.is_alive()
        return True


def test_a_request_is_not_closed_while_triton_is_asked_and_not_asked_once_closed():
    sender = Sender()
    sender.relays.add(sender.relay)
    assert sender.relays.running() == [sender.relay]
    assert sender.relays.is_gone(sender.relay)
    assert sender.was_closed_while_asked is False
    sender.closer.join()
    assert sender.relays.running() == []
    assert not sender.relays.is_gone(sender.relay)
    assert sender.num_asked == 1


def test_a_request_that_was_asked_to_stop_is_not_running():
    sender = Sender()
    sender.relays.add(sender.relay)
    sender.relay.is_stopped = True
    assert sender.relays.running() == []
