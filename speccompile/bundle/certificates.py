# SPDX-License-Identifier: Apache-2.0
"""Reads the certificate in a bundle's folder, and tells whether the bundle changed since.

`speccompile.certificate` makes it after the manifest, which does not list it, with digests of its own and of its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speccompile.bundle.format import CERTIFICATE, digest_from_manifest
from speccompile.common.json_reader import read_json_object
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
