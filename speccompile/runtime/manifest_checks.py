# SPDX-License-Identifier: Apache-2.0
"""Types and bounds of everything that is read from a manifest, as one table of rules."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Union

from speccompile.core.json_reader import finite_number, shown, whole_number
from speccompile.core.older_specs import SAMPLE_TAIL
from speccompile.core.specs import Probe
from speccompile.errors import BundleError

_REBUILD = "Build the bundle again, or copy it again from where it was built."
_MAX_COUNT = 2**31 - 1
_MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class Rule:
    """What a value must be.

    Args:
        expected: in words.
        accepts: whether a value is it.
        keys: rules of an object's values by key; a key that begins with "?" may be missing or null.
        items: rule of each item of a list, or of each value of an object.
        is_closed: an object has no other keys than those of `keys`.
    """

    expected: str
    accepts: Callable[[Any], bool]
    keys: Mapping[str, Rule] | None = None
    items: Rule | None = None
    is_closed: bool = False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_path(value: Any) -> bool:
    return _is_text(value) and all(len(part.encode()) <= _MAX_NAME_BYTES for part in value.split("/"))


def _whole(least: int, most: int = _MAX_COUNT) -> Rule:
    return Rule(f"a whole number from {least} to {most}", lambda v: whole_number(v, least, most) is not None)


def _object(**keys: Rule) -> Rule:
    """`may_NAME` is a key that may be missing or null."""
    named = {f"?{name[4:]}" if name.startswith("may_") else name: rule for name, rule in keys.items()}
    return Rule("an object", lambda v: isinstance(v, dict), named)


def _closed(**keys: Rule) -> Rule:
    """As `_object`, and any other key is refused."""
    return replace(_object(**keys), is_closed=True)


def _one_of(*words: str) -> Rule:
    return Rule(f"one of {', '.join(words)}", lambda v: v in words if isinstance(v, str) else False)


def _list_of(rule: Rule) -> Rule:
    return Rule("a list", lambda v: isinstance(v, list), items=rule)


def _map_of(rule: Rule) -> Rule:
    return Rule("an object", lambda v: isinstance(v, dict) and all(map(_is_text, v)), items=rule)


_TEXT, _PATH = Rule("a text", _is_text), Rule("a relative path", _is_path)
_ANY_OBJECT = Rule("an object", lambda v: isinstance(v, dict))
_TIME = Rule("a finite number from 0 on", lambda v: (number := finite_number(v)) is not None and number >= 0)
_DIM = Rule("a size, or a dim by name", lambda v: _is_text(v) or whole_number(v, 0, _MAX_COUNT) is not None)
_THREADS = Rule("'auto', or threads from 1 to 1024", lambda v: v == "auto" or whole_number(v, 1, 1024) is not None)
_FLAG = Rule("true or false", lambda v: isinstance(v, bool))
_TENSOR = _closed(name=_TEXT, dims=_list_of(_DIM), dtype=_TEXT, may_probe=_one_of(*typing.get_args(Probe)))
_SPEC = _closed(
    name=_TEXT, inputs=_list_of(_TENSOR), outputs=_list_of(_TENSOR), caches=_list_of(_TEXT), vocab_size=_whole(0),
    may_max_rows=_whole(0), may_draft_vocab=_whole(0),
    may_borrowed=_list_of(_closed(name=_TEXT, cache=_TEXT, may_lender=_TEXT)),
    may_rows_written_ahead=_whole(0, 1024), may_reads_prompts=_FLAG, may_scores=_one_of("one", "nodes"),
    may_num_candidates=_whole(0), may_num_drafts=_whole(0), may_gives_probs=_FLAG,
    may_tail=_one_of("none", "verify", "candidates", SAMPLE_TAIL),
)  # fmt: skip
_STEPS = Rule("milliseconds by number of nodes", lambda v: isinstance(v, dict) and all(map(_is_count, v)), items=_TIME)
_TUNING = _object(may_threads=_whole(0, 1024), may_step_ms=_STEPS)
_GRAPH = _object(
    file=_PATH, spec=_SPEC, may_role=_TEXT, may_tuning=_TUNING, may_max_rows=_whole(0), may_op_histogram=_ANY_OBJECT,
    may_dims=_object(may_max_positions=_whole(0)),
)  # fmt: skip
_ENGINE = _object(
    backend=_TEXT, may_device=_TEXT, max_batch_size=_whole(1, 1024), max_seq_len=_whole(1),
    max_draft_nodes=_whole(0, 1024), may_threads=_THREADS,
)  # fmt: skip
_RECIPE = _object(
    engine=_ENGINE, speculator=_object(method=_TEXT), may_decoding=_ANY_OBJECT, may_target=_object(may_model=_TEXT)
)
MANIFEST_RULE = _object(
    recipe=_RECIPE, versions=_ANY_OBJECT, graphs=_map_of(_GRAPH), eos_token_ids=_list_of(_whole(0)),
    files=Rule("an object", lambda v: isinstance(v, dict) and all(map(_is_path, v)), items=_object(
        sha256=_TEXT, size_bytes=_whole(0, 2**56))),
    stages=_list_of(_object(name=_TEXT, may_seconds=_TIME, may_peak_rss_bytes=_whole(0, 2**56))),
    may_tokenizer=_PATH, may_bos_token_id=_whole(0),
)  # fmt: skip


def _is_count(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 6


def check_types(where: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest in which a value that is read has another type, or lies out of all bounds.

    Args:
        where: the manifest's file, for the message.
        manifest: the parsed file.

    Raises:
        BundleError: the first such value, with its key.
    """
    _check(where, "", manifest, MANIFEST_RULE)


