# SPDX-License-Identifier: Apache-2.0
"""What one request asks of decoding. Each parameter is declared here alone, with its range and its surfaces.

One of them is a constraint, in the words of vLLM's `structured_outputs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from speccompile.common.parameters import (
    BIASES,
    COUNT,
    FLAG,
    INTEGER,
    NUMBER,
    STRINGS,
    TEXT,
    TOKENS,
    BodyField,
    Flag,
    Kind,
    TensorInput,
    sampling_parameter,
    sampling_parameters,
)
from speccompile.errors import RuntimeFault

WHERE = "SamplingParams.structured_outputs"
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputs:
    """One of the first six fields is given; the text then is of its language.

    Args:
        structural_tag: `{"structures": [{"begin", "schema", "end"}], "triggers": [..]}`: free text, but what follows a
            trigger is one of the structures; or `{"format": {"type", ..}}` with xgrammar's types
            (docs/reference/server.md).
        whitespace_pattern: a regular expression of the white space that may stand between the tokens of JSON; "": none;
            None: a space, or a line end and an indent of 20 at most.
        reasoning: markers of one token each that stand around a free text before it: ("<think>", "</think>").

    Raises:
        RuntimeFault: none or several are given, or one is of another type.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None  # a regular expression that the whole text matches
    choice: tuple[str, ...] | None = None
    grammar: str | None = None  # in Lark's syntax as llguidance reads it, or in GBNF
    structural_tag: str | Mapping[str, Any] | None = None
    whitespace_pattern: str | None = None
    reasoning: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "no constraint"
            raise RuntimeFault(WHERE, got, f"one of {', '.join(CONSTRAINTS)}", "Give one constraint in a request.")
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, json.dumps(value))
        if self.reasoning is not None:  # a list, as JSON has it, has no hash
            object.__setattr__(self, "reasoning", tuple(self.reasoning))
        name, value = given[0], getattr(self, given[0])
        if name == "choice":
            is_right = isinstance(value, list | tuple) and value and all(isinstance(v, str) and v for v in value)
            value = tuple(value) if is_right else value
            object.__setattr__(self, name, value)
        else:
            is_right = value is True if name == "json_object" else isinstance(value, str) and bool(value)
        space: object = self.whitespace_pattern
        if space is not None and not isinstance(space, str):
            name, value, is_right = "whitespace_pattern", space, False
        if not is_right:
            others = {
                "choice": "a list of non-empty texts",
                "json_object": "true",
                "whitespace_pattern": "a regular expression",
            }
            expected = others.get(name, "a text that is not empty")
            raise RuntimeFault(f"{WHERE} ({name})", repr(value)[:200], expected, "Correct the request.")

    @property
    def kind(self) -> str:
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))


def _read(value: Any) -> StructuredOutputs | None:
    if value is None or isinstance(value, StructuredOutputs):
        return value
    known = {field.name for field in fields(StructuredOutputs)}
    if not isinstance(value, Mapping) or not set(value) <= known:
        raise TypeError("no constraint")
    return StructuredOutputs(**value)


CONSTRAINT = Kind(_read, f"a StructuredOutputs, or a mapping with one of {', '.join(CONSTRAINTS)}")


# Below it a slot is greedy. Logits that differ do so by more than this, so the distribution is the same; a logit
# below 2^63 stays finite.
COLDEST = 2.0**-64
_HOTTEST = 1e30  # every token is as likely as any other there; 1 / temperature must not underflow
_MAX_TOP_K = 2**31 - 1  # far above any vocabulary
_INFINITY = float("inf")
_STOPS = "at most 64 non-empty strings, of 4096 letters together"
_MODES = ("raw_logprobs", "processed_logprobs")
_PYTHON: dict[str, Any] = {"in_recipe": False, "in_prompts": False, "flag": None, "tensor": None}
_TOLD: dict[str, Any] = {**_PYTHON, "body": None, "holds": lambda num: num is None or 0 <= num <= 20}
_PENALTY: dict[str, Any] = {"ge": -2.0, "le": 2.0, "body": BodyField(ge=-2, le=2)}


