# SPDX-License-Identifier: Apache-2.0
"""Other engines in a benchmark: their environments, their forms of a checkpoint, their jobs, and the table.

`make peers` leaves a folder for each peer with a `peer.json`: {"python", "worker", "forms", "versions"}, or
{"failed": reason}. A peer's code runs in that environment alone, in processes of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from speccompile.benchmark.tables import equal_texts, figure, new_table, ratio_text
from speccompile.errors import BuildError, RuntimeFault

if TYPE_CHECKING:
    from speccompile.bundle.bundle import Bundle

PEERS = ("openvino", "ort-genai", "llama.cpp", "transformers")
STORED = "stored"  # weights of a quantised file as they are
PRECISIONS = (STORED, "fp32", "16bit", "int8", "int4")
ENVIRONMENTS = Path("build/peers")
_FIGURES = (
    *("tokens_per_s", "tokens_per_s_spread", "tokens_per_s_all", "first_token_ms", "of_plain", "of_plain_spread"),
    *("num_texts", "num_equal", "mean_first_difference", "peak_rss_bytes", "outside_engine_share"),
)


@dataclass(frozen=True)
class Peer:
    """An installed peer.

    Args:
        worker: the script that runs there; see bench/peers/peer_process.py.
        forms: by precision, {"name": the peer's own name, "modes": [mode]}; modes are `plain` and speculation methods.
    """

    name: str
    python: str
    worker: str
    forms: Mapping[str, Mapping[str, Any]]
    needs_draft: Sequence[str]
    versions: Mapping[str, str]


def read_peers(wanted: str, folder: Path) -> tuple[list[Peer], dict[str, str]]:
    """Returns the installed ones of a comma-separated list, and the reasons of those that could not be installed.

    Args:
        wanted: names, or `all`: those that `make peers` tried.

    Raises:
        RuntimeFault: a name is unknown or given twice, or a peer has no environment.
    """
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if names == ["all"]:
        names = [name for name in PEERS if (folder / name / "peer.json").is_file()] or list(PEERS)
    if not names or len(set(names)) < len(names) or any(name not in PEERS for name in names):
        expected = f"`all`, or some of {', '.join(PEERS)}, each once"
        raise RuntimeFault("--peers", repr(wanted), expected, "Correct the option.")
    peers, left_out = [], {}
    for name in names:
        found = _read(name, folder / name / "peer.json")
        if "failed" in found:
            left_out[name] = f"could not be installed: {found['failed']}"
        else:
            peers.append(
                Peer(name, found["python"], found["worker"], found["forms"], found["needs_draft"], found["versions"])
            )
    return peers, left_out


def _read(name: str, file: Path) -> dict[str, Any]:
    todo = f"Run `make peers` (or `make peers PEERS={name}`) in a checkout of speccompile, or leave the peer out."
    if not file.is_file():
        where = f"--peers {name}"
        raise RuntimeFault(where, f"no environment in {file.parent}", "one that `make peers` made", todo)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "failed" not in found and not (Path(found["python"]).exists() and Path(found["worker"]).is_file()):
        raise RuntimeFault(str(file), "an environment or a worker that is gone", "both as they were made", todo)
    return found


def precision_from_bundle(bundle: Bundle) -> str:
    """Returns the precision of a bundle's target, one of PRECISIONS, by what its weights are stored in."""
    quantization = bundle.manifest["recipe"]["target"].get("quantization", "none")
    if quantization in PRECISIONS:
        return str(quantization)
    if bundle.graphs["target"].get("form") in (None, "fp32"):
        return "fp32"
    config = Path(bundle.recipe.target.model or "") / "config.json"
    stored = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    is_half = stored.get("dtype", stored.get("torch_dtype")) in ("bfloat16", "float16")
    return "16bit" if is_half else "fp32"


def read_precisions(wanted: str | None, bundle: Bundle) -> list[str]:
    """Returns the precisions of a comma-separated list, or the bundle's own where there is none.

    Raises:
        RuntimeFault: one of them is unknown.
    """
    chosen = [name.strip() for name in (wanted or precision_from_bundle(bundle)).split(",") if name.strip()]
    if not chosen or any(name not in PRECISIONS for name in chosen):
        expected = f"some of {', '.join(PRECISIONS)}"
        raise RuntimeFault("--precisions", repr(wanted), expected, "Correct the option.")
    return list(dict.fromkeys(chosen))


def peer_environment(threads: int) -> dict[str, str]:
    """Returns the environment variables of a peer's process: this one's, without Python's paths and the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def source_of(model: str) -> Path:
    """Returns what peers convert of a local checkpoint: the GGUF file that is the model in a folder, or the folder."""
    from speccompile.checkpoints.folders import find_gguf

    path = Path(model).expanduser()
    return (find_gguf(path) or path) if path.is_dir() else path


def convert_checkpoint(peer: Peer, precision: str, checkpoint: Path, models: Path) -> Path:
    """Returns a checkpoint in a peer's format: converted by the peer's tools, once for each of its versions.

    Of a GGUF file, `stored` is the file as it is, and other forms are made of its values in float32.

    Args:
        checkpoint: a folder in Hugging Face's layout, or a GGUF file.

    Raises:
        BuildError: the conversion failed; the end of what it printed is in the message.
    """
    if checkpoint.is_file() and precision != STORED:
        command = [sys.executable, "-m", "speccompile", "convert", str(checkpoint), "--output"]
        checkpoint = _make_once(checkpoint, "float32", [], lambda made: [*command, str(made)], models)
    versions = [dict(peer.versions), hashlib.sha256(Path(peer.worker).read_bytes()).hexdigest()]

    def command_for(made: Path) -> list[str]:
        return [peer.python, peer.worker, "convert", str(checkpoint), str(made), precision]

    return _make_once(checkpoint, f"{peer.name} {precision}", versions, command_for, models)


def _make_once(source: Path, form: str, versions: Any, command: Callable[[Path], list[str]], models: Path) -> Path:
    """Returns a folder that a command makes of a checkpoint, named by all that it depends on.

    Raises:
        BuildError: the command failed.
    """
    files = [source] if source.is_file() else sorted(file for file in source.iterdir() if file.is_file())
    facts = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    key = hashlib.sha256(json.dumps([str(source.resolve()), facts, versions]).encode()).hexdigest()[:12]
    name = f"{source.name}-{form.replace(' ', '-')}-{key}"
    dest = models / name
    if not dest.exists():
        models.mkdir(parents=True, exist_ok=True)
        made = models / f".{name}.{os.getpid()}"
        environment = peer_environment(os.cpu_count() or 1)
        done = subprocess.run(command(made), env=environment, capture_output=True, text=True, errors="replace")
        if done.returncode or not made.exists():
            shutil.rmtree(made, ignore_errors=True)
            got = f"exit code {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}"
            todo = "See the message, or leave the peer out."
            raise BuildError(f"{form}, conversion of {source}", got, "a model in that format", todo)
        if dest.exists():  # another run was faster
            shutil.rmtree(made)
        else:
            made.rename(dest)
    return dest


def peer_jobs(
    peers: Sequence[Peer], precisions: Sequence[str], job: Mapping[str, Any], models: Path, left_out: dict[str, str]
) -> list[dict[str, Any]]:
    """Returns a job for each form of each peer; what cannot be converted goes to `left_out` with its reason.

    Args:
        precisions: of their forms, in this order; a peer without one is named in `left_out`.
        job: of the bundle's own modes, see `benchmark.worker`; `target` and `draft` are checkpoints or None.
    """
    jobs = []
    for precision in precisions:
        for peer in peers:
            name = f"{peer.name} {precision}"
            if precision not in peer.forms:
                left_out[name] = "the peer has no such form"
                continue
            if precision == STORED and not source_of(job["target"]).is_file():
                left_out[name] = "the checkpoint is no GGUF file"
                continue
            modes = list(peer.forms[precision]["modes"])
            if job["draft"] is None:
                modes = [mode for mode in modes if mode not in peer.needs_draft]
            try:
                target = convert_checkpoint(peer, precision, source_of(job["target"]), models)
                draft = None
                if set(modes) & set(peer.needs_draft):
                    draft = str(convert_checkpoint(peer, precision, source_of(job["draft"]), models))
            except BuildError as error:
                left_out[name] = str(error)
                continue
            own = {"modes": modes, "prefix": f"{name} ", "form": precision, "target": str(target), "draft": draft}
            process = {"command": [peer.python, peer.worker], "environment": peer_environment(job["threads"])}
            draft_tokens = {"draft_tokens": job["assistant_tokens"], "optional": True}
            jobs.append({**job, **own, **process, **draft_tokens})
    return jobs


def jobs_of_peers(
    bundle: Bundle, installed: Sequence[Peer], precisions: str | None, job: Mapping[str, Any], models: Path,
    left_out: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns the jobs of the peers on the checkpoint that a bundle was built from; see `peer_jobs`.

    Raises:
        RuntimeFault: the bundle has an adapter, or its checkpoint is gone.
    """
    target = bundle.recipe.target
    if (lora := target.lora or job.get("draft_lora")) is not None:
        todo = "Merge it with PEFT and build the merged checkpoint."
        raise RuntimeFault("--peers", f"a bundle with the adapter {lora}", "a checkpoint as it is", todo)
    if target.weights != "checkpoint" or target.model is None or not Path(target.model).exists():
        got = f"no trained checkpoint's folder at {target.model}"
        todo = "Put it where it was at the build (of a GGUF file: speccompile convert)."
        raise RuntimeFault("--peers", got, "the checkpoint that the bundle was built from", todo)
    return peer_jobs(installed, read_precisions(precisions, bundle), job, models, left_out)


def comparison_rows(
    modes: Mapping[str, Mapping[str, Any]], method: str, precision: str, peers: Sequence[Peer]
) -> list[dict[str, Any]]:
    """Returns the rows of the table: engine, precision, form, mode, speed, its ratios, equal texts.

    The ratios are quotients of `tokens_per_s`: `of_ours`, to ours of the same mode, and `of_plain`, to plain decoding
    in the same process; None where there is none.

    Args:
        peers: whose modes are called `<peer> <precision> <mode>`.
    """
    rows: list[dict[str, Any]] = []
    for name, mode in modes.items():
        if name.removesuffix(" plain") + " speculative" in modes:
            continue  # plain decoding again, in the process of another method
        peer = next((p for p in peers if name.startswith(f"{p.name} ")), None)
        if peer is not None:
            form, kind = name.removeprefix(f"{peer.name} ").split(" ", 1)
            row = {"engine": peer.name, "precision": form, "form": str(peer.forms[form]["name"]), "mode": kind}
        elif name in ("transformers", "transformers-assisted"):
            kind = "plain" if name == "transformers" else "assisted"
            row = {"engine": "transformers, here", "precision": "fp32", "form": "fp32", "mode": kind}
        else:  # plain, speculative, or "<method> speculative"
            kind = method if name == "speculative" else name.removesuffix(" speculative")
            row = {"engine": "speccompile", "precision": precision, "form": precision, "mode": kind}
        rows.append({"name": name, **row, **{key: mode[key] for key in _FIGURES}})
    ours = {made["mode"]: made["tokens_per_s"] for made in rows if made["engine"] == "speccompile"}
    for made in rows:
        mine = ours.get(made["mode"]) if made["precision"] == precision else None
        made["of_ours"] = None if mine is None else made["tokens_per_s"] / mine
    return sorted(rows, key=lambda made: (PRECISIONS.index(made["precision"]), made["engine"] != "speccompile"))


def print_rows(
    console: Console, rows: Sequence[Mapping[str, Any]], peers: Sequence[Peer], reference: str | None
) -> None:
    """Prints the table of all engines, the weights of the peers, and their time outside of their engines.

    Args:
        reference: the mode whose texts the others are compared with; None: transformers' in float32.
    """
    table = new_table("engine", "mode", "tokens/s", "of\nours", "of plain", "first\nms", "texts")
    table.columns[0].no_wrap = False  # the longest name is wrapped where 80 columns are too few
    for row in rows:
        table.add_row(
            f"{row['engine']} {row['precision']}",
            row["mode"],
            figure(row["tokens_per_s"], row["tokens_per_s_spread"]),
            ratio_text(row["of_ours"], None),
            ratio_text(row["of_plain"], row["of_plain_spread"]),
            f"{row['first_token_ms']:.1f}",
            "reference" if row["name"] == reference else equal_texts(row),
        )
    console.print(table)
    names = {peer.name for peer in peers}
    others = [row for row in rows if row["engine"] in names]
    forms = dict.fromkeys(f"{row['engine']} {row['precision']} has {row['form']}" for row in others)
    notes = [f"weights: {', '.join(forms)}"] if forms else []
    for row in others:
        if (share := row["outside_engine_share"]) is not None:
            outside_ms = 1e3 * share / row["tokens_per_s"]
            notes.append(f"{row['name']}: {outside_ms:.2f} ms of a token are outside of the engine")
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
