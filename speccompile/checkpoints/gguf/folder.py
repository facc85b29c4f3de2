# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a checkpoint's folder: config and tokenizer are written once to the cache, weights are linked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from speccompile.checkpoints.gguf.blocks import BLOCKS
from speccompile.checkpoints.gguf.config import config_from_gguf
from speccompile.checkpoints.gguf.header import SUFFIX, read_gguf, split_names
from speccompile.checkpoints.gguf.tensors import GgufWeight, weights_from_gguf
from speccompile.checkpoints.gguf.tokenizer import tokenizer_files
from speccompile.common.cache_root import make_cache_folder
from speccompile.errors import CheckpointError

CACHE = "gguf"  # of the cache
WEIGHTS = f"weights{SUFFIX}"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_MAX_NAMED = 6


def gguf_files(folder: Path) -> list[Path]:
    """Returns the models in a folder's GGUF files, the first file of each; projectors of images are none."""
    found = sorted(f for f in folder.iterdir() if f.name.lower().endswith(SUFFIX) and not f.name.startswith("mmproj"))
    return [file for file in found if split_names(file.name)[0] == file.name or len(split_names(file.name)) == 1]


def has_other_weights(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS)


def find_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file that is the model in a folder; None where the weights are others, or there are none."""
    if has_other_weights(folder):
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
    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    key = hashlib.sha256(b"\0".join([header.digest.encode(), *map(os.fsencode, files), *sources])).hexdigest()
    folder = make_cache_folder(CACHE) / key[:32]
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
        with contextlib.suppress(OSError):  # another process has made the same
            os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _link_name(num: int) -> str:
    return WEIGHTS if num == 1 else WEIGHTS.replace(SUFFIX, f"-00001-of-{num:05d}{SUFFIX}")


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


def has_gguf(folder: Path) -> bool:
    """Returns whether the weights in a folder are those of a GGUF file, see `find_gguf`."""
    return find_gguf(folder) is not None


def gguf_weights(folder: Path) -> dict[str, GgufWeight] | None:
    """Returns the weights of the GGUF file in a folder, by transformers' names; None: there is none."""
    file = find_gguf(folder)
    return weights_from_gguf(read_gguf(file)) if file is not None else None
