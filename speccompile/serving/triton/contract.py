# SPDX-License-Identifier: Apache-2.0
"""Names, dtypes and dims of every input and output that our Triton models have, declared once.

The inputs of sampling parameters are declared with these, see `core.sampling_params`.
The names of the `trtllm` layout are those that clients of the removed TensorRT-LLM engine backend send and read.
Dims leave out the batch dim, which Triton puts in front where `max_batch_size` is above 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from speccompile.common.surfaces import FLAG, INTEGER, NUMBER, STRINGS, TOKENS, Kind, TensorInput
from speccompile.core.sampling_params import SAMPLING_PARAMETERS

TRITON_TYPES = {
    "string": "TYPE_STRING",
    "bool": "TYPE_BOOL",
    "int8": "TYPE_INT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "uint64": "TYPE_UINT64",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
}


@dataclass(frozen=True)
class Tensor:
    """An input or output of a Triton model.

    Args:
        dims: without the batch dim; -1 is any size.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    is_optional: bool = True


def required(tensor: Tensor) -> Tensor:
    return replace(tensor, is_optional=False)


TEXT_INPUT = Tensor("text_input", "string")
INPUT_IDS = Tensor("input_ids", "int32", (-1,))
IMAGES = Tensor("image", "string", (-1,))
INPUT_LENGTHS = Tensor("input_lengths", "int32")

_BY_KIND: Mapping[Kind, tuple[str, tuple[int, ...]]] = {
    INTEGER: ("int32", (1,)),
    NUMBER: ("float32", (1,)),
    FLAG: ("bool", (1,)),
    STRINGS: ("string", (-1,)),
    TOKENS: ("int32", (-1,)),
}
_DECLARED = {
    name: (declared.kind, declared.tensor)
    for name, declared in SAMPLING_PARAMETERS.items()
    if declared.tensor is not None
}


def _sampling_input(name: str, kind: Kind, given: TensorInput) -> Tensor:
    dtype, dims = _BY_KIND[kind]
    return Tensor(given.name or name, given.dtype or dtype, dims)


# Sampling parameter -> its input.
SAMPLING = {name: _sampling_input(name, kind, given) for name, (kind, given) in _DECLARED.items()}
# Second name of an input -> the input.
_SECOND = {given.second_name: SAMPLING[name] for name, (_, given) in _DECLARED.items() if given.second_name}
# What a request may say about decoding, in every text model.
_DECODING = (
    *SAMPLING.values(),
    *(replace(tensor, name=name) for name, tensor in _SECOND.items()),
    Tensor("num_return_sequences", "int32"),
    Tensor("end_id", "int32"),
    Tensor("stream", "bool"),
    Tensor("exclude_input_in_output", "bool"),
    Tensor("num_draft_tokens", "int32"),
)
_WISHES = (
    Tensor("return_perf_metrics", "bool"),
    Tensor("return_num_input_tokens", "bool"),
    Tensor("return_num_output_tokens", "bool"),
    Tensor("return_finish_reason", "bool"),
)
# Ours alone.
_OWN = (
    Tensor("speculation", "string"),
    Tensor("timeout_s", "float32"),
)
# Sent by old clients, often with a value that asks for nothing. See `trtllm_compat` for what is refused.
_OLD_EXTRAS = (
    Tensor("pad_id", "int32"),
    Tensor("length_penalty", "float32"),
    Tensor("min_tokens", "int32"),
    Tensor("beam_width", "int32"),
    Tensor("return_log_probs", "bool"),
    Tensor("return_context_logits", "bool"),
    Tensor("return_generation_logits", "bool"),
)
_OLD_WORDS = (
    Tensor("bad_words", "string", (-1,)),
    Tensor("embedding_bias_words", "string", (-1,)),
    Tensor("embedding_bias_weights", "float32", (-1,)),
)

