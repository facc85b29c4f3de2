# SPDX-License-Identifier: Apache-2.0
"""From the input tensors of one Triton request to requests of the scheduler. numpy alone: testable without Triton."""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from speccompile.common.parameters import FLAG, INTEGER, NUMBER, STRINGS, TOKENS, Kind
from speccompile.core.sampling_params import SAMPLING_PARAMETERS, SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Request
from speccompile.serving.triton.contract import (
    FLAGS,
    IMAGES,
    INDEXES,
    INPUT_IDS,
    OUTPUT_IDS,
    SAMPLING,
    SEQUENCE_LENGTH,
    SYNONYMS,
    TEXT_INPUT,
)

_MAGIC = (b"\x89PNG", b"\xff\xd8", b"RIFF")  # how PNG, JPEG and WebP files begin: no base64 and no URL
_DATA_URL = re.compile(rb"^data:image/[a-z]+;base64,")
_NUM_SHOWN = 40  # characters of a wrong image, in messages
Arrays = Mapping[str, NDArray[Any]]


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that stop words given as ids need."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class Rules:
    """How a model reads its inputs."""

    synonyms: ClassVar[Mapping[str, str]] = SYNONYMS

    defaults: SamplingParams
    eos_token_ids: Collection[int]  # the model's own ends; an `end_id` that is not among them takes their place
    tokenizer: Decoder | None  # None where prompts are ids
    has_batch: bool = False
    speculation: str = "auto"  # `auto`, `on` or `off` where a request says nothing

    def check(self, arrays: Arrays) -> None:
        """Refuses inputs of a request as a whole."""

    def sampling(self, row: Arrays) -> SamplingParams:
        """Returns the sampling parameters of a row."""
        return replace(self.defaults, **given_sampling(row), **self.ends(row))

    def tokens(self, row: Arrays, ids: list[int]) -> list[int]:
        """Returns the prompt of a row, of which ids were sent."""
        return ids

    def ends(self, row: Arrays) -> dict[str, Any]:
        """Returns the sampling parameters that `end_id` stands for."""
        if "end_id" not in row:
            return {}
        end_id = int(one_value(row, "end_id"))
        if end_id in self.eos_token_ids and len(self.eos_token_ids) == 1:
            return {}
        return {"ignore_eos": True, "stop_token_ids": (end_id,) if end_id >= 0 else ()}


@dataclass(frozen=True)
class Call:
    """One Triton request."""

    rows: tuple[Request, ...]  # a scheduler's request for each row of the batch
    prompts: tuple[list[int], ...]  # ids of each row's prompt, where they came as ids
    texts: tuple[str, ...]  # of each row's prompt, where the answer begins with it
    streams: bool
    echoes: bool
    wanted: frozenset[str]
    has_batch: bool = False
    end_id: int = 0
    arrival_ns: int = field(default_factory=time.time_ns)


def call_from_arrays(arrays: Arrays, requested: Collection[str], known: Collection[str], rules: Rules) -> Call:
    """Reads the inputs of a request.

    Args:
        arrays: the tensors that were sent; BYTES tensors are object arrays of `bytes`.
        requested: outputs the client asks for; all of them where it does not say.
    """
    rules.check(arrays)
    by_name = _renamed(arrays, rules.synonyms)
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
    """Refuses parameters, which `/generate` makes of unknown fields, except headers and the like (regex `ignored`)."""
    unknown = sorted(name for name in names if not (ignored and re.fullmatch(ignored, name)))
    if unknown:
        todo = "Leave it out; the model's config.pbtxt lists its inputs."
        raise RuntimeFault(unknown[0], "a field or parameter that the model does not know", "its inputs alone", todo)


