# SPDX-License-Identifier: Apache-2.0
"""Connections: their options, their times, and how many there may be."""

import asyncio
import errno
import json
import resource
import socket
import sys
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from speccompile.errors import RuntimeFault
from speccompile.serving.openai import connections
from speccompile.serving.openai.connections import ConnectionLimits, room_for_connections
from speccompile.serving.openai.process import DrainingServer, Listener, bind, uvicorn_config
from speccompile.serving.openai.server import ServerOptions
from tests.serving.live_server import live_process
from tests.serving.mock_service import serving, text_of

pytestmark = pytest.mark.live

GET = b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
FILES, IDLE = 128, 200


def post(**body):
    raw = json.dumps({"prompt": "bcd", **body}).encode()
    return HEAD % len(raw) + raw


@pytest.fixture(scope="module")
def mock():
    """Yields (application, gated engine) whose bodies have 0.3 s."""
    with serving(ServerOptions("mock", body_timeout_s=0.3)) as (app, _, gated):
        yield app, gated


@asynccontextmanager
async def listening(app, bound=None, **limits):
    """Yields (server, its port) in this event loop."""
    listener = Listener(port=0, log_level="warning", limits=ConnectionLimits(**limits))
    bound = bound or bind(listener)
    server = DrainingServer(uvicorn_config(app, listener), SimpleNamespace(close=lambda _: None), listener)
    running = asyncio.create_task(server.serve([bound]))
    await until(lambda: server.started)
    try:
        yield server, bound.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, 20)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def opened(port, data=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reader.writer = writer  # which closes the connection once it is not referenced
    writer.write(data)
    await writer.drain()
    return reader, writer


async def answer_of(reader):
    """Returns (status, JSON or bytes) of the next answer."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


async def rest_of(reader):
    """Returns what comes until the connection is closed."""
    return await asyncio.wait_for(reader.read(), 10)


async def trickle(port, data):
    """Sends a part of a request, then byte after byte; returns once the connection is closed."""
    reader, writer = await opened(port, data)
    for _ in range(400):
        if reader.at_eof() or writer.is_closing():
            return
        writer.write(b"x")
        await asyncio.sleep(0.05)
    raise AssertionError("still open after 20 s")


def test_a_connection_waits_until_the_server_has_started(mock):
    async def look():
        bound = bind(Listener(port=0))
        reader, _ = await opened(bound.getsockname()[1], GET)
        async with listening(mock[0], bound):
            assert (await answer_of(reader))[0] == 200

    asyncio.run(look())


def test_an_accepted_connection_sends_at_once(mock):
    async def look():
        async with listening(mock[0]) as (server, port):
            reader, _ = await opened(port, GET)
            assert (await answer_of(reader))[0] == 200
            [connection] = server.server_state.connections
            return connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    assert asyncio.run(look()) != 0


async def in_parts(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(256):
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def at_once(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * (16 << 20)})


@pytest.mark.parametrize("app", [in_parts, at_once])
def test_slow_reader_is_served_and_stopped_reader_is_not(app):
    def connect(port):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(GET)
        client.setblocking(False)
        return client

    async def look():
        loop = asyncio.get_running_loop()
        async with listening(app, write_timeout_s=0.5) as (server, port):
            slow, stopped = connect(port), connect(port)
            began = time.monotonic()
            while time.monotonic() - began < 1.6:
                assert await loop.sock_recv(slow, 4096)
                await asyncio.sleep(0.02)
            [left] = server.server_state.connections
            assert left.client == slow.getsockname()
            stopped.close()
            slow.close()

    asyncio.run(look())


def test_slow_header_gets_an_error(mock):
    async def look():
        async with listening(mock[0], header_timeout_s=0.3) as (_, port):
            silent, _ = await opened(port)
            half_head, _ = await opened(port, GET[:20])
            half_body, _ = await opened(port, HEAD % 100 + b'{"prompt')
            second, writer = await opened(port, GET)  # a second request, after one that was answered
            assert (await answer_of(second))[0] == 200
            writer.write(GET[:20])
            slow = [trickle(port, GET[:-2]), trickle(port, HEAD % 5000 + b'{"prompt')]
            _, *late = await asyncio.gather(rest_of(silent), *map(answer_of, (half_head, half_body, second)), *slow)
            return late[:3], [await rest_of(r) for r in (silent, half_head, half_body, second)]

    late, rests = asyncio.run(look())
    assert [status for status, _ in late] == [408] * 3 and rests == [b""] * 4
    assert {error["error"]["code"] for _, error in late} == {"request_timeout"}
    parts = ["header" if "header" in error["error"]["message"] else "body" for _, error in late]
    assert parts == ["header", "body", "header"]


def test_idle_connection_closes_after_its_time(mock):
    async def look():
        async with listening(mock[0], keep_alive_s=1.2, header_timeout_s=0.3) as (_, port):
            reader, writer = await opened(port, GET)
            assert (await answer_of(reader))[0] == 200
            await asyncio.sleep(0.4)  # longer than the header may take: that has not begun
            writer.write(GET)
            assert (await answer_of(reader))[0] == 200
            began = time.monotonic()
            assert await rest_of(reader) == b""
            return time.monotonic() - began

    assert asyncio.run(look()) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_timeouts_spare_answers_in_progress(mock, stream):
    app, gated = mock

    async def look():
        async with listening(app, header_timeout_s=0.1, keep_alive_s=0.1, write_timeout_s=0.1) as (_, port):
            gated.gate.clear()
            reader, _ = await opened(port, post(max_tokens=8, stream=stream))
            await asyncio.sleep(0.6)
            gated.gate.set()
            return await rest_of(reader)

    answer = asyncio.run(look())
    if stream:
        assert b"data: [DONE]" in answer
    else:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == text_of("bcd", 8)


def test_disconnection_while_sending_is_no_error(mock, capfd):
    async def look():
        async with listening(mock[0]) as (server, port):
            for part in (b"", b'{"prompt'):
                _, writer = await opened(port, HEAD % 100 + part)
                await until(lambda: server.server_state.tasks)
                writer.close()
                await until(lambda: not server.server_state.tasks)

    asyncio.run(look())
    assert capfd.readouterr().err == ""


def test_connection_limit_closes_the_longest_waiting(mock):
    app, gated = mock

    async def look():
        async with listening(app, max_connections=3) as (server, port):
            gated.gate.clear()
            busy, _ = await opened(port, post(max_tokens=4))
            await until(lambda: server.server_state.tasks)
            oldest, _ = await opened(port, GET[:9])
            idle, idle_writer = await opened(port, GET)
            await answer_of(idle)
            newest, _ = await opened(port, GET)
            assert (await answer_of(newest))[0] == 200
            assert await rest_of(oldest) == b""
            idle_writer.write(GET)
            assert (await answer_of(idle))[0] == 200
            gated.gate.set()
            assert (await answer_of(busy))[0] == 200
            assert len(server.server_state.connections) == 3

    asyncio.run(look())


def test_connection_waits_while_all_are_busy(mock):
    app, gated = mock

    async def look():
        async with listening(app, max_connections=2) as (server, port):
            gated.gate.clear()
            busy = [(await opened(port, post(max_tokens=4)))[0] for _ in range(2)]
            await until(lambda: len(server.server_state.tasks) == 2)
            waiting, _ = await opened(port, GET)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting.read(1), 0.3)
            gated.gate.set()
            assert [(await answer_of(reader))[0] for reader in (*busy, waiting)] == [200] * 3

    asyncio.run(look())


class Starved(socket.socket):
    """Has no file for a connection, three times."""

    num_left = 3

    def accept(self):
        if self.num_left:
            self.num_left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_missing_files_are_logged_once(mock, monkeypatch, capfd):
    monkeypatch.setattr(connections, "_RETRY_S", 0.01)

    async def look():
        async with listening(mock[0]) as (server, _):
            bound = Starved(socket.AF_INET, socket.SOCK_STREAM)
            bound.bind(("127.0.0.1", 0))
            bound.listen()
            await server.startup([bound])
            reader, _ = await opened(bound.getsockname()[1], GET)
            assert (await answer_of(reader))[0] == 200 and bound.num_left == 0
            bound.close()

    asyncio.run(look())
    assert capfd.readouterr().err.count("no connection can be accepted for now: [Errno 24]") == 1


def test_idle_connections_leave_files_for_the_server():
    with live_process(sys.executable, "-m", "tests.serving.small_server", str(FILES)) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(IDLE)]
        assert [server.ask("GET", "/health")[0] for _ in range(3)] == [200] * 3
        assert server.ask("POST", "/v1/completions", {"prompt": "bcd", "max_tokens": 4})[0] == 200
        for connection in idle:
            connection.close()
        assert server.stop() == 0
    assert len(server.lines) < 30 and "Traceback" not in "".join(server.lines)


def test_more_connections_than_files_are_refused_before_a_model_is_loaded():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < ConnectionLimits().count() <= room_for_connections() < soft
    assert ConnectionLimits(max_connections=5).count() == 5
    with pytest.raises(RuntimeFault, match=r"--max-connections: got \d+; expected at most \d+, .* ulimit -n"):
        bind(Listener(port=0, limits=ConnectionLimits(max_connections=soft)))
