# SPDX-License-Identifier: Apache-2.0
"""The whole sweep: two child processes at most, a limit of CPU time for each type, and the resulting table."""

import hashlib
import json
import os
import select
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tests.export.sweep import Verdict

ROOT = Path(__file__).parents[2]
RESULT, PAGE = Path(__file__).with_name("sweep.json"), ROOT / "docs/reference/families.md"
BEGIN, END = "<!-- begin: written by make sweep -->", "<!-- end: written by make sweep -->"
NUM_CHILDREN = 2
CPU_LIMIT_S = 300.0  # of one verdict; CPU time, as a loaded machine makes nothing slower by it
POLL_S = 0.5
IDLE_S = 900.0  # without any CPU time in between: a process that waits forever
_SOURCES = (
    *("speccompile/checkpoints", "speccompile/export", "speccompile/ops", "speccompile/passes"),
    *("speccompile/core/specs.py", "speccompile/core/dims.py", "tests/export/sweep.py"),
    *("tests/export/sweep_configs.py", "tests/export/towers.py", "tests/export/harness.py"),
)
COMMAND = (sys.executable, "-m", "tests.export.sweep", "--answer")
_PACKAGES = ("transformers", "torch", "onnxscript", "onnxruntime")


def causal_types() -> list[str]:
    """The `model_type`s for which the installed transformers has a causal language model, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def digest() -> str:
    """Digest of everything that can change a verdict: our sources and the versions of the export's packages."""
    text = hashlib.sha256(" ".join(version(name) for name in _PACKAGES).encode())
    for path in (p for source in _SOURCES for p in sorted([ROOT / source, *(ROOT / source).rglob("*.py")])):
        if path.is_file():
            text.update(path.read_bytes())
    return text.hexdigest()[:16]


def cpu_seconds(pid: int) -> float:
    """CPU time that a process of ours has used so far, its threads and ended children included; only on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Child:
    """A process that judges one type after the other; a new one after a crash, or where one took too much CPU time.

    Args:
        log: what it prints is appended to it.
        command: what is run; it answers each line of its standard input with a verdict.
        limit_s: CPU seconds for a verdict.
    """

    def __init__(self, log: Path, command: Sequence[str] = COMMAND, limit_s: float = CPU_LIMIT_S) -> None:
        self.log, self.command, self.limit_s = log, command, limit_s
        self.process: Any = None

    def judge(self, model_type: str) -> Verdict:
        """The verdict; "fault" where the process dies or takes more CPU time than the limit."""
        if self.process is None:
            pipe = subprocess.PIPE
            with self.log.open("a") as log:
                self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=ROOT)
        self.process.stdin.write(model_type + "\n")
        self.process.stdin.flush()
        used = cpu_seconds(self.process.pid)
        end, last_work = used + self.limit_s, time.monotonic()
        while not select.select([self.process.stdout], [], [], POLL_S)[0]:
            before, used = used, cpu_seconds(self.process.pid)
            last_work = time.monotonic() if used > before else last_work
            if used > end or time.monotonic() - last_work > IDLE_S:
                self._end()
                return Verdict("fault", "", f"no verdict within {self.limit_s:.0f} s of CPU time")
        line = self.process.stdout.readline()
        if not line:
            return Verdict("fault", "", f"a crash (exit code {self._end()})")
        return Verdict(**json.loads(line))

    def _end(self) -> int:
        """Ends the process; returns its exit code."""
        self.process.kill()
        code, self.process = int(self.process.wait()), None
        return code

    def close(self) -> None:
        """Let the process end."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


def sweep(types: list[str], folder: Path) -> dict[str, Verdict]:
    """The verdicts of `types`; those that `folder` already has are read from it."""
    folder.mkdir(parents=True, exist_ok=True)
    names: SimpleQueue[str] = SimpleQueue()
    for name in types:
        if not (folder / f"{name}.json").exists():
            names.put(name)

    def work(index: int) -> None:
        child = Child(folder / f"child-{index}.log")
        while True:
            try:
                name = names.get_nowait()
            except Empty:
                return child.close()
            verdict = child.judge(name)
            print(f"{name}: {verdict.kind} {verdict.decided} {verdict.reason}", flush=True)
            (folder / f"{name}.json").write_text(json.dumps(vars(verdict)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(NUM_CHILDREN)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: Verdict(**json.loads((folder / f"{name}.json").read_text())) for name in types}


def as_json(verdicts: Mapping[str, Verdict]) -> str:
    """The text of sweep.json: a line for each type."""
    lines = [f"  {json.dumps(n)}: {json.dumps([v.kind, v.decided, v.reason])}" for n, v in sorted(verdicts.items())]
    head = f'"transformers": "{version("transformers")}", "torch": "{version("torch").partition("+")[0]}"'
    return f'{{{head}, "types": {{\n' + ",\n".join(lines) + "\n}}\n"


def read_result() -> tuple[str, dict[str, Verdict]]:
    """The version of transformers that was swept, and the verdicts."""
    held = json.loads(RESULT.read_text())
    return held["transformers"], {name: Verdict(*verdict) for name, verdict in held["types"].items()}


def block_from_verdicts(transformers: str, verdicts: Mapping[str, Verdict]) -> str:
    """The generated part of docs/reference/families.md."""
    equal = [n for n, v in sorted(verdicts.items()) if v.kind == "equal"]
    others = defaultdict(list)
    for name, verdict in sorted(verdicts.items()):
        if verdict.kind != "equal":
            others[verdict.reason if verdict.kind == "refused" else f"{verdict.kind}: {verdict.reason}"].append(name)
    names = ", ".join(f"`{n}`" for n in equal)
    text = f"Of transformers {transformers}, {len(equal)} of {len(verdicts)} types have equal logits: {names}."
    lines = [
        *textwrap.wrap(text, 120, break_on_hyphens=False),
        "",
        "| refused for | `model_type` |",
        "|---|---|",
        *(f"| {reason} | {', '.join(f'`{n}`' for n in names)} |" for reason, names in sorted(others.items())),
    ]
    return "\n".join((BEGIN, *lines, END))


def page_with(block: str) -> str:
    """docs/reference/families.md with `block` in place of its generated part."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + block + rest.partition(END)[2]


def main(chosen: list[str]) -> None:
    """Sweep `chosen`, or all types; all of them write the result and the page."""
    verdicts = sweep(chosen or causal_types(), ROOT / "build/sweep" / digest())
    if chosen:
        print("\n".join(f"{name}: {verdict}" for name, verdict in verdicts.items()))
        return
    RESULT.write_text(as_json(verdicts))
    PAGE.write_text(page_with(block_from_verdicts(*read_result())))
    bad = [name for name, verdict in verdicts.items() if verdict.kind not in ("equal", "refused")]
    if bad:
        sys.exit(f"neither equal nor refused: {', '.join(bad)}")
