# SPDX-License-Identifier: Apache-2.0
"""Bundles on the Hugging Face hub: fetched by name, pushed with a card that is written from manifest and certificate.

The manifest does not list the certificate, as it is made after the bundle and may be made again; it has a digest of its
own, and those of the files that it is about. `speccompile.certificate` makes it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccompile.backends.distance import Distance
from speccompile.bundle.format import CERTIFICATE, CERTIFICATE_FILES, MANIFEST, digest_from_manifest
from speccompile.common.json_reader import read_json_object
from speccompile.common.waiting import download_bar
from speccompile.errors import BundleError

VERSION = 1
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"  # of a check
INCOMPLETE = "incomplete"  # of a certificate: no check failed, and some were not run
_AGAIN = "Make it again: speccompile verify BUNDLE."


def read_certificate(folder: Path) -> dict[str, Any] | None:
    """Returns the certificate in a bundle's folder, or None. Raises BundleError: damaged, edited, or outdated."""
    path = folder / CERTIFICATE
    if not path.is_file():
        return None
    found = read_json_object(path, BundleError, _AGAIN)
    if found.get("certificate_version") != VERSION:
        got = f"version {found.get('certificate_version')!r}"
        raise BundleError(str(path), got, f"version {VERSION}", _AGAIN)
    if found.get("digest") != digest_from_manifest(found):
        raise BundleError(str(path), "contents that differ from its own digest", "a certificate as written", _AGAIN)
    return found


