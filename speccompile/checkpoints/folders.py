# SPDX-License-Identifier: Apache-2.0
"""Locates the files of a job, and makes a folder of a GGUF file; computes their digests. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from speccompile.checkpoints.gguf.blocks import BLOCKS
from speccompile.checkpoints.gguf.config import config_from_gguf
from speccompile.checkpoints.gguf.header import MAGIC, SUFFIX, read_gguf, split_names
from speccompile.checkpoints.gguf.tensors import GgufWeight, weights_from_gguf
from speccompile.checkpoints.gguf.tokenizer import tokenizer_files
from speccompile.common.cache_root import make_cache_folder
from speccompile.common.json_reader import shown
from speccompile.common.waiting import download_bar
from speccompile.core.jobs import GraphJob
from speccompile.errors import CheckpointError

HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
HUB_GGUF = re.compile(rf"({HUB_ID.pattern})/([\w./-]+\.gguf)", re.IGNORECASE)
HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "chat_template*", "*.model", "LICENSE*", "README.md")
_MAX_SHOWN = 255  # also of a file's name, in bytes
_MAX_NAMED = 6
_CACHE = "gguf"  # of the cache
_LINK = f"weights{SUFFIX}"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def is_gguf(path: Path) -> bool:
    """Returns whether a file is a GGUF file by its name or its first bytes; one by its name need not be there."""
    if path.is_dir():
        return False
    if path.name.lower().endswith(SUFFIX):
        return True
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def resolve_checkpoint(model: str, patterns: Sequence[str] = HUB_FILES) -> Path:
    """Returns the folder of a checkpoint: a path that exists, or a hub id, downloaded if need be.

    Args:
        model: folder, GGUF file, hub id, or a hub id and a GGUF file in it; the only GGUF file is taken by itself.

    Raises:
        CheckpointError: none of these, the download failed, several GGUF files, or one that is not understood.
    """
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return _with_gguf(path)
    is_there = os.path.exists(path)
    if is_there and is_gguf(path):
        return folder_from_gguf(path)
    is_path = is_there or path.is_absolute() or model.startswith(".")
    if not is_path and (match := HUB_GGUF.fullmatch(model)):
        names = [str(PurePosixPath(match[2]).with_name(name)) for name in split_names(PurePosixPath(match[2]).name)]
        return folder_from_gguf(_download(match[1], names) / match[2])
    if is_path or not HUB_ID.fullmatch(model) or path.suffix.lower() == ".gguf":
        got = "a file" if is_there else "no such file" if is_gguf(path) else "no such folder"
        expected = "a checkpoint folder, a GGUF file or a hub id like owner/name"
        raise CheckpointError(shown_path(model), got, expected, hint(model))
    folder = _download(model, patterns)
    if "*.safetensors" not in patterns and (folder / "config.json").is_file():
        return folder
    return _with_gguf(folder, model)


def names_gguf(model: str) -> bool:
    """Returns whether a name is that of a GGUF file, here or on the hub, or of a folder with one as its model."""
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        return not is_made(path) and find_gguf(path) is not None
    return is_gguf(path) or HUB_GGUF.fullmatch(model) is not None


def _with_gguf(folder: Path, hub_id: str = "") -> Path:
    if is_made(folder):
        return folder
    file = find_gguf(folder)
    if (
        file is None
        and hub_id
        and not any(f.suffix in (".safetensors", ".bin", ".pt", ".pth") for f in folder.iterdir())
    ):
        file = _download_gguf(hub_id)
    return folder if file is None else folder_from_gguf(file)


def _download_gguf(hub_id: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        held = [PurePosixPath(f.filename) for f in snapshot_download(hub_id, allow_patterns=["*.gguf"], dry_run=True)]
    except (OSError, ValueError):  # the hub's errors derive from these
        return None
    models = [file for file in held if not file.name.startswith("mmproj")]
    firsts = [str(file) for file in models if split_names(file.name)[0] == file.name]
    if len(firsts) > 1:
        raise several(hub_id, firsts)
    return _download(hub_id, [str(file) for file in models]) / firsts[0] if firsts else None


def _download(hub_id: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), tqdm_class=download_bar(hub_id)))
    except (OSError, ValueError) as fault:  # the hub's errors derive from these
        raise CheckpointError(
            hub_id,
            f"no local folder of that name, and the hub said: {str(fault).strip().splitlines()[0]}",
            "a folder or a hub id that can be downloaded",
            "Check the name, the network and your access to a gated model, or give a local folder.",
        ) from fault


def hint(model: str) -> str:
    """Returns the advice for a model that is no folder, no GGUF file and no hub id."""
    if os.path.isfile(os.path.expanduser(model)):
        return "Give the folder that contains the file."
    if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}", model) and not is_gguf(Path(model)):
        return f"A hub id has an owner before the name: find the one of {model!r}, e.g. OWNER/{model}."
    return "Check the path; a hub id has an owner and a name, as in owner/name."


def shown_path(model: str) -> str:
    """Returns a path or hub id as it is shown in an error: without control characters, and cut where it is long."""
    is_plain = model.isprintable() and len(model) <= _MAX_SHOWN
    return model if model and is_plain else shown(model)


def find_folder(job: GraphJob, weights: str, patterns: Sequence[str] = HUB_FILES) -> Path:
    """Returns the checkpoint's folder, downloaded if need be; with random weights a folder with its config."""
    return resolve_checkpoint(job.model, patterns) if weights == "checkpoint" else find_config(job)


