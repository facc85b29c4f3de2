# SPDX-License-Identifier: Apache-2.0
"""The checks that every layout has: sizes, keys, shapes, dtypes, values, and agreement with the target. No torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from speccompile.checkpoints.packed_weights import numbers
from speccompile.checkpoints.safetensors import TensorHeader
from speccompile.checkpoints.target_tables import find_table
from speccompile.checkpoints.tensor_files import TensorFiles
from speccompile.doctor.config_keys import check_keys
from speccompile.doctor.findings import Finding
from speccompile.doctor.layouts import Case, Check, Expected, finding, resolve_sizes
from speccompile.errors import CheckpointError

MIN_COSINE = 0.5  # of a table's rows with the target's; rows of two models are at 0, those trained on stay near 1
_TABLE_ROWS = 1024  # of a table that are compared
CHUNK_ITEMS = 1 << 24  # elements of a tensor that are checked at once
# Bits of the exponent: all set in NaN and in infinities, and in nothing else.
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}


def check_sizes(case: Case) -> Iterator[Finding]:
    config_path = str(case.folder / "config.json")
    yield from resolve_sizes(case.layout, case.config, case.files, case.prefix, config_path)[1]


def check_missing(case: Case) -> Iterator[Finding]:
    """Every key of the layout is stored, or another replaces it."""
    lacking: dict[str, list[Expected]] = defaultdict(list)
    for want in case.expected.values():
        row = want.row
        has_other = row.is_optional or row.is_zero or row.is_derived
        if want.key not in case.files.headers and not has_other and not _stands_in(case, want):
            lacking[row.key].append(want)
    for wants in lacking.values():
        first = wants[0]
        todo = "Fetch the folder again; others fill the gap with random or zero weights in silence."
        expected = f"{first.row.dtypes[0]} {_text(first.shape)}"
        yield finding("error", case.where(first.key), f"no such key{_more(wants)}", expected, todo)


def _more(alike: Sequence[Any]) -> str:
    return f" and {len(alike) - 1} more of its kind" if len(alike) > 1 else ""


def _stands_in(case: Case, want: Expected) -> bool:
    return bool(want.fallback) and case.key_of(want.fallback) is not None


def check_extra(case: Case) -> Iterator[Finding]:
    """No key is stored that the layout does not have."""
    unknown: dict[str, list[str]] = defaultdict(list)
    for key in case.own_keys():
        if key not in case.expected:
            unknown[re.sub(r"\d+", "*", key)].append(key)
    for kind, keys in unknown.items():
        header = case.files.headers[keys[0]]
        more = f" ({len(keys)} like {kind})" if len(keys) > 1 else ""
        got = f"a key that the layout does not have{more}, {header.dtype} {_text(header.shape)}"
        todo = "Others skip it in silence. Find out what it does before you remove it: the heads may need it."
        yield finding("error", case.where(keys[0]), got, f"only keys of {case.layout.label}", todo)


def check_shapes(case: Case) -> Iterator[Finding]:
    """Every tensor has the shape that the sizes imply."""
    wrong: dict[str, list[Expected]] = defaultdict(list)
    for want in case.expected.values():
        header = case.files.headers.get(want.key)
        if header is not None and not (len(header.shape) == len(want.shape) and want.fits(header.shape)):
            wrong[want.row.key].append(want)
    for wants in wrong.values():
        first = wants[0]
        got = _text(case.files.headers[first.key].shape) + _more(wants)
        names = " x ".join(str(d) for d in first.row.dims)
        todo = "Config and weights are of different speculators: fetch the folder again, or correct config.json."
        yield finding("error", case.where(first.key), got, f"{_text(first.shape)} = {names}", todo)


def check_dtypes(case: Case) -> Iterator[Finding]:
    """Weights are F32, F16 or BF16, index maps whole numbers, masks BOOL."""
    wrong: dict[tuple[str, str], list[str]] = defaultdict(list)
    for want in case.expected.values():
        header = case.files.headers.get(want.key)
        if header is not None and header.dtype not in want.row.dtypes:
            wrong[want.row.key, header.dtype].append(want.key)
    for (_, dtype), keys in wrong.items():
        allowed = case.expected[keys[0]].row.dtypes
        todo = "Use the checkpoint before it was quantised or converted."
        yield finding("error", case.where(keys[0]), dtype + _more(keys), " or ".join(allowed), todo)


def check_finite(case: Case) -> Iterator[Finding]:
    """No weight is NaN or infinite."""
    for key, header in _weights(case):
        bits, mask = _EXPONENTS[header.dtype]
        num = sum(int(((part & mask) == mask).sum()) for part in _parts(case.files.array(key).view(bits)))
        if num:
            got = f"{num} of {header.size} values NaN or infinite"
            todo = "Training diverged or the file was damaged: take an earlier checkpoint."
            yield finding("error", case.where(key), got, "finite values", todo)


def check_trained(case: Case) -> Iterator[Finding]:
    """No matrix is all zero."""
    for key, header in _weights(case):
        if len(header.shape) < 2 or header.size == 0:
            continue
        bits = _EXPONENTS[header.dtype][0]
        sign = np.array(1 << (8 * np.dtype(bits).itemsize - 1), bits)
        if not any(np.any(part & ~sign) for part in _parts(case.files.array(key).view(bits))):
            todo = "It was never trained, or its part was not gathered when it was saved."
            yield finding("warning", case.where(key), "zeros alone", "trained weights", todo)


def _weights(case: Case) -> Iterator[tuple[str, TensorHeader]]:
    for key in case.own_keys() if case.reads_values else ():
        header = case.files.headers[key]
        if header.dtype in _EXPONENTS:
            yield key, header


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK_ITEMS):
        yield flat[start : start + CHUNK_ITEMS]


def check_shared(case: Case) -> Iterator[Finding]:
    """Copies of a weight that the config says is shared are equal to it."""
    for want in case.expected.values() if case.reads_values else ():
        first = case.key_of(want.fallback) if want.fallback else None
        if first is None or want.key not in case.files.headers or want.row.may_differ:
            continue
        same_header = case.files.headers[first] == case.files.headers[want.key]
        if not same_header or not np.array_equal(_bits(case.files.array(first)), _bits(case.files.array(want.key))):
            todo = "The config is another speculator's, or the copies were trained apart: say so in config.json."
            got = f"other values than {first}"
            yield finding("error", case.where(want.key), got, "a copy, as the config says that they are shared", todo)


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"<u{array.dtype.itemsize}") if array.size else array


def check_width(case: Case) -> Iterator[Finding]:
    """The hidden size that it reads is that of the target (size `target_hidden`)."""
    size, target = case.sizes.get("target_hidden"), case.target
    if target is not None and size is not None and size != target.dims.hidden_size:
        todo = "It was trained for another target: give the model that it belongs to."
        got, expected = f"hidden states of {size}", f"{target.dims.hidden_size}, the hidden size of {target.name}"
        yield finding("error", case.where(), got, expected, todo)


def check_vocabulary(case: Case) -> Iterator[Finding]:
    """Its vocabulary is the target's, padding included (size `vocab`)."""
    size, target = case.sizes.get("vocab"), case.target
    if target is None or size is None or size == target.dims.vocab_size:
        return
    vocab, num_tokens = target.dims.vocab_size, target.num_tokens
    got = f"a vocabulary of {size}"
    expected = f"{vocab}, the vocab_size of {target.name}"
    todo = "It was trained for another target: give the model that it belongs to."
    if 0 < num_tokens <= min(size, vocab):
        got += f"; the tokenizer has {num_tokens} tokens, so the difference is padding"
        todo = "One of the two was padded."
        if size > vocab:
            todo += " `speccompile convert --target` cuts the rows that no token uses."
        else:
            todo += " Use the target that it was trained with; rows that are missing cannot be made up."
    yield finding("error", case.where(), got, expected, todo)


