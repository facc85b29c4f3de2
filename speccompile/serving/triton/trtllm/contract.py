# SPDX-License-Identifier: Apache-2.0
"""Tensors of the five models, by the names that clients of the removed TensorRT-LLM backend send and read.

What its requests mean: a value that would change the output and that we do not honour is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.serving.triton.contract import (
    DECLARED,
    DECODING,
    FAILURE,
    INPUT_IDS,
    OUTPUT_IDS,
    OWN,
    RESULTS,
    SAMPLING,
    SEQUENCE_LENGTH,
    TEXT_INPUT,
    TEXT_OUTPUT,
    WISHES,
    Tensor,
    required,
)
from speccompile.serving.triton.contract import SYNONYMS as TEXT_SYNONYMS
from speccompile.serving.triton.request_parsing import Arrays, Decoder, Rules, given_sampling, one_value

INPUT_LENGTHS = Tensor("input_lengths", "int32")
# Clients send these, often with a no-op value. `rules` refuses others.
_EXTRAS = (
    Tensor("pad_id", "int32"),
    Tensor("length_penalty", "float32"),
    Tensor("min_tokens", "int32"),
    Tensor("beam_width", "int32"),
    Tensor("return_log_probs", "bool"),
    Tensor("return_context_logits", "bool"),
    Tensor("return_generation_logits", "bool"),
)
_WORDS = (
    Tensor("bad_words", "string", (-1,)),
    Tensor("embedding_bias_words", "string", (-1,)),
    Tensor("embedding_bias_weights", "float32", (-1,)),
)

# An input of a text model -> the same of `tensorrt_llm`, where that has another name.
ENGINE_NAMES = {
    **{SAMPLING[name].name: given.engine_name for name, (_, given) in DECLARED.items() if given.engine_name},
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
# Other name of an input -> the text model's name.
SYNONYMS = {**TEXT_SYNONYMS, **{name: text for text, name in ENGINE_NAMES.items()}}

PREPROCESSING_INPUTS = (
    required(Tensor("QUERY", "string")),
    required(Tensor("REQUEST_OUTPUT_LEN", "int32")),
    Tensor("BAD_WORDS_DICT", "string", (-1,)),
    Tensor("STOP_WORDS_DICT", "string", (-1,)),
    Tensor("EMBEDDING_BIAS_WORDS", "string", (-1,)),
    Tensor("EMBEDDING_BIAS_WEIGHTS", "float32", (-1,)),
    Tensor("END_ID", "int32"),
    Tensor("PAD_ID", "int32"),
)
PREPROCESSING_OUTPUTS = (
    Tensor("INPUT_ID", "int32", (-1,)),
    Tensor("REQUEST_INPUT_LEN", "int32"),
    Tensor("BAD_WORDS_IDS", "int32", (2, -1)),
    Tensor("STOP_WORDS_IDS", "int32", (2, -1)),
    Tensor("EMBEDDING_BIAS", "float32", (-1,)),
    Tensor("REQUEST_OUTPUT_LEN", "int32"),
    Tensor("OUT_END_ID", "int32"),
    Tensor("OUT_PAD_ID", "int32"),
)
POSTPROCESSING_INPUTS = (
    required(Tensor("TOKENS_BATCH", "int32", (-1, -1))),
    required(Tensor("SEQUENCE_LENGTH", "int32", (-1,))),
    Tensor("TEXT", "string", (-1,)),
)
POSTPROCESSING_OUTPUTS = (Tensor("OUTPUT", "string", (-1,)),)


def text_inputs() -> tuple[Tensor, ...]:
    decoding = tuple(required(t) if t.name == "max_tokens" else t for t in DECODING)
    return (required(TEXT_INPUT), *decoding, *OWN, *WISHES, *_EXTRAS, *_WORDS)


def text_outputs() -> tuple[Tensor, ...]:
    return (TEXT_OUTPUT, *RESULTS)


def engine_inputs() -> tuple[Tensor, ...]:
    """Returns the inputs of `tensorrt_llm`: the text model's by their names there, and the prompt as ids."""
    renamed = tuple(replace(t, name=ENGINE_NAMES.get(t.name, t.name)) for t in (*DECODING, *_EXTRAS))
    prompt = (required(INPUT_IDS), required(INPUT_LENGTHS))
    lists = (
        Tensor("stop_words_list", "int32", (2, -1)),
        Tensor("bad_words_list", "int32", (2, -1)),
        Tensor("embedding_bias", "float32", (-1,)),
        Tensor("early_stopping", "bool"),
        Tensor("stop", "bool"),
    )
    decoding = tuple(required(t) if t.name == "request_output_len" else t for t in renamed)
    return (*prompt, *decoding, *lists, *OWN, *WISHES)


def engine_outputs() -> tuple[Tensor, ...]:
    """Returns the outputs of `tensorrt_llm`; `text_output` is our addition: text that never ends inside a character."""
    return (OUTPUT_IDS, SEQUENCE_LENGTH, TEXT_OUTPUT, *RESULTS, FAILURE)


