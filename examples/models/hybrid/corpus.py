# SPDX-License-Identifier: Apache-2.0
"""Token files of the Python sources on this machine, of packages under MIT, BSD, Apache-2.0, ISC or PSF licences.

`speccompile.training.corpus` finds the files, leaves out those that name a copyleft licence, and says which are held
out; here packages whose metadata names another licence are dropped too. The text is not redistributed.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import numpy as np

from speccompile.common.tokenizer_file import load_tokenizer
from speccompile.errors import CheckpointError
from speccompile.training.corpus import find_sources

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation)\b", re.I)
OTHER = re.compile(r"\b(A?GPL|LGPL|MPL|Mozilla|GNU|proprietary|NVIDIA|EULA)", re.I)


def permissive_packages() -> set[str]:
    """Returns the top-level names whose every distribution has a permissive licence and no other."""
    names = set()
    for top, distributions in metadata.packages_distributions().items():
        texts = []
        for name in set(distributions):
            fields = metadata.metadata(name)
            found = [*fields.get_all("License-Expression", []), *(t[:200] for t in fields.get_all("License", []))]
            found += [c for c in fields.get_all("Classifier", []) if c.startswith("License")]
            texts.append(" ".join(found))
        if all(PERMISSIVE.search(t) and not OTHER.search(t) for t in texts):
            names.add(top)
    return names


def is_wanted(path: Path, packages: set[str]) -> bool:
    """Returns whether a file belongs to the standard library or to a wanted package."""
    parts = path.parts
    if "site-packages" not in parts:
        return True
    return parts[parts.index("site-packages") + 1].removesuffix(".py") in packages


def write_tokens(folder: Path, tokenizer_file: Path, max_tokens: int, max_held_out: int) -> None:
    """Writes `train.bin` and `heldout.bin`: uint16 tokens, documents between <s> (0) and </s> (1).

    The documents come in the order of their digests, which is a shuffle that everyone repeats. `heldout.json` says
    how many bytes of text a held-out token is.
    """
    tokenizer = load_tokenizer(tokenizer_file, CheckpointError, "Download the file again.")
    packages = permissive_packages()
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[bool, list[np.ndarray]] = {True: [], False: []}
    sizes, limits, num_bytes = {True: 0, False: 0}, {True: max_held_out, False: max_tokens}, 0
    for document in find_sources([], python_sources=True).documents():
        held_out = document.is_held_out
        if sizes[held_out] >= limits[held_out] or not is_wanted(Path(document.source), packages):
            continue
        ids = tokenizer.encode(document.text, add_special_tokens=False).ids
        parts[held_out].append(np.array([0, *ids, 1], dtype=np.uint16))
        sizes[held_out] += len(ids) + 2
        num_bytes += len(document.text.encode()) if held_out else 0
        if all(sizes[split] >= limits[split] for split in sizes):
            break
    np.concatenate(parts[False]).tofile(folder / "train.bin")
    np.concatenate(parts[True]).tofile(folder / "heldout.bin")
    (folder / "heldout.json").write_text(f'{{"bytes_per_token": {num_bytes / sizes[True]}}}\n')
    print(f"train {sizes[False]} tokens, held out {sizes[True]} tokens of {num_bytes} bytes")
