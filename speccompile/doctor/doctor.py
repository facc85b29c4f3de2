# SPDX-License-Identifier: Apache-2.0
"""The doctor: finds the layout of a speculator's checkpoint and all its faults. Safetensors need no torch.

Only headers and index maps are read unless the caller asks for values; an unreadable checkpoint is a finding, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.checkpoints.checkpoint import read_config, read_dims, read_text_config
from speccompile.checkpoints.folders import origin_of, resolve_checkpoint
from speccompile.checkpoints.tensor_files import SPECULATOR_FILES, TensorFiles, open_files
from speccompile.common.json_reader import shown
from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.core.dims import ModelDims
from speccompile.core.registry import load_formats
from speccompile.doctor.config_keys import unread_keys
from speccompile.doctor.findings import Finding, Report, raise_first
from speccompile.doctor.layouts import ANY, Case, Expected, Format, Target, resolve_sizes
from speccompile.errors import CheckpointError

if TYPE_CHECKING:
    import torch


MAX_AUTO_BYTES = 1 << 30  # of weights that are read by default: about a second
_SMALL_FILES = ("config.json", "tokenizer.json")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was opened: config, weights, and the layout, if one was recognised."""

    folder: Path
    config: Mapping[str, Any]
    files: TensorFiles
    layout: Format | None


def find_target(model: str) -> Target:
    """Returns the target, of a hub id config and tokenizer. Raises CheckpointError: no config of a language model."""
    folder = resolve_checkpoint(model, _SMALL_FILES)
    return Target(model, read_dims(folder), read_text_config(folder), _count_tokens(folder), folder)


def _count_tokens(folder: Path) -> int:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return 0
    tokenizer = load_tokenizer(path, CheckpointError, "Download the file again.")
    return int(tokenizer.get_vocab_size(with_added_tokens=True))


