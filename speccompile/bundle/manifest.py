# SPDX-License-Identifier: Apache-2.0
"""The last stage: tokenizer, report and manifest."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from speccompile.bundle.format import (
    MANIFEST,
    SCHEMA_VERSION,
    digest_from_manifest,
    digests_from_folder,
    versions_from_environment,
    write_json,
)
from speccompile.bundle.report import html_from_manifest
from speccompile.bundle.tokenizers import copy_tokenizer
from speccompile.checkpoints.checkpoint import special_tokens
from speccompile.checkpoints.vision import image_record
from speccompile.recipe.plan import BuildPlan
from speccompile.version import VERSION

REPORT, RECIPE = "report.html", "recipe.yaml"


def write_bundle_files(
    folder: Path,
    plan: BuildPlan,
    target_source: Path,
    graphs: dict[str, Any],
    stages: Sequence[dict[str, Any]],
) -> None:
    """Writes everything of a bundle in `folder` that is not a graph; the manifest, with the others' digests, last."""
    recipe = json.loads(json.dumps(plan.recipe_from_plan()))
    (folder / RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
    tokenizer = copy_tokenizer(target_source, folder / "tokenizer")
    eos_token_ids, bos_token_id = special_tokens(target_source)
    manifest: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "speccompile_version": VERSION,
        "git_sha": git_sha(),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "recipe": recipe,
        "versions": versions_from_environment(),
        "graphs": graphs,
        "files": digests_from_folder(folder),
        "tokenizer": tokenizer,
        "eos_token_ids": eos_token_ids,
        "bos_token_id": bos_token_id,
        "stages": list(stages),
    }
    if plan.vision is not None:
        manifest["images"] = image_record(target_source, plan.weights)
    (folder / REPORT).write_text(html_from_manifest(manifest), encoding="utf-8")
    manifest["files"].update({k: v for k, v in digests_from_folder(folder).items() if k == REPORT})
    # Through JSON once, so that the digest is over what a reader loads (tuples become lists).
    manifest = json.loads(json.dumps(manifest))
    manifest["digest"] = digest_from_manifest(manifest)
    write_json(folder / MANIFEST, manifest)


def git_sha() -> str | None:
    """Returns the commit of speccompile's source tree, with a "+" when it has changes; None outside of one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        sha = _git(root, "rev-parse", "HEAD")
        return sha + ("+" if _git(root, "status", "--porcelain", "--", "speccompile") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