TEXT_OUTPUT = Tensor("text_output", "string", (-1,))
OUTPUT_IDS = Tensor("output_ids", "int32", (-1, -1))
SEQUENCE_LENGTH = Tensor("sequence_length", "int32", (-1,))
PERF_OUTPUTS = (
    Tensor("acceptance_rate", "float32", (-1,)),
    Tensor("total_accepted_draft_tokens", "int32", (-1,)),
    Tensor("total_draft_tokens", "int32", (-1,)),
    Tensor("mean_acceptance_length", "float32", (-1,)),
    Tensor("arrival_time_ns", "int64", (-1,)),
    Tensor("first_scheduled_time_ns", "int64", (-1,)),
    Tensor("first_token_time_ns", "int64", (-1,)),
    Tensor("last_token_time_ns", "int64", (-1,)),
)
NUM_INPUT_TOKENS = Tensor("num_input_tokens", "int32", (-1,))
NUM_OUTPUT_TOKENS = Tensor("num_output_tokens", "int32", (-1,))
FINISH_REASON = Tensor("finish_reason", "string", (-1,))
FAILURE = Tensor("failure", "string", (-1,))  # to our own models: the error's kind and message
INDEXES = (Tensor("batch_index", "int32", (-1,)), Tensor("sequence_index", "int32", (-1,)))
_RESULTS = (*PERF_OUTPUTS, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, FINISH_REASON, *INDEXES)

# The flag that asks for an output; all other outputs are always sent.
FLAGS = {
    "return_perf_metrics": tuple(tensor.name for tensor in PERF_OUTPUTS),
    "return_num_input_tokens": (NUM_INPUT_TOKENS.name,),
    "return_num_output_tokens": (NUM_OUTPUT_TOKENS.name,),
    "return_finish_reason": (FINISH_REASON.name,),
}

# A text model's input -> the same of `tensorrt_llm`, where that has another name.
ENGINE_NAMES = {
    **{SAMPLING[name].name: given.engine_name for name, (_, given) in _DECLARED.items() if given.engine_name},
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
# Every other name -> the text model's name.
SYNONYMS = {
    **{old: name for name, old in ENGINE_NAMES.items()},
    **{name: tensor.name for name, tensor in _SECOND.items()},
}

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


def text_inputs(has_tokenizer: bool, has_vision: bool = False) -> tuple[Tensor, ...]:
    """Returns the inputs of the one decoupled model.

    Args:
        has_tokenizer: without one, prompts are ids and texts are missing.
    """
    decoding = tuple(t for t in _DECODING if has_tokenizer or t.dtype != "string")
    prompts = (TEXT_INPUT, INPUT_IDS) if has_tokenizer else (required(INPUT_IDS),)
    return (*prompts, *((IMAGES,) if has_vision else ()), *decoding, *_OWN, *_WISHES)


def text_outputs(has_tokenizer: bool) -> tuple[Tensor, ...]:
    """Returns the outputs of the one decoupled model; ids are among them where the prompt came as ids."""
    return (*((TEXT_OUTPUT,) if has_tokenizer else ()), OUTPUT_IDS, SEQUENCE_LENGTH, *_RESULTS)


def old_text_inputs() -> tuple[Tensor, ...]:
    decoding = tuple(required(t) if t.name == "max_tokens" else t for t in _DECODING)
    return (required(TEXT_INPUT), *decoding, *_OWN, *_WISHES, *_OLD_EXTRAS, *_OLD_WORDS)


def old_text_outputs() -> tuple[Tensor, ...]:
    return (TEXT_OUTPUT, *_RESULTS)


def old_engine_inputs() -> tuple[Tensor, ...]:
    """Returns the inputs of `tensorrt_llm`: the text model's by their names there, and the prompt as ids."""
    renamed = tuple(replace(t, name=ENGINE_NAMES.get(t.name, t.name)) for t in (*_DECODING, *_OLD_EXTRAS))
    prompt = (required(INPUT_IDS), required(INPUT_LENGTHS))
    lists = (
        Tensor("stop_words_list", "int32", (2, -1)),
        Tensor("bad_words_list", "int32", (2, -1)),
        Tensor("embedding_bias", "float32", (-1,)),
        Tensor("early_stopping", "bool"),
        Tensor("stop", "bool"),
    )
    wanted = tuple(required(t) if t.name == "request_output_len" else t for t in renamed)
    return (*prompt, *wanted, *lists, *_OWN, *_WISHES)


def old_engine_outputs() -> tuple[Tensor, ...]:
    """Returns the outputs of `tensorrt_llm`; `text_output` is our addition: text that never ends inside a character."""
    return (OUTPUT_IDS, SEQUENCE_LENGTH, TEXT_OUTPUT, *_RESULTS, FAILURE)
