# SPDX-License-Identifier: Apache-2.0
"""Errors of requests, in the JSON that OpenAI's clients read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from speccompile.common.json_reader import shown
from speccompile.core.sampling_params import SAMPLING_PARAMETERS
from speccompile.errors import RuntimeFault
from speccompile.runtime.grammars import GRAMMAR
from speccompile.runtime.requests import Busy, StepOutput

INVALID, AUTHENTICATION, NOT_FOUND = "invalid_request_error", "authentication_error", "not_found_error"
OVERLOADED, TIMEOUT, SERVER = "overloaded_error", "timeout_error", "server_error"
MARK = ":"  # begins the names of alternatives in unions of bodies; a field's path leaves them out
RETRY_AFTER_S = 1  # the queue gets shorter with every request that ends

# Name in the runtime -> name in the request.
_PARAMS: Mapping[str, str] = {
    **{
        f"SamplingParams.{name}": declared.body.name or name
        for name, declared in SAMPLING_PARAMETERS.items()
        if declared.body is not None
    },
    "Request.num_outputs": "n",
}
_COUNT = re.compile(r"\d+ tokens|a text of \d+ bytes")
_NAMED = re.compile(r"\((\w+)\)$")
_ALTERNATIVE = re.compile(r"str|(list|literal)\[.*\]|ToolChoice|dict\[.*\]")

# Pydantic's name of an error -> what was expected, and what its messages of other errors have around that.
_KINDS: Mapping[str, str] = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
_AROUND = re.compile(r"^(Input should be|(List|String) should have|expected) | after validation.*")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    def json_from_error(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def timeout_error(part: str) -> ApiError:
    headers = {"Connection": "close"}
    return ApiError(408, f"The request's {part} took too long to arrive.", code="request_timeout", headers=headers)


def request_timeout() -> ApiError:
    return ApiError(504, "The request took longer than its time-out.", TIMEOUT, None, "timeout")


def error_from_fault(fault: RuntimeFault) -> ApiError:
    """Returns the error for a request that the runtime refused."""
    if isinstance(fault, Busy):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        is_full = fault.where == "queue"
        code = "server_busy" if is_full else "shutting_down"
        return ApiError(429 if is_full else 503, str(fault), OVERLOADED, None, code, headers)
    named = _NAMED.search(fault.where)  # as "prompt (logit_bias)"
    param = named[1] if named else _PARAMS.get(fault.where) or fault.where.rpartition(".")[2].partition(" ")[0]
    is_too_long = param == "prompt" and _COUNT.fullmatch(fault.got) is not None
    code = "context_length_exceeded" if is_too_long else "invalid_value"
    message = f"`{param}`: got {fault.got}; expected {fault.expected}. {fault.todo}"
    return ApiError(400, message, INVALID, param, code)


def error_from_validation(fault: ValidationError) -> ApiError:
    """Returns the error for the first fault of a body."""
    errors = fault.errors(include_url=False)
    # An object of a type that is not known lacks fields of those that are.
    first = next((error for error in errors if error["loc"][-1:] == ("type",)), errors[0])
    param = _param((*first["loc"], *filter(None, [first.get("ctx", {}).get("param")])))
    if first["type"] == "extra_forbidden":
        message = f"Unknown field `{param}`: this server does not know it, and ignores nothing in silence."
        return ApiError(400, message, INVALID, param, "unknown_field")
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first['msg']}.", INVALID, None, "invalid_json")
    if first["type"] == "missing":
        return ApiError(400, f"`{param}` is missing.", INVALID, param, "missing_field")
    code = "unsupported_field" if first["type"] == "unsupported_field" else "invalid_value"
    message = f"{first['msg']}."
    if "param" not in first.get("ctx", {}):
        # A field that may be several things has an error for each.
        alike = [error for error in errors if _param(error["loc"]) == param]
        expected = ", or ".join(dict.fromkeys(_expected(error, param) for error in alike))
        message = f"got {shown(first['input'])}; expected {expected}. Correct it."
    return ApiError(400, f"`{param}`: {message}" if param else f"The body: {message}", INVALID, param or None, code)


def _expected(error: Mapping[str, Any], param: str) -> str:
    last = error["loc"][-1] if error["loc"] else param
    if error["type"] == "missing":
        return f"an object with `{last}`"
    kind = _KINDS.get(error["type"]) or _AROUND.sub("", error["msg"])
    is_inside = isinstance(last, int) and str(last) != param.rpartition(".")[2]
    return f"{kind} in a list" if is_inside else kind


def _param(loc: Sequence[str | int]) -> str:
    parts = [str(part) for part in loc if not str(part).startswith(MARK)]
    end = next((at for at, part in enumerate(parts) if at and _ALTERNATIVE.fullmatch(part)), len(parts))
    return ".".join(parts[:end])


def error_from_step_output(step_output: StepOutput) -> ApiError:
    """Returns the error for an output that failed: neither `stop` nor a limit ended it."""
    if step_output.finish_reason == "timeout":
        return request_timeout()
    if step_output.finish_reason == "cancelled":
        return ApiError(503, "The server is shutting down.", OVERLOADED, None, "shutting_down")
    if str(step_output.error).startswith(f"{GRAMMAR}:"):
        message = f"The constraint cannot be followed: {step_output.error}"
        return ApiError(400, message, INVALID, None, "invalid_grammar")
    return ApiError(500, f"The engine failed: {step_output.error}", SERVER, None, "engine_error")
