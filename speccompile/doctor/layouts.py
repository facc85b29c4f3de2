# SPDX-License-Identifier: Apache-2.0
"""Checkpoint layouts as tables: the sizes a config gives, and a row for every kind of key. Needs no torch.

Rows have the canonical layout's name too, so that one table serves to find, check, read, write and convert.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import MAX_SIZE
from speccompile.common.json_reader import shown
from speccompile.core.dims import ModelDims
from speccompile.doctor.findings import Finding, Severity
from speccompile.errors import CheckpointError

if TYPE_CHECKING:
    from speccompile.checkpoints.tensor_files import TensorFiles

ANY = object()  # in `Format.config_marks`: any value
FLOATS = ("BF16", "F16", "F32")
_MAX_DIGITS = 9
_MAX_FREE_COUNT = 256  # of parts that need no keys of their own (shared, or zero)
Sizes = dict[str, int | None]


@dataclass(frozen=True)
class Size:
    """A whole number in a config.

    Args:
        keys: its keys in the config, of which the first present one counts; a dot leads into an object.
        stored: (pattern of a key, axis) of a tensor that gives it where the config does not.
        needed_with: pattern of a key beside which the config must have it: other readers assume a default.
    """

    name: str
    keys: tuple[str, ...] = ()
    stored: tuple[tuple[str, int], ...] = ()
    count: str = ""  # pattern of keys to count by their group; it must agree with the config
    count_first: int = 0
    default: int | None = None
    least: int = 1
    needed_with: str = ""
    is_flag: bool = False  # true or false, as 1 or 0
    present: str = ""  # pattern of a key whose presence decides where the config does not


def flag(name: str, *keys: str, default: bool = False, present: str = "") -> Size:
    return Size(name, keys, default=int(default), least=0, is_flag=True, present=present)


@dataclass(frozen=True)
class Row:
    """One kind of key.

    Args:
        over: (name in braces, size, first number): it counts from there up to the size.
        need: name of a size; without it, or with 0, the key must not be there. "!" before it negates that.
        fallback: template of the key in the canonical layout whose tensor is used where it is missing (shared weights).
        table: the target's (`target_tables.EMBEDDINGS` or `LM_HEAD`) of which it is a copy, or which stands in for it.
    """

    key: str  # template; names in braces are numbered, see `over`
    dims: tuple[str | int, ...]
    over: tuple[tuple[str, str, int], ...] = ()
    name: str = ""  # template of the key in the canonical layout; the same as `key` by default
    dtypes: tuple[str, ...] = FLOATS
    need: str = ""
    is_optional: bool = False
    fallback: str = ""
    may_differ: bool = False
    is_zero: bool = False
    is_derived: bool = False  # a missing one is computed by the layout's `complete`
    table: str = ""


@dataclass(frozen=True)
class Expected:
    """A key that a layout has at given sizes; dims of the shape are None where they are not known."""

    key: str
    name: str
    shape: tuple[int | None, ...]
    row: Row
    fallback: str

    def fits(self, shape: tuple[int, ...]) -> bool:
        pairs = zip(shape, self.shape, strict=True)
        return len(shape) == len(self.shape) and all(want in (None, have) for have, want in pairs)


@dataclass(frozen=True)
class Target:
    """The model that a speculator is for."""

    name: str
    dims: ModelDims
    config: Mapping[str, Any]  # its config.json; empty where only the sizes are known
    num_tokens: int = 0  # in its tokenizer; 0: unknown. Further rows of the vocabulary are padding
    folder: Path | None = None  # with its weights; None: what needs them is not checked


@dataclass(frozen=True)
class Check:
    """A named check of a layout."""

    name: str
    run: Callable[[Case], Iterable[Finding]]


@dataclass(frozen=True)
class Format:
    """A public layout of a method's checkpoints.

    Args:
        name: method and layout, e.g. "m/ours".
        config_marks: (key of the config, value) pairs, any of which identifies it; `ANY`: any value that is not null.
        config_prefix: the prefix that a config implies, instead of `prefixes`.
        config: our config as that of the layout, None where it is not written; gets the target, if any.
        complete: computes missing derived tensors from the config and tensors of the canonical layout.
        reads: keys of the config beside those of sizes, a dot leads into an object; None: it is another model's as
            well.
        fixed: values that keys may have whose meaning is fixed here, by the last part of their name.
    """

    name: str
    label: str
    method: str
    sizes: tuple[Size, ...]
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    marks: tuple[str, ...] = ()  # patterns of keys, any of which identifies the layout
    without: tuple[str, ...] = ()  # patterns of keys, any of which rules it out
    config_marks: tuple[tuple[str, Any], ...] = ()
    prefixes: tuple[str, ...] = ("",)  # that all keys may have; the first is written
    has_others: bool = False  # keys without the prefix belong to another model in the same files
    is_model: bool = False
    config_prefix: Callable[[Mapping[str, Any]], str] | None = None
    derive: Callable[[Sizes], None] | None = None
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)  # patterns of keys without meaning: buffers, copies
    ours: Callable[[Case], dict[str, Any]] | None = None  # the layout's config as that of the canonical layout
    config: Callable[[Mapping[str, Any], Target | None], dict[str, Any]] | None = None
    complete: Callable[[Mapping[str, Any], dict[str, Any]], None] | None = None
    reads: tuple[str, ...] | None = None
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    probe: str = ""  # import string of its `doctor.probe.Probe`; empty: it declares no conventions

    def prefix_in(self, keys: Iterable[str], config: Mapping[str, Any]) -> str:
        """Returns the prefix of the keys: of those that lead to a mark or a row, the longest."""
        if self.config_prefix is not None:
            return self.config_prefix(config)
        patterns = [re.compile(m) for m in self.marks] + [_pattern(row.key) for row in self.rows]
        names = list(keys)
        for prefix in sorted(self.prefixes, key=len, reverse=True):
            if any(k.startswith(prefix) and any(p.search(k[len(prefix) :]) for p in patterns) for k in names):
                return prefix
        return self.prefixes[0]

    def is_in(self, config: Mapping[str, Any], keys: Iterable[str]) -> bool:
        """Whether a checkpoint has this layout, judged by its marks."""
        names = list(keys)
        if any(re.search(pattern, key) for pattern in self.without for key in names):
            return False
        if self.is_named(config):
            return True
        tails = [k[len(p) :] for p in self.prefixes for k in names if k.startswith(p)]
        return any(re.search(mark, tail) for mark in self.marks for tail in tails)

    def is_named(self, config: Mapping[str, Any]) -> bool:
        pairs = [(lookup(config, key), value) for key, value in self.config_marks]
        return any(got is not None if value is ANY else got == value for got, value in pairs)

    def expand(self, sizes: Mapping[str, int | None], prefix: str = "") -> dict[str, Expected]:
        """Returns the keys at given sizes."""
        found = {}
        for row in self.rows:
            is_turned, need = row.need.startswith("!"), row.need.lstrip("!")
            if need and bool(sizes.get(need)) == is_turned:
                continue
            for numbers in _numbers(row, sizes):
                shape = tuple(d if isinstance(d, int) else sizes.get(d) for d in row.dims)
                key = prefix + row.key.format(**numbers)
                name = (row.name or row.key).format(**numbers)
                found[key] = Expected(key, name, shape, row, row.fallback.format(**numbers))
        return found


def _numbers(row: Row, sizes: Mapping[str, int | None]) -> Iterator[dict[str, int]]:
    ranges = [range(first, sizes.get(size) or 0) for _, size, first in row.over]
    for values in itertools.product(*ranges):
        known = {k: v for k, v in sizes.items() if v is not None}
        yield known | {name: value for (name, _, _), value in zip(row.over, values, strict=True)}


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile("^" + re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(template)) + "$")


def unchanged(config: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    """Returns a config as it is: `Format.config` of the canonical layout."""
    return dict(config)


def config_of_sizes(table: Iterable[Size], sizes: Mapping[str, int | None]) -> dict[str, Any]:
    """Returns the part of a config that states sizes, each under its first key; unknown ones are left out."""
    known = [(size, sizes[size.name]) for size in table if size.keys and sizes.get(size.name) is not None]
    return {size.keys[0]: bool(value) if size.is_flag else value for size, value in known}


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """Returns a value of a config; dots lead into objects. None where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True)
class Case:
    """A checkpoint under examination."""

    folder: Path
    config: Mapping[str, Any]
    files: TensorFiles
    layout: Format
    target: Target | None
    reads_values: bool  # weights may be read, not only headers
    prefix: str
    sizes: Sizes
    expected: Mapping[str, Expected]

    def canonical_config(self) -> dict[str, Any]:
        """Returns the config in the canonical layout of the method."""
        return dict(self.config) if self.layout.ours is None else self.layout.ours(self)

    def size(self, name: str) -> int:
        """Returns a size that the checkpoint must have. Raises CheckpointError: neither config nor weights give it."""
        if value := self.sizes.get(name):
            return value
        keys = next(size.keys for size in self.layout.sizes if size.name == name)
        stated = next((v for key in keys if (v := lookup(self.config, key)) is not None), None)
        where, todo = self.where_in_config(*keys), "Complete config.json."
        raise CheckpointError(where, shown(stated), "a positive integer", todo)

    def check_type(self, *known: str) -> None:
        """Refuses a config of another kind. Raises CheckpointError: its `model_type` is another one."""
        if (kind := self.config.get("model_type")) not in known:
            todo = "Give the speculator's own checkpoint, not the target's."
            raise CheckpointError(self.where_in_config("model_type"), repr(kind), " or ".join(map(repr, known)), todo)

    def own_keys(self) -> list[str]:
        """Returns the keys of the speculator: neither those of another model in the same files nor ignored ones."""
        keys = [k for k in self.files.headers if k.startswith(self.prefix) or not self.layout.has_others]
        return [k for k in keys if not any(re.search(p, k) for p in self.layout.ignored)]

    def key_of(self, name: str) -> str | None:
        return next((e.key for e in self.expected.values() if e.name == name and e.key in self.files.headers), None)

    def where(self, key: str = "") -> str:
        if key == "":
            return str(self.folder)
        path = self.files.files.get(key, self.folder)
        return f"{path} ({key})"

    def where_in_config(self, *keys: str) -> str:
        return f"{self.folder / 'config.json'} ({' or '.join(keys)})"


