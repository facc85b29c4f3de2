# SPDX-License-Identifier: Apache-2.0
"""From the input tensors of one Triton request to requests of the scheduler. numpy alone: testable without Triton."""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from speccompile.common.surfaces import FLAG, INTEGER, NUMBER, STRINGS, TOKENS, Kind
from speccompile.core.sampling_params import SAMPLING_PARAMETERS, SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Request
from speccompile.serving.triton.contract import (
    FLAGS,
    IMAGES,
    INDEXES,
    INPUT_IDS,
    INPUT_LENGTHS,
    OUTPUT_IDS,
    SAMPLING,
    SEQUENCE_LENGTH,
    SYNONYMS,
    TEXT_INPUT,
)
from speccompile.serving.triton.trtllm_compat import Arrays, check_old_inputs, old_sampling, words_from_lists

_MAGIC = (b"\x89PNG", b"\xff\xd8", b"RIFF")  # how PNG, JPEG and WebP files begin: no base64 and no URL
_DATA_URL = re.compile(rb"^data:image/[a-z]+;base64,")
_NUM_SHOWN = 40  # characters of a wrong image, in messages
_Row = Mapping[str, NDArray[Any]]


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that stop words given as ids need."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class Rules:
    """How a model reads its inputs.

    Args:
        eos_token_ids: the model's own ends; an `end_id` that is not among them takes their place.
        tokenizer: None where prompts are ids.
        is_trtllm: the rules of the removed backend hold; see `trtllm_compat`.
        speculation: `auto`, `on` or `off` where a request says nothing.
    """

    defaults: SamplingParams
    eos_token_ids: Collection[int]
    tokenizer: Decoder | None
    has_batch: bool = False
    is_trtllm: bool = False
    speculation: str = "auto"


@dataclass(frozen=True)
class Call:
    """One Triton request.

    Args:
        rows: a scheduler's request for each row of the batch.
        prompts: ids of each row's prompt, where they came as ids.
        texts: of each row's prompt, where the answer begins with it.
    """

    rows: tuple[Request, ...]
    prompts: tuple[list[int], ...]
    texts: tuple[str, ...]
    streams: bool
    echoes: bool
    wanted: frozenset[str]
    has_batch: bool = False
    end_id: int = 0
    arrival_ns: int = field(default_factory=time.time_ns)


def call_from_arrays(arrays: Arrays, requested: Collection[str], known: Collection[str], rules: Rules) -> Call:
    """Read the inputs of a request.

    Args:
        arrays: the tensors that were sent; BYTES tensors are object arrays of `bytes`.
        requested: outputs the client asks for; all of them where it does not say.

    Raises:
        RuntimeFault: a value is missing, refused or out of range.
    """
    if rules.is_trtllm:
        check_old_inputs(arrays)
    by_name = _renamed(arrays)
    num_rows = len(next(iter(arrays.values()))) if rules.has_batch and arrays else 1
    rows = [
        _row({name: array[i] if rules.has_batch else array for name, array in by_name.items()}, rules)
        for i in range(num_rows)
    ]
    requests, streams, echoes = zip(*rows, strict=True)
    if len(set(streams)) > 1 or len(set(echoes)) > 1:
        todo = "Send rows that differ in it as requests of their own."
        raise RuntimeFault("stream, exclude_input_in_output", "other values in other rows", "one for the batch", todo)
    if len({request.num_outputs for request in requests}) > 1:
        todo = "Send rows that differ in it as requests of their own."
        raise RuntimeFault("num_return_sequences", "other numbers in other rows", "one for the batch", todo)
    ends = sorted(rules.eos_token_ids)
    return Call(
        rows=requests,
        prompts=tuple([] if isinstance(r.prompt, str) else list(r.prompt) for r in requests),
        texts=tuple(_prompt_text(r.prompt, rules.tokenizer) if echoes[0] else "" for r in requests),
        streams=streams[0],
        echoes=echoes[0] and not streams[0],
        wanted=_wanted(by_name, requested, known, is_one=len(requests) == 1 and requests[0].num_outputs == 1),
        has_batch=rules.has_batch,
        end_id=ends[0] if ends else 0,
    )


def check_parameters(names: Collection[str], ignored: str) -> None:
    """Refuse what a client sent beside the inputs: `/generate` makes a parameter of every field that it does not know.

    Args:
        ignored: a regular expression of names that are not refused, such as forwarded headers.

    Raises:
        RuntimeFault: there is such a parameter.
    """
    unknown = sorted(name for name in names if not (ignored and re.fullmatch(ignored, name)))
    if unknown:
        todo = "Leave it out; the model's config.pbtxt lists its inputs."
        raise RuntimeFault(unknown[0], "a field or parameter that the model does not know", "its inputs alone", todo)


def _renamed(arrays: Arrays) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for old, array in arrays.items():
        name = SYNONYMS.get(old, old)
        if name in found and not np.array_equal(found[name], array):
            raise RuntimeFault(f"{name}, {old}", "two different values", "one of the two", "Leave one out.")
        found[name] = array
    return found


