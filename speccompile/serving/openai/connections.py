# SPDX-License-Identifier: Apache-2.0
"""Limits on connections: their number, the time for a request's header, and the time that an answer stays unread.

So `speccompile serve` needs no proxy against slow and hostile clients (docs/reference/server.md); uvicorn has only the
keep-alive time. The module uses uvicorn's class for h11 and its connections, which are not a public API.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import json
import logging
import os
import resource
import socket
import termios
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from speccompile.errors import RuntimeFault
from speccompile.serving.openai.errors import timeout_error

MAX_CONNECTIONS = 1000  # by default
_OTHER_FILES = 32  # that a running server may open besides its connections
_POLL_S = 0.05
_RETRY_S = 1.0  # after the kernel had no file or memory for a connection
_WARN_EVERY_S = 60.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class ConnectionLimits:
    """The number of connections, and how long one may be inactive; no answer in progress and no slow reader is cut off.

    Args:
        header_timeout_s: seconds from a request's first byte (or a new connection's start) to the end of its header.
        max_connections: at once; None: `MAX_CONNECTIONS`, or as many as this process may open files for.
    """

    header_timeout_s: float = 10.0
    keep_alive_s: float = 75.0  # seconds that a connection may idle after an answer
    write_timeout_s: float = 60.0  # seconds without progress of a client that reads an answer
    max_connections: int | None = None

    def check(self) -> None:
        """Refuses more connections than this process may open files for."""
        room = room_for_connections()
        least = 1 if self.max_connections is None else self.max_connections
        if least > room:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            expected = f"at most {max(room, 0)}, because this process may open {soft} files"
            todo = "Ask for fewer, or raise the limit: ulimit -n."
            raise RuntimeFault("--max-connections", str(least), expected, todo)

    def count(self) -> int:
        """Returns the limit, with the files that are open now taken into account."""
        return max(1, min(self.max_connections or MAX_CONNECTIONS, room_for_connections()))


def room_for_connections() -> int:
    """Returns the number of further connections that fit the limit on open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 20
    return soft - len(os.listdir("/dev/fd")) - _OTHER_FILES


class Connection(H11Protocol):
    """uvicorn's connection, with limits on the time that a request's header takes and an answer stays unread."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, app_state: dict[str, Any], limits: ConnectionLimits
    ) -> None:
        super().__init__(config, state, app_state)
        self._limits = limits
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self.waits_since = 0.0  # the loop's time

    @property
    def is_waiting(self) -> bool:
        """Whether no request is in progress: before the first, between two, or in a header."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waits_since = self.loop.time()
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Goes on with the header's timer: it limits the whole header."""
        super().data_received(data)
        if not self.is_waiting:
            self._stop_timer()
        elif self._header_timer is None:  # uvicorn has ended its keep-alive timer
            self._start_timer()

    def on_response_complete(self) -> None:
        """Waits for the next request, with uvicorn's keep-alive timer."""
        self.waits_since = self.loop.time()
        super().on_response_complete()
        self._watch_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_watching()
        super().connection_lost(exc)

    def _watch_reader(self) -> None:
        self._stop_watching()
        if unread := self._num_unread():
            self._unread_timer = self.loop.call_later(self._limits.write_timeout_s, self._check_reader, unread)

    def _check_reader(self, num_before: int) -> None:
        self._unread_timer = None
        if self._num_unread() >= num_before:
            self.transport.abort()
        else:
            self._watch_reader()

    def _num_unread(self) -> int:
        waiting: int = self.transport.get_write_buffer_size()
        if waiting == 0:  # the kernel has all, and gives up by itself
            return 0
        sent = array.array("i", [0])
        with suppress(OSError):  # not every platform has it
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, sent)
        return waiting + sent[0]

    def _stop_watching(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        has_begun, _ = self.conn.trailing_data
        if has_begun and self.conn.our_state is self.conn.their_state is h11.IDLE:
            self.transport.write(_late_header_answer())
        self.transport.close()


def _late_header_answer() -> bytes:
    error = timeout_error("header")
    body = json.dumps(error.json_from_error()).encode()
    lines = ("HTTP/1.1 408 Request Timeout", "Content-Type: application/json", f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "Connection: close", "", "")).encode() + body


class Acceptor:
    """Accepts connections up to the limit.

    At the limit it closes the one that has waited longest for a request; if none waits, new ones stay in the kernel's
    queue.
    """

    def __init__(self, make: Callable[[], Connection], connections: Collection[Any], limits: ConnectionLimits) -> None:
        self._make, self._connections = make, connections
        self._max = limits.count()
        self._warned_at: float | None = None

    async def accept(self, bound: socket.socket) -> None:
        """Accepts connections of a listening socket that does not block, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(bound)
            except ConnectionAbortedError:
                continue
            except OSError as fault:
                self._warn(fault, loop.time())
                if fault.errno in _NO_ROOM:
                    self._close_oldest()
                await asyncio.sleep(_RETRY_S)
                continue
            with suppress(OSError):  # the client has left already
                await self._admit(accepted)

    async def _admit(self, accepted: socket.socket) -> None:
        with ExitStack() as unless_admitted:
            unless_admitted.callback(accepted.close)
            # Without it the body of an answer waits for the acknowledgement of its header: 40 ms on Linux.
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while len(self._connections) >= self._max:
                await asyncio.sleep(0 if self._close_oldest() else _POLL_S)
            await asyncio.get_running_loop().connect_accepted_socket(self._make, accepted)
            unless_admitted.pop_all()

    def _close_oldest(self) -> bool:
        waiting = [connection for connection in self._connections if connection.is_waiting]
        if waiting:
            min(waiting, key=lambda connection: connection.waits_since).transport.abort()
        return bool(waiting)

    def _warn(self, fault: OSError, now: float) -> None:
        if self._warned_at is None or now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            _log.warning("no connection can be accepted for now: %s", fault)
