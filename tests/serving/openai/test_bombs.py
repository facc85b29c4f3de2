# SPDX-License-Identifier: Apache-2.0
"""Constraints that cannot be compiled, against a server's process: others go on, and it ends when it should."""

import http.client
import json
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.runtime.constraint_bombs import BOMBS, fields_of
from tests.serving.live_server import live_server

pytest.importorskip("llguidance")
pytestmark = pytest.mark.live
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN = {"prompt": "def f", "max_tokens": 4}
SLOW = fields_of(BOMBS["patterns of properties"][0])


@pytest.fixture(scope="module")
def server(chat_bundle):
    with live_server(chat_bundle, "--drain-s", "30") as server:
        yield server


def resident_mib(server):
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def least_seconds(server, **fields):
    """Returns the seconds of the fastest of three requests: of a server that is held up, none is fast."""
    spent = []
    for _ in range(3):
        start_s = time.monotonic()
        status, answer = server.ask("POST", COMPLETION, {**PLAIN, **fields})
        spent.append(time.monotonic() - start_s)
        assert status == 200, answer
    return min(spent)


# One for each way to be refused; `tests/runtime/test_constraint_bounds.py` has them all.
NAMES = (
    "objects by reference", "JSON in a text", "a regular expression", "patterns of properties", "a reference to itself",
    "an ambiguous grammar", "optional letters", "no value", "a grammar of 65,536 letters",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_after_a_bomb_others_are_answered(server, name):
    before_mib = resident_mib(server)
    fields = fields_of(BOMBS[name][0])
    status, answer = server.ask("POST", COMPLETION, {**PLAIN, **fields})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "invalid_grammar", next(iter(fields)))
    assert least_seconds(server) < 1
    assert resident_mib(server) - before_mib < 100


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}),
        (CHAT, {"structured_outputs": {"json": "[" * 5000}}),
        (CHAT, {"structured_outputs": {"structural_tag": "[" * 5000}}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#"}}}}),
    ],
)
def test_other_fields_and_routes_refuse_them_too(server, path, body):
    start = {"input": "a"} if path != CHAT else {"messages": [{"role": "user", "content": "a"}]}
    status, answer = server.ask("POST", path, {**start, **body})
    assert status == 400 and answer["error"]["code"] == "invalid_grammar"


def test_many_at_once_hold_nobody_up(server):
    with ThreadPoolExecutor(12) as pool:
        bombs = [pool.submit(server.ask, "POST", COMPLETION, {**PLAIN, **SLOW}) for _ in range(12)]
        time.sleep(0.5)
        assert least_seconds(server) < 1 and least_seconds(server, guided_regex="[ab]{3}") < 5
        answers = [bomb.result() for bomb in bombs]
    assert {status for status, _ in answers} <= {400, 429}


def test_a_time_out_and_a_client_that_leaves_end_the_work(server):
    start_s = time.monotonic()
    status, answer = server.ask("POST", COMPLETION, {**PLAIN, **SLOW, "timeout_s": 0.3})
    assert (status, answer["error"]["code"]) == (504, "timeout") and time.monotonic() - start_s < 2
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", COMPLETION, json.dumps({**PLAIN, **SLOW}), {"Content-Type": "application/json"})
    end_s = time.monotonic() + 10
    while not _jobs(server):
        assert time.monotonic() < end_s
    connection.close()
    while _jobs(server):
        assert time.monotonic() < end_s


def _jobs(server):
    """Returns the processes in which constraints of a server are tried now."""
    found = []
    for worker in _children(server.process.pid):
        found += _children(worker)
    return found


def _children(pid):
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_sigterm_ends_it_whatever_is_compiled(chat_bundle):
    with live_server(chat_bundle, "--drain-s", "2") as server, ThreadPoolExecutor(6) as pool:
        assert least_seconds(server, guided_regex="[ab]{3}") < 10
        bombs = [pool.submit(server.ask, "POST", COMPLETION, {**PLAIN, **SLOW}) for _ in range(6)]
        while len(_jobs(server)) < 6:
            assert not any(bomb.done() for bomb in bombs)
        start_s = time.monotonic()
        assert server.stop() == 0 and time.monotonic() - start_s < 4
        assert {bomb.result()[0] for bomb in bombs} == {503}