# Input -> the value that is accepted. `pad_id`, `length_penalty` and `early_stopping` have no effect without beams.
_ONLY: dict[str, tuple[Callable[[NDArray[Any]], bool], str]] = {
    "beam_width": (lambda v: bool(np.all(v <= 1)), "1: there is no beam search"),
    "min_tokens": (lambda v: bool(np.all(v <= 1)), "1 or nothing: the model's own ends are kept"),
    "bad_words": (lambda v: not any(bytes(word) for word in v.reshape(-1)), "no words: none can be forbidden"),
    "bad_words_list": (lambda v: bool(np.all(v.reshape(2, -1)[1] <= 0)), "no words: none can be forbidden"),
    "return_log_probs": (lambda v: not np.any(v), "false: no probabilities are returned"),
    "return_context_logits": (lambda v: not np.any(v), "false: no logits are returned"),
    "return_generation_logits": (lambda v: not np.any(v), "false: no logits are returned"),
}


class TrtllmRules(Rules):
    """The rules of the removed backend; of the bundle's defaults only the length of an answer counts."""

    synonyms: ClassVar = SYNONYMS

    def check(self, arrays: Arrays) -> None:
        for name, (is_right, expected) in _ONLY.items():
            value = arrays.get(name)
            if value is not None and not is_right(value):
                todo = "Leave it out; docs/how_to/migrate_tensorrt_llm.md has the list."
                raise RuntimeFault(name, _shown(value), expected, todo)

    def sampling(self, row: Arrays) -> SamplingParams:
        given = given_sampling(row)
        if "embedding_bias" in row:
            bias = row["embedding_bias"].reshape(-1)
            given["logit_bias"] = {int(token): float(bias[token]) for token in np.flatnonzero(bias)}
        if "stop_words_list" in row:
            given["stop"] = _joined(given.get("stop", ()), words_from_lists(row["stop_words_list"]), self.tokenizer)
        fields = {"max_new_tokens": self.defaults.max_new_tokens, **sampling_fields(given), **self.ends(row)}
        return SamplingParams(**fields)

    def tokens(self, row: Arrays, ids: list[int]) -> list[int]:
        if INPUT_LENGTHS.name not in row:
            return ids
        length = int(one_value(row, INPUT_LENGTHS.name))
        if not 0 <= length <= len(ids):
            raise RuntimeFault(INPUT_LENGTHS.name, str(length), f"at most {len(ids)}, the ids sent", "Correct it.")
        return ids[:length]


def sampling_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` by the removed backend's rules, whatever the bundle's defaults are.

    Neither top-k nor top-p, or top-k 1: greedy, even with a temperature, which is 1 by default; top-p 0 is off.
    """
    top_k, top_p = int(given.get("top_k", 0)), float(given.get("top_p", 0.0))
    is_greedy = top_k == 1 or (top_k <= 0 and top_p == 0.0)
    rest = {key: value for key, value in given.items() if key not in ("temperature", "top_k", "top_p")}
    if is_greedy:
        return {**rest, "temperature": 0.0, "top_k": 0, "top_p": 1.0}
    temperature = float(given.get("temperature", 1.0))
    return {**rest, "temperature": temperature, "top_k": max(top_k, 0), "top_p": top_p if top_p > 0 else 1.0}


def _joined(words: Sequence[str], lists: Sequence[list[int]], tokenizer: Decoder | None) -> tuple[str, ...]:
    if lists and tokenizer is None:
        raise RuntimeFault("stop_words_list", "words", "a bundle with a tokenizer", "Use end_id.")
    if wrong := [token for ids in lists for token in ids if token < 0]:
        raise RuntimeFault("stop_words_list", str(wrong[0]), "token ids", "Correct the request.")
    decoded = [tokenizer.decode(ids) for ids in lists if tokenizer is not None]
    return tuple(dict.fromkeys(word for word in (*words, *decoded) if word))


def words_from_lists(words: NDArray[Any]) -> list[list[int]]:
    """Returns the token ids of each word of a [2, n] array: row 0 has all ids, row 1 where each word ends, then -1."""
    ids, ends = words.reshape(2, -1)
    start, lists = 0, []
    for end in ends:
        if end > start:
            lists.append([int(i) for i in ids[start:end]])
            start = int(end)
    return lists


def lists_from_words(words: list[list[int]]) -> NDArray[np.int32]:
    """Returns the array of `words_from_lists` for some words; [2, 1] with no word in it where there is none."""
    flat = [i for word in words for i in word]
    ends = np.cumsum([len(word) for word in words], dtype=np.int64).tolist() if words else []
    size = max(1, len(flat), len(ends))
    lists = np.zeros((2, size), dtype=np.int32)
    lists[1] = -1
    lists[0, : len(flat)], lists[1, : len(ends)] = flat, ends
    return lists


def _shown(value: NDArray[Any]) -> str:
    values = [v.decode(errors="replace") if isinstance(v, bytes) else v for v in value.reshape(-1)[:4].tolist()]
    return repr(values[0] if len(values) == 1 else values)
