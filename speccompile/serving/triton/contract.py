# SPDX-License-Identifier: Apache-2.0
"""Names, dtypes and dims of every input and output that our Triton models have, declared once.

Sampling parameters add theirs (`core.sampling_params`). Triton puts the batch dim in front, unless it is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from speccompile.common.parameters import FLAG, INTEGER, NUMBER, STRINGS, TOKENS, Kind, TensorInput
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
    """An input or output of a Triton model."""

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)  # without the batch dim; -1 is any size
    is_optional: bool = True


def required(tensor: Tensor) -> Tensor:
    return replace(tensor, is_optional=False)


TEXT_INPUT = Tensor("text_input", "string")
INPUT_IDS = Tensor("input_ids", "int32", (-1,))
IMAGES = Tensor("image", "string", (-1,))

_BY_KIND: Mapping[Kind, tuple[str, tuple[int, ...]]] = {
    INTEGER: ("int32", (1,)),
    NUMBER: ("float32", (1,)),
    FLAG: ("bool", (1,)),
    STRINGS: ("string", (-1,)),
    TOKENS: ("int32", (-1,)),
}
DECLARED = {
    name: (declared.kind, declared.tensor)
    for name, declared in SAMPLING_PARAMETERS.items()
    if declared.tensor is not None
}


def _sampling_input(name: str, kind: Kind, given: TensorInput) -> Tensor:
    dtype, dims = _BY_KIND[kind]
    return Tensor(given.name or name, given.dtype or dtype, dims)


# Sampling parameter -> its input.
SAMPLING = {name: _sampling_input(name, kind, given) for name, (kind, given) in DECLARED.items()}
# Second name of an input -> the input.
_SECOND = {given.second_name: SAMPLING[name] for name, (_, given) in DECLARED.items() if given.second_name}
# What a request may say about decoding, in every text model.
DECODING = (
    *SAMPLING.values(),
    *(replace(tensor, name=name) for name, tensor in _SECOND.items()),
    Tensor("num_return_sequences", "int32"),
    Tensor("end_id", "int32"),
    Tensor("stream", "bool"),
    Tensor("exclude_input_in_output", "bool"),
    Tensor("num_draft_tokens", "int32"),
)
WISHES = (
    Tensor("return_perf_metrics", "bool"),
    Tensor("return_num_input_tokens", "bool"),
    Tensor("return_num_output_tokens", "bool"),
    Tensor("return_finish_reason", "bool"),
)
# Of our models, not of TensorRT-LLM's.
OWN = (Tensor("adapter", "string"), Tensor("speculation", "string"), Tensor("timeout_s", "float32"))
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
RESULTS = (*PERF_OUTPUTS, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS, FINISH_REASON, *INDEXES)

# The flag that asks for an output; all other outputs are always sent.
FLAGS = {
    "return_perf_metrics": tuple(tensor.name for tensor in PERF_OUTPUTS),
    "return_num_input_tokens": (NUM_INPUT_TOKENS.name,),
    "return_num_output_tokens": (NUM_OUTPUT_TOKENS.name,),
    "return_finish_reason": (FINISH_REASON.name,),
}

# Second name of an input -> its name.
SYNONYMS = {name: tensor.name for name, tensor in _SECOND.items()}


def text_inputs(has_tokenizer: bool, has_vision: bool = False) -> tuple[Tensor, ...]:
    """Returns the inputs of the one decoupled model; without a tokenizer prompts are ids and texts are missing."""
    decoding = tuple(t for t in DECODING if has_tokenizer or t.dtype != "string")
    prompts = (TEXT_INPUT, INPUT_IDS) if has_tokenizer else (required(INPUT_IDS),)
    return (*prompts, *((IMAGES,) if has_vision else ()), *decoding, *OWN, *WISHES)


def text_outputs(has_tokenizer: bool) -> tuple[Tensor, ...]:
    """Returns the outputs of the one decoupled model; ids are among them where the prompt came as ids."""
    return (*((TEXT_OUTPUT,) if has_tokenizer else ()), OUTPUT_IDS, SEQUENCE_LENGTH, *RESULTS)