def _check(where: str, path: str, value: Any, rule: Rule) -> None:
    if not rule.accepts(value):
        raise BundleError(f"{where} ({shown_path(path)})", shown(value), rule.expected, _REBUILD)
    if rule.is_closed and (unknown := sorted({*value} - {key.removeprefix("?") for key in rule.keys or {}})):
        known = ", ".join(sorted(key.removeprefix("?") for key in rule.keys or {}))
        got = f"an unknown key {shown(unknown[0])}"
        raise BundleError(f"{where} ({shown_path(path)})", got, f"the keys {known}", _REBUILD)
    for key, inner in (rule.keys or {}).items():
        name = key.removeprefix("?")
        if key.startswith("?") and value.get(name) is None:
            continue
        _check(where, f"{path}.{name}".lstrip("."), value.get(name), inner)
    if rule.items is not None:
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        for part, item in rows:
            _check(where, f"{path}.{part}".lstrip("."), item, rule.items)


def shown_path(path: str) -> str:
    """Returns the path of a key as it is shown in an error."""
    return path if path.isprintable() and len(path) <= 200 else shown(path)


def check_fields(where: str, config: type[Any], values: Mapping[str, Any]) -> None:
    """Refuse values whose types are not those of a dataclass's fields.

    Args:
        where: the section, for the message.
        config: the dataclass.
        values: by field, as JSON has them: a list stands for a tuple.

    Raises:
        BundleError: the first such value.
    """
    hints = typing.get_type_hints(config)
    for name, value in values.items():
        if name in hints and not _fits(value, hints[name]):
            expected = str(hints[name]).removeprefix("<class '").removesuffix("'>").replace("typing.", "")
            raise BundleError(f"{where}.{name}", shown(value), expected, _REBUILD)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of a field's hint; what is not known here is left to the class."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(value == argument and type(value) is type(argument) for argument in arguments)
    if origin is typing.Annotated:
        return _fits(value, arguments[0])
    if origin is tuple:
        inner = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(_fits(item, inner) for item in value)
    if hint is float:
        return finite_number(value) is not None
    if hint is int:
        return whole_number(value, -_MAX_COUNT, 2**64) is not None
    return isinstance(value, hint) if hint in (str, bool, type(None)) else True
