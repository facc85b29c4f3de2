# SPDX-License-Identifier: Apache-2.0
"""The texts that are right in a benchmark: transformers' greedy ones in float32, decoded once and kept in the cache."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speccompile.benchmark.rounds import Worker
from speccompile.errors import SpecCompileError

if TYPE_CHECKING:
    from speccompile.bundle.bundle import Bundle

MODE = "transformers"
PACKAGES = ("torch", "transformers")
_FILE = "texts.json"


@dataclass(frozen=True)
class Reference:
    """What texts are compared with.

    Args:
        record: of the report: {"engine", "dtype", "versions", "source": "cache", "run", or the mode whose first round
            it is}, or {"not_run": reason}.
    """

    texts: Sequence[Sequence[int]] | None  # new token ids by prompt; None: not run
    record: Mapping[str, Any]


def not_run(reason: str) -> Reference:
    return Reference(None, {"not_run": reason})


def reference_of_round(results: Sequence[Mapping[str, Any]]) -> Reference:
    return Reference([result["tokens"] for result in results], _record(MODE))


def why_no_transformers(bundle: Bundle) -> str | None:
    """Returns why a bundle's target cannot be run in transformers; None: it can be tried."""
    from speccompile.certificate.checkpoint import find_checkpoint

    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed; they come with the extra [build]"
    folder, why = find_checkpoint(bundle)
    return why.partition(";")[0] if folder is None else None  # what follows names an option of `verify`


def find_reference(
    bundle: Bundle, job: Mapping[str, Any], progress: Callable[[int], None] = lambda prompt: None
) -> Reference:
    """Returns the greedy texts of the bundle's target in transformers, in float32, whatever the bundle's precision.

    They are cached by the digests of checkpoint and adapter, prompts, number of tokens and versions.

    Args:
        job: `prompts`, `max_new_tokens` and all else that `benchmark.worker` reads.
    """
    if (why := why_no_transformers(bundle)) is not None:
        return not_run(why)
    from speccompile.bundle.format import digest_from_json, read_json, write_json
    from speccompile.bundle.stage_cache import StageCache
    from speccompile.common.cache_root import find_cache_folder

    def decode(folder: Path) -> None:
        worker = Worker({**job, "modes": [MODE]})
        try:
            texts = []
            for prompt in range(len(job["prompts"])):
                texts.append(worker.run(MODE, prompt)["tokens"])
                progress(prompt)
        finally:
            worker.close()
        write_json(folder / _FILE, {"texts": texts})

    with tempfile.TemporaryDirectory() as folder:
        dest = Path(folder) / "reference"
        try:
            is_kept = StageCache(find_cache_folder("")).fetch("references", digest_from_json(_facts(job)), dest, decode)
        except SpecCompileError as fault:
            return not_run(str(fault))
        return Reference(read_json(dest / _FILE)["texts"], _record("cache" if is_kept else "run"))


def _facts(job: Mapping[str, Any]) -> dict[str, Any]:
    from speccompile.checkpoints.folders import digests_from_checkpoint, resolve_checkpoint
    from speccompile.checkpoints.lora import digests_from_lora, find_lora
    from speccompile.checkpoints.target_tables import WEIGHT_FILES

    target = digests_from_checkpoint(resolve_checkpoint(job["target"]), "checkpoint", WEIGHT_FILES)
    lora = {} if job["lora"] is None else digests_from_lora(find_lora(job["lora"]))
    asked = {key: job[key] for key in ("prompts", "max_new_tokens", "eos_token_ids")}
    return {"target": target, "lora": lora, **asked, "versions": _versions()}


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def _record(source: str) -> dict[str, Any]:
    return {"engine": MODE, "dtype": "float32", "versions": _versions(), "source": source}