def find_config(job: GraphJob) -> Path:
    """Returns a folder with the config of a model, and its tokenizer if it has one; weights are not downloaded.

    Raises:
        CheckpointError: neither a folder, nor a config beside the recipe, nor a hub id that can be reached.
    """
    if os.path.exists(job.model) or HUB_GGUF.fullmatch(job.model):
        return resolve_checkpoint(job.model)
    if job.config is not None:
        return Path(job.config)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(job.model, allow_patterns=list(_SMALL_FILES)))
    except (OSError, ValueError) as fault:  # the hub's errors derive from these
        got = f"no local folder, not in the hub's cache, and the hub said: {str(fault).strip().splitlines()[0]}"
        expected = "its config.json, which is all that sizes need: in a folder, in the hub's cache, or on the hub"
        todo = "Check the name, the network and your access to a gated model, or give a folder with config.json."
        raise CheckpointError(job.model, got, expected, todo) from fault


def digests_from_checkpoint(
    source: Path, weights: str, patterns: Sequence[str], config: str = "config.json"
) -> dict[str, str]:
    """Returns the SHA-256 by name of the files that an export reads; with random weights config.json alone.

    The contents are read each time (a gigabyte a second or more): a file's size and time prove nothing.
    """
    names = [source / config]
    if weights == "checkpoint":
        names += sorted({f for pattern in patterns for f in source.glob(pattern)})
    try:
        return {f.name: _digest(f) for f in names}
    except OSError as fault:
        got = f"{fault.strerror} at {fault.filename}"
        raise CheckpointError(str(source), got, "readable files", "Check the folder.") from fault


def _digest(path: Path) -> str:
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise CheckpointError(str(path), "no regular file", "a file", "Put the file in its place.")
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def gguf_files(folder: Path) -> list[Path]:
    """Returns the models in a folder's GGUF files, the first file of each; projectors of images are none."""
    found = sorted(f for f in folder.iterdir() if f.name.lower().endswith(SUFFIX) and not f.name.startswith("mmproj"))
    return [file for file in found if split_names(file.name)[0] == file.name or len(split_names(file.name)) == 1]


def find_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file that is the model in a folder; None where the weights are others, or there are none."""
    if any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS):
        return None
    files = gguf_files(folder)
    if len(files) > 1:
        raise several(str(folder), [file.name for file in files])
    return files[0] if files else None


def several(where: str, names: list[str]) -> CheckpointError:
    """Returns the error of a folder or a repository with several models in GGUF files."""
    some = ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")
    todo = f"Name one: {where.rstrip('/')}/{names[0]}."
    return CheckpointError(where, f"{len(names)} GGUF files ({some})", "one model", todo)


def folder_from_gguf(path: Path) -> Path:
    """Returns a folder of the cache with config and tokenizer of a GGUF file, and links to it; made where need be."""
    header = read_gguf(path)
    files = [str(file.resolve()) for file in header.files]
    # The sources belong to it: what they write may change.
    home = Path(__file__)
    sources = [file.read_bytes() for file in (home, *sorted((home.parent / "gguf").glob("*.py")))]
    key = hashlib.sha256(b"\0".join([header.digest.encode(), *map(os.fsencode, files), *sources])).hexdigest()
    folder = make_cache_folder(_CACHE) / key[:32]
    if folder.is_dir():
        return folder
    config = config_from_gguf(header)
    weights_from_gguf(header)  # refuses tensors that are not known
    texts = {"config.json": json.dumps(config, indent=1), **tokenizer_files(read_gguf(path, texts=True))}
    scratch = Path(tempfile.mkdtemp(prefix=f".{key[:32]}.", dir=folder.parent))
    try:
        for name, text in texts.items():
            (scratch / name).write_text(text, encoding="utf-8")
        for name, file in zip(split_names(_link_name(len(files))), files, strict=True):
            (scratch / name).symlink_to(file)
        try:
            os.rename(scratch, folder)
        except OSError:
            if not folder.is_dir():  # else another process has made the same
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _link_name(num: int) -> str:
    return _LINK if num == 1 else _LINK.replace(SUFFIX, f"-00001-of-{num:05d}{SUFFIX}")


def is_made(folder: Path) -> bool:
    return any(file.is_symlink() for file in folder.glob(f"weights*{SUFFIX}"))


def origin_of(folder: Path) -> Path:
    links = sorted(file for file in folder.glob(f"weights*{SUFFIX}") if file.is_symlink())
    return Path(os.readlink(links[0])) if links else folder


def count_blocks(folder: Path) -> dict[str, int]:
    """Returns how many tensors the GGUF file in a folder has of each block type."""
    file = find_gguf(folder)
    kinds = Counter(BLOCKS[t.kind].name for t in read_gguf(file).tensors.values()) if file is not None else {}
    return dict(sorted(kinds.items()))


def weight_files(folder: Path) -> list[Path]:
    return sorted(file for pattern in ("*.safetensors", f"*{SUFFIX}") for file in folder.glob(pattern))


def gguf_weights(folder: Path) -> dict[str, GgufWeight] | None:
    """Returns the weights of the GGUF file in a folder, by transformers' names; None: there is none."""
    file = find_gguf(folder)
    return weights_from_gguf(read_gguf(file)) if file is not None else None
