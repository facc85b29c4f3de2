# SPDX-License-Identifier: Apache-2.0
"""Records the requests of a service with their texts, and compares them when they are decoded again.

A record is JSON lines: what recorded it, then a line for each request that has ended. A text depends on its prompt,
sampling parameters and seed alone, so a record replays on any load, with drafts or without.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from speccompile.bundle.bundle import Bundle
from speccompile.core.sampling_params import SamplingParams
from speccompile.errors import RuntimeFault
from speccompile.runtime.requests import Request, StepOutput
from speccompile.runtime.sequences import RequestHandle
from speccompile.runtime.service import Service, ServiceOptions
from speccompile.runtime.spec_engine import SpecEngine
from speccompile.version import VERSION

KIND = "speccompile record"
# Reasons of ends that are not the text's own: what came before them is the beginning of the text.
_CUT = ("cancelled", "timeout")
_log = logging.getLogger(__name__)


def open_new(path: Path) -> TextIO:
    """Returns a new file to write a record to. Raises RuntimeFault: it exists, or cannot be written."""
    try:
        return path.open("x", encoding="utf-8")
    except OSError as fault:
        raise RuntimeFault("--record", f"{path}: {fault.strerror}", "a new file", "Choose another one.") from fault


class RecordedService(Service):
    """A service that writes a record of its requests to a new file, with the prompts and texts of all users.

    Raises:
        RuntimeFault: the file exists, or cannot be written.
    """

    def __init__(self, engine: SpecEngine, options: ServiceOptions, path: Path) -> None:
        self._file: TextIO | None = open_new(path)
        super().__init__(engine, options)
        self._write({"kind": KIND, **_origin(engine.bundle)})

    def submit(self, request: Request, on_output: Callable[[StepOutput], None], *more: Request) -> RequestHandle:
        requests = request, *more
        num_open = sum(one.num_outputs for one in requests)
        outputs: list[dict[str, Any]] = [{"tokens": [], "finish_reason": ""} for _ in range(num_open)]

        def record(step: StepOutput) -> None:
            nonlocal num_open
            output = outputs[step.output_index]
            output["tokens"] += step.tokens
            if step.finish_reason is not None:
                output["finish_reason"] = step.finish_reason
                num_open -= 1
            if not num_open:
                self._write({"requests": list(map(_json_from_request, requests)), "outputs": outputs})
            on_output(step)

        return super().submit(request, record, *more)

    def close(self, drain_s: float = 0.0) -> None:
        super().close(drain_s)
        if self._file is not None:
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as fault:
            _log.warning("the record ends here: %s", fault)
            self._file = None


def _origin(bundle: Bundle | None) -> dict[str, Any]:
    digest = None if bundle is None else bundle.manifest.get("digest")
    return {"speccompile": VERSION, "bundle": digest}


def _json_from_request(request: Request) -> dict[str, Any]:
    prompt = request.prompt if isinstance(request.prompt, str) else [int(token) for token in request.prompt]
    default, given = asdict(SamplingParams()), asdict(request.sampling)
    sampling = {name: value for name, value in given.items() if value != default[name]}
    more = {"num_outputs": request.num_outputs, "num_images": len(request.images)}
    return {"prompt": prompt, "sampling": sampling, **more, "speculation": request.speculation}


@dataclass(frozen=True)
class Recorded:
    """Requests that were submitted as one, and their outputs."""

    requests: tuple[Request, ...]
    outputs: tuple[tuple[list[int], str], ...]  # token ids and finish reason of each, numbered over all requests


@dataclass(frozen=True)
class Record:
    """A record that was read; requests with images and those that ended with an error are left out."""

    origin: Mapping[str, Any]
    recorded: tuple[Recorded, ...]
    num_left_out: int

    def is_of(self, bundle: Bundle | None) -> bool:
        """Returns whether the same version of speccompile decoded with the same bundle."""
        return dict(self.origin) == _origin(bundle)


def read_record(path: Path) -> Record:
    """Reads a record. Raises RuntimeFault: it cannot be read, or is no record; the message has the line."""
    todo = "Give a file that `speccompile serve --record` wrote."
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise RuntimeFault(str(path), str(fault), "a record", todo) from fault
    recorded, num_left_out, origin = [], 0, dict[str, Any]()
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            if number == 1:
                origin = {name: data[name] for name in ("speccompile", "bundle")}
                if data["kind"] != KIND:
                    raise ValueError(f"kind {data['kind']!r}")
                continue
            outputs = tuple((list(o["tokens"]), str(o["finish_reason"])) for o in data["outputs"])
            if any(one["num_images"] for one in data["requests"]) or any(reason == "error" for _, reason in outputs):
                num_left_out += 1
                continue
            recorded.append(Recorded(tuple(map(_request_from_json, data["requests"])), outputs))
        except (ValueError, TypeError, KeyError, RuntimeFault) as fault:
            got = f"{type(fault).__name__}: {fault}"[:200]
            raise RuntimeFault(f"{path}:{number}", got, "a record", todo) from fault
    if not origin:
        raise RuntimeFault(str(path), "an empty file", "a record", todo)
    return Record(origin, tuple(recorded), num_left_out)


def _request_from_json(data: Mapping[str, Any]) -> Request:
    known = {field.name for field in fields(SamplingParams)}
    if not set(data["sampling"]) <= known:
        raise ValueError(f"unknown parameters {sorted(set(data['sampling']) - known)}")
    sampling = SamplingParams(**data["sampling"])
    return Request(data["prompt"], sampling, num_outputs=data["num_outputs"], speculation=data["speculation"])


@dataclass(frozen=True)
class Difference:
    """An output of the requests of index `line` whose token ids differ from index `at` on: `wanted` and `got`."""

    line: int
    output: int
    at: int
    wanted: list[int]
    got: list[int]


def replay(
    service: Service,
    recorded: Sequence[Recorded],
    progress: Callable[[int], None] = lambda num: None,
    on_stats: Callable[[dict[str, Any]], None] = lambda stats: None,
) -> list[Difference]:
    """Decodes recorded requests again, all at once, and returns the outputs that differ.

    Of an output that was cut short, the beginning is compared. The service needs a queue with room for all requests.

    Args:
        progress: called with the number of outputs that have ended so far, from 1 on.
        on_stats: called with the counts and times of each output that has ended (`StepOutput.stats`).
    """
    texts: list[list[list[int]]] = [[[] for _ in one.outputs] for one in recorded]
    ended = threading.Semaphore(0)

    handles: dict[int, RequestHandle] = {}

    def collect(line: int) -> Callable[[StepOutput], None]:
        def on_output(step: StepOutput) -> None:
            texts[line][step.output_index] += step.tokens
            pairs = zip(texts[line], recorded[line].outputs, strict=True)
            if line in handles and all(len(got) >= len(wanted) and reason in _CUT for got, (wanted, reason) in pairs):
                service.cancel(handles[line])
            if step.stats is not None:
                on_stats(step.stats)
            if step.finish_reason is not None:
                ended.release()

        return on_output

    for line, one in enumerate(recorded):
        handles[line] = service.submit(one.requests[0], collect(line), *one.requests[1:])
    for num in range(sum(len(one.outputs) for one in recorded)):
        ended.acquire()
        progress(num + 1)
    found = []
    for line, one in enumerate(recorded):
        for output, (wanted, reason) in enumerate(one.outputs):
            got = texts[line][output]
            got = got[: len(wanted)] if reason in _CUT else got
            if got != wanted:
                pairs = zip(got, wanted, strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(wanted)))
                found.append(Difference(line, output, at, wanted[at:], got[at:]))
    return found
