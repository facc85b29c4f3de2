# SPDX-License-Identifier: Apache-2.0
"""Tensors of the five models, by the names that clients of the removed TensorRT-LLM backend send and read."""

from __future__ import annotations

from dataclasses import replace

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