def finding(severity: Severity, where: str, got: str, expected: str, todo: str) -> Finding:
    return Finding(severity, "", where, got, expected, todo)


def resolve_sizes(
    layout: Format, config: Mapping[str, Any], files: TensorFiles, prefix: str, config_path: str
) -> tuple[Sizes, list[Finding]]:
    """Returns the sizes of a checkpoint and their faults; a size that nothing gives is None."""
    own = {k: h for k, h in files.headers.items() if k.startswith(prefix) or not layout.has_others}
    tails = {k.removeprefix(prefix): h for k, h in own.items()}
    sizes: Sizes = {}
    faults: list[Finding] = []
    counted = {size for row in layout.rows for _, size, _ in row.over}
    for size in layout.sizes:
        most = max(_MAX_FREE_COUNT, len(tails)) if size.name in counted else MAX_SIZE
        sizes[size.name] = _resolve(size, config, tails, most, config_path, faults)
    _limit_rows(layout, sizes, len(tails), config_path, faults)
    if layout.derive is not None:
        layout.derive(sizes)
    return sizes, faults


def _limit_rows(layout: Format, sizes: Sizes, num_stored: int, config_path: str, faults: list[Finding]) -> None:
    most = max(_MAX_FREE_COUNT**2, num_stored)
    for row in layout.rows:
        names = [size for _, size, _ in row.over]
        num_keys = math.prod(sizes.get(name) or 0 for name in names)
        if num_keys > most:
            got = " x ".join(f"{sizes[name]} {name}" for name in names)
            todo = "Config and weights are of different speculators: fetch the folder again, or correct config.json."
            faults.append(
                finding("error", config_path, f"{got}: {num_keys} keys", f"about the {num_stored} stored", todo)
            )
            sizes |= dict.fromkeys(names)


