# SPDX-License-Identifier: Apache-2.0
"""speccompile cache: what builds and trainings keep, how large it is, and how to clear it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from speccompile.cli.output import errors_as_json, print_json

if TYPE_CHECKING:
    from speccompile.bundle.stage_cache import CacheEntry

ACTIONS = ("size", "list", "clear")
_DAY_S = 86400.0


def cache_command(
    action: Annotated[str, typer.Argument(help="size: by kind; list: every entry; clear: remove entries.")] = "size",
    kind: Annotated[str | None, typer.Option(help="Only this kind, as `size` names it, e.g. graphs.")] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0.0, metavar="DAYS", help="Only what was not used for so many days.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show or clear the cache: $SPECCOMPILE_CACHE, or ~/.cache/speccompile.

    Results of build stages that were used longest ago go by themselves when their sum is more than
    $SPECCOMPILE_CACHE_GIB (40 GiB). Nothing in it is needed by a bundle: what is cleared is made again by the next
    build or training that wants it. Only files that speccompile wrote are removed.
    """
    if action not in ACTIONS:
        raise typer.BadParameter(f"got {action!r}; expected one of {', '.join(ACTIONS)}", param_hint="ACTION")
    from speccompile.bundle.stage_cache import cache_limit_bytes, list_entries, remove_entries
    from speccompile.common.cache_root import cache_root

    with errors_as_json(as_json):
        root = cache_root()
        limit = cache_limit_bytes()
        entries = list_entries(root)
        kinds = sorted({entry.kind for entry in entries})
        if kind is not None and kind not in kinds:
            expected = f"one of {', '.join(kinds)}" if kinds else "none: the cache is empty"
            raise typer.BadParameter(f"got {kind!r}; expected {expected}", param_hint="--kind")
        oldest_s = time.time() - (older_than or 0.0) * _DAY_S
        chosen = [e for e in entries if kind in (None, e.kind) and (older_than is None or e.used_s <= oldest_s)]
        freed = remove_entries(root, chosen) if action == "clear" else None
    facts = {"folder": str(root), "size_bytes": sum(e.size_bytes for e in chosen), "limit_bytes": limit}
    if as_json:
        print_json({**facts, "freed_bytes": freed, "entries": [_json_from_entry(e) for e in chosen]})
    else:
        _print_cache(root, chosen, limit, action, freed)


def _json_from_entry(entry: CacheEntry) -> dict[str, Any]:
    return {"kind": entry.kind, "path": str(entry.path), "size_bytes": entry.size_bytes, "used_s": entry.used_s}


def _print_cache(root: Path, entries: list[CacheEntry], limit: int, action: str, freed: int | None) -> None:
    from speccompile.bundle.report import text_from_bytes

    console = Console(soft_wrap=True, highlight=False, markup=False)
    if freed is not None:
        num = f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
        console.print(f"{root}: {num} removed, {text_from_bytes(freed)}")
        return
    if action == "list":
        table = Table("kind", "entry", Column("size", justify="right"), "used", box=None, header_style="dim")
        for entry in entries:
            table.add_row(entry.kind, Text(entry.path.name), text_from_bytes(entry.size_bytes), _date(entry.used_s))
    else:
        titles = (Column(title, justify="right") for title in ("entries", "size", "used last"))
        table = Table("kind", *titles, box=None, header_style="dim")
        for kind in sorted({entry.kind for entry in entries}):
            rows = [entry for entry in entries if entry.kind == kind]
            size, used = sum(e.size_bytes for e in rows), max(e.used_s for e in rows)
            table.add_row(kind, str(len(rows)), text_from_bytes(size), _date(used))
    if entries:
        console.print(table)
    total = text_from_bytes(sum(e.size_bytes for e in entries))
    console.print(f"{root}: {total}; build stages are kept up to {text_from_bytes(limit)} ($SPECCOMPILE_CACHE_GIB)")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