def _renamed(arrays: Arrays, synonyms: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for old, array in arrays.items():
        name = synonyms.get(old, old)
        if name in found and not np.array_equal(found[name], array):
            raise RuntimeFault(f"{name}, {old}", "two different values", "one of the two", "Leave one out.")
        found[name] = array
    return found


def given_sampling(row: Arrays) -> dict[str, Any]:
    """Returns the sampling parameters that a row has inputs for."""
    return {
        name: _READERS[declared.kind](row, SAMPLING[name].name)
        for name, declared in SAMPLING_PARAMETERS.items()
        if name in SAMPLING and SAMPLING[name].name in row
    }


def _row(row: Arrays, rules: Rules) -> tuple[Request, bool, bool]:
    request = Request(
        prompt=_prompt(row, rules),
        sampling=replace(rules.sampling(row), **_adapter(row)),
        num_outputs=int(one_value(row, "num_return_sequences")) if "num_return_sequences" in row else 1,
        speculation=_speculation(row, rules.speculation),  # type: ignore[arg-type]
        timeout_s=float(one_value(row, "timeout_s")) if "timeout_s" in row else None,
        images=[_image(value) for value in row[IMAGES.name].reshape(-1)] if IMAGES.name in row else (),
    )
    echoes = not ("exclude_input_in_output" in row and bool(one_value(row, "exclude_input_in_output")))
    return request, "stream" in row and bool(one_value(row, "stream")), echoes


def one_value(row: Arrays, name: str) -> Any:
    """Returns the value of an input that has one."""
    values = row[name].reshape(-1)
    if len(values) != 1:
        raise RuntimeFault(name, f"shape {list(row[name].shape)}", "one value", "Correct the request.")
    return values[0]


def _prompt(row: Arrays, rules: Rules) -> str | list[int]:
    text, ids = row.get(TEXT_INPUT.name), row.get(INPUT_IDS.name)
    if (text is None) == (ids is None):
        got = "neither" if text is None else "both"
        raise RuntimeFault(f"{TEXT_INPUT.name}, {INPUT_IDS.name}", got, "one of the two", "Correct the request.")
    if text is not None:
        return text_from_value(one_value(row, TEXT_INPUT.name), TEXT_INPUT.name)
    assert ids is not None
    tokens = rules.tokens(row, [int(i) for i in ids.reshape(-1)])
    wrong = next((token for token in tokens if not 0 <= token < 1 << 32), None)
    if wrong is not None:
        raise RuntimeFault(INPUT_IDS.name, str(wrong), "token ids, from 0 to 2^32 - 1", "Correct the request.")
    return tokens


def _image(value: Any) -> bytes:
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
    """Returns an element of Triton's arrays of bytes as text. Raises RuntimeFault: tensor `name` is not UTF-8."""
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as fault:
        raise RuntimeFault(name, f"byte {fault.start} is not UTF-8", "text in UTF-8", "Encode it as UTF-8.") from fault


def _texts(row: Arrays, name: str) -> tuple[str, ...]:
    words = [text_from_value(word, name) for word in row[name].reshape(-1)]
    return tuple(dict.fromkeys(word for word in words if word))


def _adapter(row: Arrays) -> dict[str, Any]:
    return {"adapter": text_from_value(one_value(row, "adapter"), "adapter")} if "adapter" in row else {}


def _speculation(row: Arrays, default: str) -> str:
    if "speculation" in row:
        return text_from_value(one_value(row, "speculation"), "speculation")
    if "num_draft_tokens" in row:
        return "on" if int(one_value(row, "num_draft_tokens")) > 0 else "off"
    return default


def _wanted(row: Arrays, requested: Collection[str], known: Collection[str], is_one: bool) -> frozenset[str]:
    if set(requested) != set(known):
        return frozenset(requested)
    unasked = {name for flag, names in FLAGS.items() if not (flag in row and np.any(row[flag])) for name in names}
    if TEXT_INPUT.name in row:
        unasked |= {OUTPUT_IDS.name, SEQUENCE_LENGTH.name}
    if is_one:
        unasked |= {tensor.name for tensor in INDEXES}
    return frozenset(known) - unasked


_READERS: Mapping[Kind, Callable[[Arrays, str], Any]] = {
    INTEGER: lambda row, name: int(one_value(row, name)),
    NUMBER: lambda row, name: float(one_value(row, name)),
    FLAG: lambda row, name: bool(one_value(row, name)),
    STRINGS: _texts,
    TOKENS: lambda row, name: tuple(int(token) for token in row[name].reshape(-1)),
}
