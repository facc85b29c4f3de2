# SPDX-License-Identifier: Apache-2.0
"""One process that serves: uvicorn, and an end that loses no answer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from speccompile.errors import RuntimeFault
from speccompile.runtime.service import Service

_AFTER_DRAIN_S = 5  # for the last bytes of answers that the end of draining cut off


@dataclass(frozen=True)
class Listener:
    """Where to listen, and how long to go on once told to stop.

    Args:
        host: an address; 127.0.0.1 is reached from this machine alone.
        port: 0 chooses a free one.
        drain_s: seconds that running requests get at the end.
        log_level: of uvicorn.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0
    log_level: str = "info"


class DrainingServer(uvicorn.Server):
    """A uvicorn server that ends in order.

    At SIGTERM or SIGINT it takes no new connection, the service takes no new request, those that run get `drain_s`,
    the rest an error; then the process ends with 0.

    Args:
        config: uvicorn's.
        service: behind the application.
        drain_s: see `Listener`.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_s = service, drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again at the end: it was answered."""
        handled = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and say where."""
        await super().startup(sockets)
        for bound in sockets or []:
            print(f"serving at {url_from_socket(bound)}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests and connections come to their end."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._service.close, self._drain_s))
        await super().shutdown(sockets)
        await closing


def bind(listener: Listener) -> socket.socket:
    """A bound socket, so that a port in use is told before a model is loaded.

    Raises:
        RuntimeFault: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listener.host, listener.port))
    except OSError as fault:
        bound.close()
        where, todo = f"{listener.host}:{listener.port}", "Choose another --host or --port."
        raise RuntimeFault(where, str(fault), "an address to listen at", todo) from fault
    return bound


def url_from_socket(bound: socket.socket) -> str:
    """Where a browser finds a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: FastAPI, service: Service, listener: Listener, bound: socket.socket) -> None:
    """Serve until a signal ends it.

    Args:
        app: the application.
        service: behind it; started, and closed at the end.
        listener: where.
        bound: see `bind`; closed at the end.
    """
    graceful = int(listener.drain_s + _AFTER_DRAIN_S)
    config = uvicorn.Config(app, log_level=listener.log_level, timeout_graceful_shutdown=graceful, lifespan="off")
    with contextlib.closing(bound):
        DrainingServer(config, service, listener.drain_s).run(sockets=[bound])