def _resolve(
    size: Size, config: Mapping[str, Any], tails: Mapping[str, Any], most: int, config_path: str, faults: list[Finding]
) -> int | None:
    key = next((k for k in size.keys if lookup(config, k) is not None), None)
    value = None if key is None else lookup(config, key)
    stored = _stored(size, tails, most)
    is_right = isinstance(value, bool) if size.is_flag else isinstance(value, int) and not isinstance(value, bool)
    where = f"{config_path} ({' or '.join(size.keys)})" if key is None else f"{config_path} ({key})"
    if value is None:
        known = stored if stored is not None else size.default
        if known is None or (size.needed_with and any(re.search(size.needed_with, tail) for tail in tails)):
            kind = f"a whole number from {size.least} to {most}" if known is None else f"{known}, as the weights say"
            faults.append(finding("error", where, "nothing", kind, "Complete config.json, or give it with --set."))
        return known
    if not is_right or not size.least <= int(value) <= most:
        kind = "true or false" if size.is_flag else f"a whole number from {size.least} to {most}"
        todo = "Correct config.json, or override it with --set."
        faults.append(finding("error", where, shown(value), kind, todo))
        return stored if stored is not None else size.default
    if size.count and stored is not None and stored != value:
        todo = f"If the weights are right, use --set {key}={stored}; else fetch the folder again."
        faults.append(finding("error", where, str(value), f"{stored}, as many as are stored", todo))
        return stored
    return int(value)


def _stored(size: Size, tails: Mapping[str, Any], most: int) -> int | None:
    if size.count:
        # A number beyond `most` is no count: its key is reported as one that the layout does not have.
        last = size.count_first + most - 1
        numbers = [int(m[1]) for tail in tails if (m := re.search(size.count, tail)) and len(m[1]) <= _MAX_DIGITS]
        return max((n for n in numbers if n <= last), default=size.count_first - 1) - size.count_first + 1 or None
    for pattern, axis in size.stored:
        for tail, header in sorted(tails.items()):
            if re.search(pattern, tail) and len(header.shape) > axis:
                return int(header.shape[axis])
    if size.present:
        return int(any(re.search(size.present, tail) for tail in tails))
    return None
