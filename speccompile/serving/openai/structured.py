# SPDX-License-Identifier: Apache-2.0
"""From the fields of a body to the constraint of its text, compiled before the request is submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from speccompile.common.structured_outputs import StructuredOutputs
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Busy
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.serving.openai.errors import ApiError, error_from_fault, request_timeout
from speccompile.serving.openai.protocol import Sampled

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def structured_from_body(body: Sampled) -> tuple[str, StructuredOutputs] | None:
    """Returns the field that asks for a constraint, and the constraint; None: the text is free.

    Raises:
        ApiError: several fields ask for one, or one of them is wrong.
    """
    given: dict[str, Mapping[str, Any]] = {}
    if body.response_format is not None and (asked := _from_response_format(body.response_format)):
        given["response_format"] = asked
    for field, name in _GUIDED.items():
        if (value := getattr(body, field)) is not None:
            given[field] = {name: value}
    if body.structured_outputs is not None:
        given["structured_outputs"] = body.structured_outputs
    if not given:
        return None
    field, fields = next(iter(given.items()))
    if len(given) > 1:
        message = f"`{field}`: got {' and '.join(given)}; expected one of them. Give one constraint in a request."
        raise ApiError(400, message, param=list(given)[1], code="invalid_value")
    try:
        return field, StructuredOutputs(**fields)
    except RuntimeFault as fault:
        raise error_from_constraint(fault, field) from fault
    except TypeError as fault:
        message = f"`{field}`: got {', '.join(fields)}; expected one of json, json_object, regex, choice, grammar, "
        raise ApiError(400, f"{message}structural_tag. Correct its keys.", param=field, code="invalid_value") from fault


def _from_response_format(asked: Mapping[str, Any]) -> dict[str, Any]:
    kind = asked.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        named = asked.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else asked.get("schema")
        if isinstance(schema, dict):
            is_strict = (named if isinstance(named, dict) else asked).get("strict") is True
            return {"json": schema, "whitespace_pattern": "" if is_strict else None}
        message = "`response_format`: got no json_schema.schema; expected a JSON schema, an object. Add it."
        raise ApiError(400, message, param="response_format", code="invalid_value")
    if kind == "structural_tag":
        return {"structural_tag": {name: value for name, value in asked.items() if name != "type"}}
    message = (
        f"`response_format`: got type {kind!r}; expected text, json_object, json_schema or structural_tag. Correct it."
    )
    raise ApiError(400, message, param="response_format", code="invalid_value")


def error_from_constraint(fault: RuntimeFault, field: str) -> ApiError:
    """Returns the answer to a request whose constraint cannot be followed, by the field that asks for it."""
    message = f"`{field}`: got {fault.got}; expected {fault.expected}. {fault.todo}"
    return ApiError(400, message, param=field, code="invalid_grammar")


async def compile_constraint(
    engine: SpecEngine, wanted: StructuredOutputs, field: str, timeout_s: float | None = None
) -> None:
    """Compiles a constraint while other requests go on; it is kept for the request. Cancelling ends the work.

    Args:
        timeout_s: seconds that it may take.

    Raises:
        ApiError: it does not compile, or took too long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await engine.grammars.prepare(wanted)
    except TimeoutError as fault:
        raise request_timeout() from fault
    except Busy as fault:
        raise error_from_fault(fault) from fault
    except RuntimeFault as fault:
        raise error_from_constraint(fault, field) from fault
