# SPDX-License-Identifier: Apache-2.0
"""The server process: uvicorn, with a shutdown that loses no answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from speccompile.errors import RuntimeFault
from speccompile.runtime.service import Service
from speccompile.serving.openai.connections import Acceptor, Connection, ConnectionLimits

_BACKLOG = 2048  # connections that wait until they are accepted, as uvicorn's default
_AFTER_DRAIN_S = 5  # seconds for the last bytes of answers that the end of draining cut off


@dataclass(frozen=True)
class Listener:
    """Where to listen, and how long to go on after the signal to stop."""

    host: str = "127.0.0.1"  # an address; only this machine reaches 127.0.0.1
    port: int = 8000  # 0 chooses a free one
    drain_s: float = 30.0  # seconds that running requests get at the end
    log_level: str = "info"
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)


class DrainingServer(uvicorn.Server):
    """A uvicorn server with an orderly shutdown.

    After SIGTERM or SIGINT it refuses connections and requests. Those in progress have `drain_s` to finish, then they
    get an error, and the process ends with 0. A second signal ends the wait, a third one cuts answers off.
    """

    def __init__(self, config: uvicorn.Config, service: Service, listener: Listener) -> None:
        super().__init__(config)
        self._service, self._listener = service, listener
        self._accepting: list[asyncio.Task[None]] = []
        self._waits = True  # for requests that run

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals as uvicorn does, without raising them again at the end."""
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts the shutdown at the first signal; a second one ends the requests with an error."""
        if self.should_exit and self._waits:
            self._waits = False
            self._service.end_drain()
        else:
            super().handle_exit(signal.SIGINT, frame)  # uvicorn ignores a second SIGTERM

    def end(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections, and prints the address."""
        await super().startup([])  # uvicorn's way to accept has no limit
        limits = self._listener.limits
        acceptor = Acceptor(self._make_connection, self.server_state.connections, limits)
        for bound in sockets or []:
            bound.setblocking(False)
            task = asyncio.create_task(acceptor.accept(bound))
            task.add_done_callback(self._stop_without_acceptor)
            self._accepting.append(task)
            print(f"serving at {url_from_socket(bound)}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for the end of requests and connections."""
        for task in self._accepting:
            task.cancel()
        closing = asyncio.ensure_future(asyncio.to_thread(self._service.close, self._listener.drain_s))
        await super().shutdown(sockets)
        await closing

    def _make_connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state, self._listener.limits)

    def _stop_without_acceptor(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logging.getLogger("uvicorn.error").error("accepting connections failed", exc_info=task.exception())
            self.should_exit = True


def bind(listener: Listener) -> socket.socket:
    """Returns a socket that listens before a model is loaded. Raises RuntimeFault: a port in use, or too few files."""
    listener.limits.check()
    family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listener.host, listener.port))
        bound.listen(_BACKLOG)  # a port that is bound alone, another server may bind as well
    except OSError as fault:
        bound.close()
        where, todo = f"{listener.host}:{listener.port}", "Choose another --host or --port."
        raise RuntimeFault(where, str(fault), "an address to listen at", todo) from fault
    return bound


def url_from_socket(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: ASGIApp, service: Service, listener: Listener, bound: socket.socket) -> None:
    """Serves until a signal, or a bug in the service: a process that cannot serve must end."""
    server = DrainingServer(uvicorn_config(app, listener), service, listener)
    service.watch(server.end)
    with contextlib.closing(bound):
        server.run(sockets=[bound])
    if service.fault is not None:
        todo = "Start it again, or let a supervisor do so; then report the bug with the log."
        raise RuntimeFault("service", service.fault, "a service that goes on", todo)


def uvicorn_config(app: ASGIApp, listener: Listener) -> uvicorn.Config:
    """Returns uvicorn's options."""
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_level=listener.log_level,
        timeout_keep_alive=listener.limits.keep_alive_s,  # type: ignore[arg-type]  # a float does as well
        timeout_graceful_shutdown=int(listener.drain_s + _AFTER_DRAIN_S),
    )
