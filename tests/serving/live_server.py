# SPDX-License-Identifier: Apache-2.0
"""`speccompile serve` as a process of its own."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speccompile.bundle.format import MANIFEST, digest_from_manifest, digests_from_folder, read_json, write_json

PROGRAM = str(Path(sys.executable).with_name("speccompile"))
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


@dataclass
class Live:
    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Returns (status, JSON or text) of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            raw = None if body is None else json.dumps(body)
            connection.request(method, path, raw, {} if raw is None else {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode()
            return reply.status, json.loads(text) if reply.headers["content-type"] == "application/json" else text
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        _, text = self.ask("GET", "/metrics")
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"speccompile_{name} ")))

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def live_server(bundle: Path, *options: str) -> Iterator[Live]:
    """Yields a server at a free port, ready; killed at the end if it still runs."""
    with live_process(PROGRAM, "serve", str(bundle), "--port", "0", *options) as live:
        yield live


@contextmanager
def live_process(*command: str) -> Iterator[Live]:
    """Yields a process that serves, ready; killed at the end if it still runs."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    live = Live(process, "")
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            live.lines.append(line)
            if found := re.match(r"serving at (\S+)", line):
                live.url = found[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(120) and live.url, "".join(live.lines)
        yield live
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        reader.join(20)


def bundle_with_template(source: Path, dest: Path, template: str = CHAT_TEMPLATE) -> Path:
    """Returns a copy of a bundle with a chat template that drafts four tokens whatever this machine's step times."""
    shutil.copytree(source, dest, copy_function=os.link)
    (dest / "tokenizer/chat_template.jinja").write_text(template)
    manifest = read_json(dest / MANIFEST)
    manifest["recipe"]["speculator"] |= {"num_draft_tokens": 4, "min_confidence": 0.0}
    manifest["files"] = digests_from_folder(dest)
    manifest["digest"] = digest_from_manifest(manifest)
    (dest / MANIFEST).unlink()  # it was a link to the source's
    write_json(dest / MANIFEST, manifest)
    return dest