def open_checkpoint(folder: Path, formats: Sequence[Format], overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Reads config and headers, and finds the layout.

    Raises:
        CheckpointError: no config, no weights, a damaged or refused file, a speculator of another method.
    """
    if not folder.is_dir():
        todo = "Check the path, or give a hub id like owner/name."
        raise CheckpointError(str(folder), "no such folder", "a speculator's checkpoint folder", todo)
    config = {**read_config(folder), **(overrides or {})}
    files = open_files(folder)
    layout = next((f for f in formats if f.is_in(config, files.headers)), None)
    if formats and (layout is None or not layout.has_others):
        _refuse_other(folder, config, files.headers, {f.method for f in formats})
    return Checkpoint(folder, config, files, layout)


def check_method(folder: Path, method: str | None) -> None:
    """Refuses a speculator of another method (None: a language model); unreadable ones are left to other checks."""
    try:
        config, keys = read_config(folder), open_files(folder).headers
    except CheckpointError:
        return
    _refuse_other(folder, config, keys, {method} if method else set())


def _refuse_other(folder: Path, config: Mapping[str, Any], keys: Iterable[str], methods: Collection[str]) -> None:
    names = list(keys)
    other = next((f for f in load_formats() if f.is_in(config, names)), None)
    if other is None or other.method in methods or (not methods and (other.is_model or other.has_others)):
        return
    expected = f"a speculator of the method {' or '.join(sorted(methods))}" if methods else "a language model"
    got = f"{other.label} ({other.name})"
    todo = f"Build it with the method {other.method} (speculator.method), or give another folder."
    raise CheckpointError(str(folder), got, expected, todo)


def make_case(found: Checkpoint, layout: Format, target: Target | None = None, reads_values: bool = False) -> Case:
    """Returns the input of the checks."""
    prefix = layout.prefix_in(found.files.headers, found.config)
    config_path = str(found.folder / "config.json")
    sizes, _ = resolve_sizes(layout, found.config, found.files, prefix, config_path)
    expected = layout.expand(sizes, prefix)
    if not layout.has_others:
        expected = _as_stored(expected, prefix, found.files.headers)
    return Case(found.folder, found.config, found.files, layout, target, reads_values, prefix, sizes, expected)


def _as_stored(expected: Mapping[str, Expected], prefix: str, stored: Collection[str]) -> dict[str, Expected]:
    # A whole module may be stored without the prefix, as an LM head beside a model is.
    modules = {key[len(prefix) :].split(".")[0] for key in stored if key.startswith(prefix)}
    found = {}
    for key, want in expected.items():
        bare = key.removeprefix(prefix)
        is_bare = bare in stored and bare.split(".")[0] not in modules
        found[bare if is_bare else key] = replace(want, key=bare) if is_bare else want
    return found


def findings_from_case(case: Case) -> tuple[Finding, ...]:
    """Runs all checks of the layout; returns errors first, then in the order of the checks."""
    found = [replace(f, check=check.name) for check in case.layout.checks for f in check.run(case)]
    return tuple(sorted(found, key=lambda f: f.severity != "error"))


def examine(
    model: str,
    target: str | None = None,
    *,
    values: bool | None = None,
    overrides: Mapping[str, Any] | None = None,
    formats: Sequence[Format] | None = None,
) -> Report:
    """Returns the report on a speculator's checkpoint: its layout, and a finding for every fault.

    Args:
        target: folder or hub id of the model that it is for; None: the checks against a target are skipped.
        values: read the weights; None: up to `MAX_AUTO_BYTES` of them.
        formats: layouts that it may have; those of the registry by default.

    Raises:
        CheckpointError: the target cannot be read, or a hub id cannot be resolved.
    """
    aim = find_target(target) if target else None
    if aim is not None and values is False:
        aim = replace(aim, folder=None)
    known = load_formats() if formats is None else formats
    folder = resolve_checkpoint(model, SPECULATOR_FILES)
    try:
        found = open_checkpoint(folder, known, overrides)
    except CheckpointError as fault:
        damage = Finding("error", "files", fault.where, fault.got, fault.expected, fault.todo)
        return Report(model, "", "a folder that cannot be read", "", target or "", {}, 0, 0, False, (damage,))
    return _report(found, model, aim, values)


def _report(found: Checkpoint, model: str, target: Target | None, values: bool | None) -> Report:
    headers = found.files.headers
    num_params = sum(h.size for h in headers.values())
    if found.layout is None or _is_other(found):
        name, label, fault = _describe_unknown(found)
        aim = target.name if target else ""
        return Report(model, name, label, "", aim, {}, len(headers), num_params, False, (fault,))
    sizes_bytes = sum(f.stat().st_size for f in set(found.files.files.values()))
    reads_values = sizes_bytes <= MAX_AUTO_BYTES if values is None else values
    case = make_case(found, found.layout, target, reads_values)
    own = [headers[key] for key in case.own_keys()]
    return Report(
        model,
        case.layout.name,
        case.layout.label,
        case.layout.method,
        target.name if target else "",
        {name: size for name, size in case.sizes.items() if size is not None},
        len(own),
        sum(h.size for h in own),
        reads_values,
        findings_from_case(case),
    )


def _is_other(found: Checkpoint) -> bool:
    assert found.layout is not None
    return not found.layout.is_named(found.config) and known_format(found.config, found.files.headers) is not None


def check_kind(folder: Path, formats: Sequence[Format]) -> None:
    """Refuses a speculator by its config alone: a kind that is not supported yet, or keys that are not read."""
    config = read_config(folder)
    layout = next((f for f in formats if f.is_in(config, ())), None)
    found = Checkpoint(folder, config, TensorFiles({}, {}), layout)
    # Without weights each of the layouts may be meant.
    unread = [list(unread_keys(config, f)) for f in (formats if layout is None else (layout,))]
    if unread and all(unread):
        key, got, expected = unread[0][0]
        todo = "Correct its config.json: the drafts would be of another network."
        raise CheckpointError(f"{folder / 'config.json'} ({key})", got, expected, todo)
    if known_format(config, ()) is not None and (layout is None or _is_other(found)):
        _, _, fault = _describe_unknown(found)
        raise CheckpointError(fault.where, fault.got, fault.expected, fault.todo)


def _describe_unknown(found: Checkpoint) -> tuple[str, str, Finding]:
    known = known_format(found.config, found.files.headers)
    if known is not None:
        todo = "This layout is known but not supported yet: use a speculator of another kind."
        got = f"{known.label} ({known.name})"
        fault = Finding("error", "format", str(found.folder), got, "a layout that speccompile builds", todo)
        return known.name, known.label, fault
    some = ", ".join(sorted(found.files.headers)[:3])
    label = "an unknown layout"
    got, todo = f"{len(found.files.headers)} keys of no known layout ({some}, ...)", "Check the path."
    if found.config.get("architectures") and any(".layers." in key for key in found.files.headers):
        label = "a causal language model"
        got = f"{label} ({_names(found.config['architectures'])}) with no keys of a speculator"
        todo = "Draft with it as a model of its own, or give the speculator's folder."
    return "", label, Finding("error", "format", str(origin_of(found.folder)), got, "a speculator's checkpoint", todo)


def _names(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else shown(value)


def open_known(
    folder: Path, formats: Sequence[Format], target: Target | None, overrides: Mapping[str, Any] | None = None
) -> Case:
    """Open a checkpoint whose layout is one of `formats`, with its values; nothing is checked yet."""
    found = open_checkpoint(folder, formats, overrides)
    if found.layout is None or _is_other(found):
        fault = _describe_unknown(found)[2]
        raise CheckpointError(fault.where, fault.got, fault.expected, fault.todo)
    return make_case(found, found.layout, target, reads_values=True)


def open_config(folder: Path, formats: Sequence[Format], default: Format) -> Case:
    """Returns a speculator by its config alone, for random weights; `default` is the layout of one that names none."""
    config, files = read_config(folder), TensorFiles({}, {})
    layout = next((f for f in formats if f.is_in(config, ())), default)
    for fault in resolve_sizes(layout, config, files, "", str(folder / "config.json"))[1]:
        if fault.got != "nothing":  # weights may give it
            raise CheckpointError(fault.where, fault.got, fault.expected, fault.todo)
    return make_case(Checkpoint(folder, config, files, layout), layout)


def check_speculator(
    folder: Path,
    formats: Sequence[Format],
    target: ModelDims | None = None,
    *,
    target_folder: Path | None = None,
    values: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Case:
    """Returns the case of a checkpoint that is complete, for a method's graph source or trainer.

    Args:
        target_folder: of that model, with its weights; None: its tables are not compared.
        values: check the weights too, not only headers.
    """
    found = open_checkpoint(folder, formats, overrides)
    aim = Target("the target", target, {}, folder=target_folder) if target is not None else None
    raise_first(_report(found, str(folder), aim, values))
    assert found.layout is not None  # an unknown layout is an error of the report
    return make_case(found, found.layout, aim)


def read_speculator(
    folder: Path, formats: Sequence[Format], *, overrides: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns config and mapped tensors in the canonical layout of the method, whatever layout the folder has."""
    return canonical_from_case(check_speculator(folder, formats, values=True, overrides=overrides))


def canonical_from_case(case: Case) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns config and weights in the canonical layout; see `read_speculator`. The case must be free of errors."""
    import torch

    layout = case.layout
    config = case.canonical_config()
    tensors: dict[str, torch.Tensor] = {}
    for want in case.expected.values():
        key = want.key if want.key in case.files.headers else case.key_of(want.fallback) if want.fallback else None
        if key is not None:
            tensors[want.name] = case.files.tensor(key)
        elif want.row.is_zero:
            some = next(iter(tensors.values()))
            tensors[want.name] = torch.zeros([d or 0 for d in want.shape], dtype=some.dtype)
    if layout.complete is not None:
        layout.complete(config, tensors)
    return config, tensors


def _by_name(name: str, label: str, marks: tuple[str, ...], *config_marks: tuple[str, Any]) -> Format:
    return Format(name, label, "", (), (), (), marks=marks, config_marks=config_marks)


# Layouts that are recognised by name only.
KNOWN = (
    _by_name("mimo", "MiMo: layers of multi-token prediction in a list of their own", (r"^model\.mtp_layers\.",)),
    _by_name(
        "hydra",
        "Hydra: heads that depend on each other's tokens",
        (r"^hydra_mlp\.", r"^hydra_lm_head\.", r"^hydra_head\."),
        ("hydra_num_heads", ANY),
    ),
    _by_name(
        "redrafter",
        "ReDrafter: a recurrent drafter",
        (r"(^|\.)rnn_[uw](\.|$)", r"^lm_head\.\d+\.linear\."),
        ("model_type", "redrafter"),
        ("model_type", "recurrent_drafting"),
    ),
)


def known_format(config: Mapping[str, Any], keys: Iterable[str]) -> Format | None:
    """Returns the layout of a checkpoint that is not supported yet; None when it is none of these."""
    names = list(keys)
    return next((known for known in KNOWN if known.is_in(config, names)), None)