def _row(row: _Row, rules: Rules) -> tuple[Request, bool, bool]:
    prompt = _prompt(row)
    given = {
        name: _READERS[declared.kind](row, SAMPLING[name].name)
        for name, declared in SAMPLING_PARAMETERS.items()
        if name in SAMPLING and SAMPLING[name].name in row
    }
    if "embedding_bias" in row:
        bias = row["embedding_bias"].reshape(-1)
        given["logit_bias"] = {int(token): float(bias[token]) for token in np.flatnonzero(bias)}
    ends = {} if "end_id" not in row else _ends(int(_one(row, "end_id")), rules.eos_token_ids)
    if "stop_words_list" in row:
        given["stop"] = _joined(given.get("stop", ()), words_from_lists(row["stop_words_list"]), rules.tokenizer)
    fields = {**(old_sampling(given) if rules.is_trtllm else given), **ends}
    limit = float(_one(row, "timeout_s")) if "timeout_s" in row else None
    request = Request(
        prompt=prompt,
        sampling=replace(SamplingParams(max_new_tokens=rules.defaults.max_new_tokens), **fields)
        if rules.is_trtllm
        else replace(rules.defaults, **fields),
        num_outputs=int(_one(row, "num_return_sequences")) if "num_return_sequences" in row else 1,
        speculation=_speculation(row, rules.speculation),  # type: ignore[arg-type]
        timeout_s=limit,
        images=[_image(value) for value in row[IMAGES.name].reshape(-1)] if IMAGES.name in row else (),
    )
    echoes = not ("exclude_input_in_output" in row and bool(_one(row, "exclude_input_in_output")))
    return request, "stream" in row and bool(_one(row, "stream")), echoes


def _one(row: _Row, name: str) -> Any:
    values = row[name].reshape(-1)
    if len(values) != 1:
        raise RuntimeFault(name, f"shape {list(row[name].shape)}", "one value", "Correct the request.")
    return values[0]


def _prompt(row: _Row) -> str | list[int]:
    text, ids = row.get(TEXT_INPUT.name), row.get(INPUT_IDS.name)
    if (text is None) == (ids is None):
        got = "neither" if text is None else "both"
        raise RuntimeFault(f"{TEXT_INPUT.name}, {INPUT_IDS.name}", got, "one of the two", "Correct the request.")
    if text is not None:
        return text_from_value(_one(row, TEXT_INPUT.name), TEXT_INPUT.name)
    assert ids is not None
    tokens = [int(i) for i in ids.reshape(-1)]
    if INPUT_LENGTHS.name in row:
        length = int(_one(row, INPUT_LENGTHS.name))
        if not 0 <= length <= len(tokens):
            raise RuntimeFault(INPUT_LENGTHS.name, str(length), f"at most {len(tokens)}, the ids sent", "Correct it.")
        tokens = tokens[:length]
    return tokens


def _image(value: Any) -> bytes:
    """Returns an image's file, of which a request has the bytes, or these in base64, alone or in a data URL."""
    data = value if isinstance(value, bytes) else str(value).encode()
    if data.startswith(_MAGIC):
        return data
    try:
        return base64.b64decode(_DATA_URL.sub(b"", data, count=1), validate=True)
    except (binascii.Error, ValueError) as fault:
        shown = data[:_NUM_SHOWN].decode("utf-8", "backslashreplace")
        got, expected = f"{shown!r}, which is neither", "a PNG, JPEG or WebP file as bytes, or in base64"
        raise RuntimeFault(IMAGES.name, got, expected, "Send the image itself: nothing is fetched.") from fault


def _prompt_text(prompt: str | Sequence[int], tokenizer: Decoder | None) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if tokenizer is None else tokenizer.decode(prompt)


def text_from_value(value: Any, name: str) -> str:
    """Returns an element of one of Triton's arrays of bytes as text.

    Raises:
        RuntimeFault: it is not UTF-8; `name` is the tensor's.
    """
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as fault:
        raise RuntimeFault(name, f"byte {fault.start} is not UTF-8", "text in UTF-8", "Encode it as UTF-8.") from fault


def _ends(end_id: int, eos_token_ids: Collection[int]) -> dict[str, Any]:
    if end_id in eos_token_ids and len(eos_token_ids) == 1:
        return {}
    return {"ignore_eos": True, "stop_token_ids": (end_id,) if end_id >= 0 else ()}


def _texts(row: _Row, name: str) -> tuple[str, ...]:
    """Returns each text once, without the empty ones, which old clients send."""
    words = [text_from_value(word, name) for word in row[name].reshape(-1)]
    return tuple(dict.fromkeys(word for word in words if word))


def _joined(words: Sequence[str], lists: Sequence[list[int]], tokenizer: Decoder | None) -> tuple[str, ...]:
    if lists and tokenizer is None:
        raise RuntimeFault("stop_words_list", "words", "a bundle with a tokenizer", "Use end_id.")
    decoded = [tokenizer.decode(ids) for ids in lists if tokenizer is not None]
    return tuple(dict.fromkeys(word for word in (*words, *decoded) if word))


def _speculation(row: _Row, default: str) -> str:
    if "speculation" in row:
        return text_from_value(_one(row, "speculation"), "speculation")
    if "num_draft_tokens" in row:
        return "on" if int(_one(row, "num_draft_tokens")) > 0 else "off"
    return default


def _wanted(row: _Row, requested: Collection[str], known: Collection[str], is_one: bool) -> frozenset[str]:
    if set(requested) != set(known):
        return frozenset(requested)
    unasked = {name for flag, names in FLAGS.items() if not (flag in row and np.any(row[flag])) for name in names}
    if TEXT_INPUT.name in row:
        unasked |= {OUTPUT_IDS.name, SEQUENCE_LENGTH.name}
    if is_one:
        unasked |= {tensor.name for tensor in INDEXES}
    return frozenset(known) - unasked


_READERS: Mapping[Kind, Callable[[_Row, str], Any]] = {
    INTEGER: lambda row, name: int(_one(row, name)),
    NUMBER: lambda row, name: float(_one(row, name)),
    FLAG: lambda row, name: bool(_one(row, name)),
    STRINGS: _texts,
    TOKENS: lambda row, name: tuple(int(token) for token in row[name].reshape(-1)),
}