def _are_short(stops: tuple[str, ...]) -> bool:
    return all(stops) and len(stops) <= 64 and sum(map(len, stops)) <= 4096


def _checked_stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    if not _are_short(stops):
        raise ValueError(_STOPS)
    return stops


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of decoding.

    Each field is declared once: its recipe key, its option, its field in bodies and its tensor derive from here.
    Ranges and meanings of the penalties are those of the OpenAI API and of vLLM, see `runtime.logits_processors`.

    Args:
        temperature: 0 = greedy; below 2**-64 it becomes 0, above 1e30 it becomes 1e30: float32 holds no more.
        top_k: keep the k most probable tokens, at most 2**31 - 1; 0 = off.
        top_p: keep the smallest set of tokens with this mass; 1 = off.
        seed: 0 to 2**64 - 1. The same seed gives the same text in any batch composition.
        min_p: keep the tokens that are at least this times as probable as the likeliest; 0 = off.
        repetition_penalty: divides the positive logits of tokens of prompt and text, multiplies the negative ones;
            1 = off.
        presence_penalty: taken off the logit of each token that the text has; 0 = off.
        frequency_penalty: taken off the logit of each token as often as the text has it; 0 = off.
        logit_bias: added to logits, as (token, bias) pairs or as a mapping, which becomes pairs in order of tokens.
        stop: end the text before the first of these strings.
        stop_token_ids: end at these tokens, besides the model's own.
        ignore_eos: do not end at the model's own end-of-sequence tokens.
        logprobs: give the logarithm of each emitted token's probability, and of as many likeliest tokens, at most 20.
        prompt_logprobs: the same of each token of the prompt but the first, by the target's own logits.
        structured_outputs: what the text has to look like; its tokens are masked first.
        skip_special_tokens: leave special tokens out of the text; its end-of-sequence tokens are left out anyway.
        adapter: name of one of the bundle's LoRA adapters, which the target then has; empty: none.
        logprobs_mode: of the target's own logits, `raw_logprobs`, or of what is drawn from, `processed_logprobs`.

    Raises:
        RuntimeFault: a value is out of range, or of another type.
    """

    max_new_tokens: int = sampling_parameter(
        128,
        INTEGER,
        "at least 1",
        "Most tokens to emit.",
        ge=1,
        body=BodyField("max_tokens"),
        tensor=TensorInput("max_tokens", engine_name="request_output_len"),
    )
    temperature: float = sampling_parameter(0.0, NUMBER, "0 (greedy) or above", "0 is greedy.", ge=0.0, lt=_INFINITY)
    top_k: int = sampling_parameter(
        0,
        INTEGER,
        "0 (off) or above, at most 2**31 - 1",
        "Keep the k most probable tokens; 0 is off.",
        ge=0,
        le=_MAX_TOP_K,
        body=BodyField(description="-1 and 0: off.", ge=-1, convert=lambda k: max(k, 0)),
        tensor=TensorInput(engine_name="runtime_top_k"),
    )
    top_p: float = sampling_parameter(
        1.0,
        NUMBER,
        "above 0, at most 1 (off)",
        "Keep the smallest set with this mass; 1 is off.",
        gt=0.0,
        le=1.0,
        tensor=TensorInput(engine_name="runtime_top_p"),
    )
    seed: int = sampling_parameter(
        0,
        INTEGER,
        "0 to 2**64 - 1",
        "Same seed, same text.",
        ge=0,
        lt=2**64,
        # A negative seed is taken as its two's complement.
        body=BodyField(convert=lambda seed: seed & (2**64 - 1)),
        tensor=TensorInput(dtype="uint64", second_name="random_seed"),
    )
    min_p: float = sampling_parameter(
        0.0, NUMBER, "0 (off) to 1", "Keep tokens this near to the likeliest; 0 is off.", ge=0.0, le=1.0
    )
    repetition_penalty: float = sampling_parameter(
        1.0,
        NUMBER,
        "above 0",
        "Above 1: tokens of prompt and text become less likely; 1 is off.",
        gt=0.0,
        lt=_INFINITY,
        flag=Flag("On tokens of prompt and text; 1 is off."),
    )
    presence_penalty: float = sampling_parameter(
        0.0,
        NUMBER,
        "-2 to 2",
        "Taken off the logits of tokens that the text has; 0 is off.",
        flag=Flag("On tokens that the text has; 0 is off."),
        **_PENALTY,
    )
    frequency_penalty: float = sampling_parameter(
        0.0,
        NUMBER,
        "-2 to 2",
        "Taken off as often as the text has the token; 0 is off.",
        flag=Flag("As often as the text has them; 0 is off."),
        **_PENALTY,
    )
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = sampling_parameter(
        (),
        BIASES,
        "token ids, biases of -100 to 100",
        in_recipe=False,
        flag=None,
        tensor=None,
        holds=lambda pairs: all(token >= 0 and -100 <= bias <= 100 for token, bias in pairs),
    )
    stop: tuple[str, ...] = sampling_parameter(
        (),
        STRINGS,
        _STOPS,
        "End the text before these strings.",
        holds=_are_short,
        check=_checked_stops,
        flag=Flag("End the text before this string; repeatable."),
        tensor=TensorInput("stop_words"),
    )
    stop_token_ids: tuple[int, ...] = sampling_parameter(
        (), TOKENS, in_recipe=False, in_prompts=False, flag=None, tensor=None
    )
    ignore_eos: bool = sampling_parameter(False, FLAG, in_recipe=False, in_prompts=False, flag=None)
    logprobs: int | None = sampling_parameter(None, COUNT, "None (off), or 0 to 20", **_TOLD)
    prompt_logprobs: int | None = sampling_parameter(None, COUNT, "None (off), or 0 to 20", **_TOLD)
    structured_outputs: Any = sampling_parameter(None, CONSTRAINT, **_PYTHON, body=None)
    skip_special_tokens: bool = sampling_parameter(True, FLAG, **_PYTHON, body=None)
    adapter: str = sampling_parameter(
        "", TEXT, description="LoRA adapter of the bundle; empty: none.", in_recipe=False, body=None, tensor=None
    )
    logprobs_mode: str = sampling_parameter(_MODES[0], TEXT, " or ".join(_MODES), **_PYTHON, holds=_MODES.__contains__)

    def __post_init__(self) -> None:
        declared = sampling_parameters(type(self))
        for name, rule in declared.items():
            object.__setattr__(self, name, _converted(name, getattr(self, name), rule.kind))
        for name, rule in declared.items():
            if not rule.contains(getattr(self, name)):
                raise _refusal(name, getattr(self, name), rule.expected)
        heat = min(self.temperature, _HOTTEST) if self.temperature >= COLDEST else 0.0
        object.__setattr__(self, "temperature", heat)

    @property
    def is_greedy(self) -> bool:
        """True when no random number is needed."""
        return self.temperature == 0.0

    @property
    def needs_logits(self) -> bool:
        """True when the distribution needs more than temperature, top-k and top-p: see `runtime.logits_processors`."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        has_others = bool(self.logit_bias or self.structured_outputs)
        return any(penalties) or has_others or (self.min_p > 0 and not self.is_greedy)


SAMPLING_PARAMETERS = sampling_parameters(SamplingParams)


def _converted(name: str, value: Any, kind: Kind) -> object:
    try:
        return kind.convert(value)
    except (TypeError, ValueError, OverflowError) as fault:
        raise _refusal(name, value, kind.expected) from fault


def _refusal(name: str, value: object, expected: str) -> RuntimeFault:
    return RuntimeFault(f"SamplingParams.{name}", _shown(value), expected, "Correct the request.")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."