def check_tables(case: Case) -> Iterator[Finding]:
    """A stored copy of a table of the target resembles it: others take the target's, or this one, in silence."""
    folder = case.target.folder if case.target is not None else None
    for want in case.expected.values() if folder is not None else ():
        header = case.files.headers.get(want.key)
        if not want.row.table or header is None or header.dtype not in want.row.dtypes:
            continue
        assert folder is not None
        try:
            found = find_table(folder, want.row.table)
        except CheckpointError:  # no weights there: what is wrong with them is for the target's own checks
            return
        if found is None or found[0].headers[found[1]].shape != header.shape:
            continue
        cosine = _mean_cosine((case.files, want.key), found)
        if not cosine >= MIN_COSINE:
            got = f"a table unlike the target's {want.row.table}: mean cosine of their rows {cosine:.2f}"
            todo = "The stored one is used. If it was never trained, remove it: the target's stands in."
            yield finding("warning", case.where(want.key), got, f"the target's, or rows near it: {MIN_COSINE}", todo)


def _mean_cosine(*tables: tuple[TensorFiles, str]) -> float:
    rows = []
    for files, key in tables:
        array, dtype = files.array(key), files.headers[key].dtype
        some = np.linspace(0, len(array) - 1, min(len(array), _TABLE_ROWS)).astype(np.int64)
        held = numbers(np.asarray(array[some]), dtype).astype(np.float64)
        rows.append(held / np.maximum(np.linalg.norm(held, axis=1, keepdims=True), np.finfo(np.float64).tiny))
    return float((rows[0] * rows[1]).sum(1).mean())


def _text(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"


COMMON = (
    Check("config.keys", check_keys),
    Check("config.sizes", check_sizes),
    Check("keys.missing", check_missing),
    Check("keys.extra", check_extra),
    Check("keys.shape", check_shapes),
    Check("keys.dtype", check_dtypes),
    Check("keys.shared", check_shared),
    Check("values.finite", check_finite),
    Check("values.zero", check_trained),
    Check("target.width", check_width),
    Check("target.vocabulary", check_vocabulary),
    Check("target.tables", check_tables),
)
