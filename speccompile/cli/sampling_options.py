# SPDX-License-Identifier: Apache-2.0
"""The options of sampling parameters, as `SamplingParams` declares them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from speccompile.common.surfaces import FLAG, INTEGER, NUMBER, STRINGS, TOKENS, Kind, SamplingParameter
from speccompile.core.sampling_params import SAMPLING_PARAMETERS, SamplingParams
from speccompile.errors import RuntimeFault

ARGUMENT = "sampling"  # of a command: what was given, by the names of parameters
# Biases are for prompt files: a mapping is no option.
_TYPES: Mapping[Kind, Any] = {INTEGER: int, NUMBER: float, STRINGS: list[str], FLAG: bool, TOKENS: list[int]}


def with_sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with an option for each sampling parameter that has a flag, in place of its `sampling`."""
    flagged = {name: declared for name, declared in SAMPLING_PARAMETERS.items() if declared.flag is not None}

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in flagged}
        given = {name: value for name, value in values.items() if value not in (None, [])}
        command(**arguments, **{ARGUMENT: given})

    signature = inspect.signature(command, eval_str=True)
    found = dict(signature.parameters)
    names = list(found)
    at = names.index(ARGUMENT)
    options = [_option(name, declared) for name, declared in flagged.items()]
    in_order = [*(found[name] for name in names[:at]), *options, *(found[name] for name in names[at + 1 :])]
    run.__signature__ = signature.replace(parameters=in_order)  # type: ignore[attr-defined]
    return run


def _option(name: str, declared: SamplingParameter) -> inspect.Parameter:
    assert declared.flag is not None
    # Of a number between two bounds the parameter's own message names both.
    least = declared.ge if declared.kind is INTEGER or declared.le is None else None
    option = typer.Option(min=least, help=declared.flag.help or declared.description)
    kind_type: Any = _TYPES[declared.kind]
    annotation: Any = Annotated[kind_type | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def check_sampling(given: Mapping[str, Any]) -> None:
    """Refuses values out of range by their command-line names. Raises typer.BadParameter: one of them is."""
    try:
        SamplingParams(**given)
    except RuntimeFault as fault:
        option = "--" + fault.where.rpartition(".")[2].replace("_", "-")
        raise typer.BadParameter(f"got {fault.got}; expected {fault.expected}", param_hint=option) from fault