def changed_files(certificate: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Returns the files of a bundle that are not those verified, sorted; `manifest.json` for the rest of it."""
    about = certificate["bundle"]
    then, now = about["files"], {name: record["sha256"] for name, record in manifest["files"].items()}
    names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    return names if names or about["digest"] == manifest.get("digest") else ["manifest.json"]


def certificate_facts(folder: Path, manifest: Mapping[str, Any], is_intact: bool = True) -> dict[str, Any] | None:
    """Returns what is shown of a bundle's certificate, JSON-ready; None where there is none.

    Args:
        is_intact: its files have the digests of the manifest; otherwise the certificate is stale as well.

    Returns:
        {"verdict", "created_at", "is_stale", "changed_files", "checks": {name: status}}; {"fault"} of an unreadable
        one.
    """
    try:
        found = read_certificate(folder)
        if found is None:
            return None
        changed = changed_files(found, manifest)
        return {
            "verdict": str(found["verdict"]),
            "created_at": str(found["created_at"]),
            "is_stale": bool(changed) or not is_intact,
            "changed_files": changed,
            "checks": {str(check["name"]): str(check["status"]) for check in found["checks"]},
        }
    except BundleError as fault:
        return {"fault": str(fault)}
    except (KeyError, TypeError, AttributeError):  # its digest holds: another program wrote it
        return {"fault": f"{folder / CERTIFICATE}: not a certificate of version {VERSION}. {_AGAIN}"}


def text_from_facts(facts: Mapping[str, Any] | None) -> str:
    """Returns one line about a certificate, e.g. "incomplete, 2026-11-23T06:00:00+00:00; not run: distance"."""
    if facts is None:
        return "none: speccompile verify BUNDLE makes one"
    if "fault" in facts:
        return str(facts["fault"])
    parts = [f"{facts['verdict']}, {facts['created_at']}"]
    for status in (FAILED, NOT_RUN):
        names = [name for name, found in facts["checks"].items() if found == status]
        parts += [f"{status}: {', '.join(names)}"] if names else []
    if facts["is_stale"]:
        first, *rest = facts["changed_files"] or ["a file"]
        more = f" and {len(rest)} more" if rest else ""
        parts.insert(0, f"stale, as {first}{more} changed since")
    return "; ".join(parts)


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_TODO = "Check the name, the network and your access, or give the bundle's folder."


def is_hub_id(name: str) -> bool:
    """Returns whether a name is that of a repository on the hub: no path here, and its first part no folder here."""
    return HUB_ID.fullmatch(name) is not None and not os.path.exists(name.partition("/")[0])


def fetch_bundle(name: str, revision: str | None = None) -> Path:
    """Returns the folder of a bundle on the hub, downloaded where it is not in the hub's own cache.

    Only the manifest, its files and the certificate are fetched; digests are checked when they are read.

    Args:
        revision: branch, tag or commit; None: the main branch.

    Raises:
        BundleError: the hub cannot be reached, or there is no bundle of that name.
    """
    hub = _import_hub(name)
    try:
        # Without a network this ends at once; to fetch a single file the hub's client tries six times, in 23 seconds.
        bar = download_bar(name)
        snapshot = Path(hub.snapshot_download(name, revision=revision, allow_patterns=[MANIFEST], tqdm_class=bar))
        if not (snapshot / MANIFEST).is_file():
            raise BundleError(name, f"a repository without {MANIFEST}", "a bundle on the hub", _TODO)
        listed = json.loads((snapshot / MANIFEST).read_text(encoding="utf-8"))
        files = list(listed["files"]) if isinstance(listed, dict) and isinstance(listed.get("files"), dict) else []
        wanted = [MANIFEST, *map(_literal, files), *sorted(CERTIFICATE_FILES)]
        bar = download_bar(name)
        # The commit that the manifest was of, whatever was pushed since: snapshots are folders by commit.
        return Path(hub.snapshot_download(name, revision=snapshot.name, allow_patterns=wanted, tqdm_class=bar))
    except (OSError, ValueError) as fault:  # the hub's errors derive from these
        first = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise BundleError(name, f"no local folder, and the hub said: {first}", "a bundle on the hub", _TODO) from fault


def find_bundle(name: str) -> Path | None:
    """Returns the folder of a bundle on the hub, see `fetch_bundle`; None: there is none, or a checkpoint is cached."""
    try:
        if _is_cached_checkpoint(name):
            return None
        return fetch_bundle(name)
    except BundleError:
        return None


def _is_cached_checkpoint(name: str) -> bool:
    config, manifest = (_import_hub(name).try_to_load_from_cache(name, file) for file in ("config.json", MANIFEST))
    return isinstance(config, str) and not isinstance(manifest, str)


def push_bundle(
    folder: Path,
    manifest: Mapping[str, Any],
    name: str,
    *,
    private: bool = False,
    message: str | None = None,
    bench: Mapping[str, Any] | None = None,
) -> str:
    """Uploads a bundle, its certificate and a model card in one commit; returns the commit's URL.

    Args:
        name: of the repository, OWNER/NAME; it is made where there is none.
        bench: what `speccompile bench --json` measured, for the card.
    """
    hub = _import_hub(name)
    card = card_from_manifest(manifest, name, bench, certificate_facts(folder, manifest)).encode()
    operations = [hub.CommitOperationAdd("README.md", card)]
    operations += [hub.CommitOperationAdd(file, str(folder / file)) for file in [MANIFEST, *manifest["files"]]]
    made_since = [file for file in sorted(CERTIFICATE_FILES) if (folder / file).is_file()]
    operations += [hub.CommitOperationAdd(file, str(folder / file)) for file in made_since]
    try:
        api = hub.HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        made = api.create_commit(name, operations, commit_message=message or "Add a speccompile bundle")
    except (OSError, ValueError) as fault:
        first = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise BundleError(name, f"the hub said: {first}", "a repository that may be written", _TODO) from fault
    return str(made.commit_url)


def card_from_manifest(
    manifest: Mapping[str, Any],
    name: str,
    bench: Mapping[str, Any] | None = None,
    certificate: Mapping[str, Any] | None = None,
) -> str:
    """Returns the model card: what was built, how it drafts, what was measured, and its `certificate_facts`."""
    recipe = manifest["recipe"]
    target, engine = recipe.get("target") or {}, recipe["engine"]
    method, model = recipe["speculator"]["method"], target.get("model")
    form = manifest["graphs"]["target"].get("form") or "not recorded"
    adapters = [
        f"{row['name']} (rank {max(row['ranks'])})" for row in manifest["graphs"]["target"].get("adapters") or ()
    ]
    sizes = f"{engine['max_batch_size']} sequences of {engine['max_seq_len']} tokens"
    base = [f"base_model: {model}"] if isinstance(model, str) and HUB_ID.fullmatch(model) else []
    rows = [
        ("target", _public_name(model)),
        *([("LoRA adapter", _public_name(target["lora"]))] if target.get("lora") else []),
        *_change_rows(manifest["graphs"]["target"].get("lora") or {}),
        *([("adapters, by `model` of a request", ", ".join(adapters))] if adapters else []),
        ("speculation method", method),
        ("weights", form),
        ("backend", f"{engine['backend']} on {engine.get('device', 'cpu')}"),
        ("caches", sizes),
        ("built", f"{manifest.get('created_at')} with speccompile {manifest.get('speccompile_version')}"),
    ]
    rows += [("certificate", text_from_facts(certificate))] if certificate is not None else []
    parts = [
        "\n".join(["---", "library_name: speccompile", *base, "tags: [speculative-decoding, speccompile]", "---"]),
        f"# {name.partition('/')[2]}",
        "A speccompile bundle: compiled graphs of a model and its drafter. Drafts change the speed of the text alone: "
        "its distribution is the target's.",
        f"```bash\nspeccompile serve {name}\n```",
        _table(("", ""), rows),
        _measured(manifest, bench),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _public_name(model: Any) -> Any:
    """Returns a hub id, or the last part of a path: where it was says nothing to others."""
    return Path(model).name if isinstance(model, str) and os.path.isabs(model) else model


def _change_rows(lora: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what the adapter of joint training costs the target."""
    if not (cost := lora.get("change")):
        return []
    perplexity = f"perplexity {cost['base_perplexity']} -> {cost['perplexity']}"
    return [("change of the target", f"KL {cost['kl']} nats a token, {perplexity} on held-out text")]


def _measured(manifest: Mapping[str, Any], bench: Mapping[str, Any] | None) -> str:
    """Returns the part of the card with times and acceptance; empty where nothing was measured."""
    graph = manifest["graphs"]["target"]
    steps = (graph.get("tuning") or {}).get("step_ms") or {}
    parts = []
    if steps:
        rows = [(nodes, f"{steps[nodes]:.3g}") for nodes in sorted(steps, key=int)]
        parts.append("Time of a step of the target where it was built:\n\n" + _table(("tokens scored", "ms"), rows))
    distance = (graph.get("form_distances") or {}).get(str(graph.get("form")))
    if distance:
        parts.append(f"Distance from float32: {Distance.from_json(distance).summary()}.")
    modes = (bench or {}).get("modes") or {}
    if modes:
        head = ("mode", "tokens/s", "mean acceptance length", "texts equal to transformers' in float32")
        lines = [
            (
                mode,
                f"{row['tokens_per_s']:.1f}",
                f"{row['mean_acceptance_length']:.2f}",
                "not run" if row.get("num_equal") is None else f"{row['num_equal']} of {row['num_texts']}",
            )
            for mode, row in modes.items()
        ]
        parts.append("Measured with `speccompile bench`:\n\n" + _table(head, lines))
    return "\n\n".join(["## Measured", *parts]) if parts else ""


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _literal(file: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", file)


def _import_hub(name: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as fault:
        todo = "Install it: pip install huggingface-hub (the extra [build] has it)."
        raise BundleError(name, "no package huggingface_hub", "a bundle's folder, or that package", todo) from fault
    return huggingface_hub
