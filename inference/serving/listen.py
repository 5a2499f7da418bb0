"""The port: bound before anything is loaded, with deadlines for connections, TLS, and a drain that loses
nothing.

SIGTERM: `/ready` turns 503 and answers say `Connection: close`, but requests are still taken for some seconds,
in which load balancers look elsewhere; then no new connection is made, those that the kernel has made are taken
up, the port closes, what was accepted is answered, and the process ends with 0. SIGINT leaves the seconds out.
A second signal does so too, a third ends everything at once.
"""

import asyncio
import contextlib
import ctypes
import errno
import json
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...core.console import say
from ...core.errors import Failed, WrongUse
from .calls import Server
from .guard import error_body

ANSWER_S = 60  # an answer that takes longer than this after the port has closed is cut
HEADER_S = 15.0  # for a client to send the head of a request
HEAD_BYTES = 1 << 16  # of the head of a request
UNREAD_S = 30.0  # for a client to read on when the buffers of its connection are full
TAKE_UP_S = 0.2  # between the last new connection and the closing of the port
TLS_FILES = "give a chain of certificates and the private key of its first one, both in PEM"
KEEP_ALIVE_S = 75  # above the 60 s of common proxies, so that they close idle connections and not we


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, before any model is loaded. Raises WrongUse when the port is taken or the address is
    not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio switches Nagle's algorithm off only then: it costs 40 ms a
    # request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        other_port = "give another port with --port (0 = any free one)"
        fix = {errno.EADDRINUSE: f"stop what is using it, or {other_port}", errno.EACCES: other_port}
        why, usual = (error.strerror or str(error)).lower(), "give an address of this machine with --host"
        what, fitting = f"cannot listen on port {port}", fix.get(error.errno or 0, usual)
        raise WrongUse(what, where=f"{host}:{port}", why=why, fix=fitting) from error
    return listener


def refuse_new(listener: socket.socket) -> bool:
    """Let the kernel drop what would begin a connection, so that none is made and then reset by closing.

    A filter of packets (classic BPF, which needs no rights): the 14th byte of the TCP header, SYN without
    ACK. A client tries again after a second and finds the port closed. False where a kernel has no such
    thing.
    """
    drop_syn = (
        (0x30, 0, 0, 13),  # load the byte of flags
        (0x54, 0, 0, 0x12),  # of which SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone: the next line, else the one after
        (0x06, 0, 0, 0),  # nothing of the packet is kept
        (0x06, 0, 0, 0xFFFFFFFF),  # all of it
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in drop_syn))
    attach_filter = 26  # SO_ATTACH_FILTER, which Python's socket does not name
    if sys.platform != "linux":
        return False
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, attach_filter, struct.pack("HL", len(drop_syn), ctypes.addressof(code))
        )
    except OSError:
        return False
    return True


class DeadlineProtocol(HttpToolsProtocol):
    """HTTP/1.1 in which the head of a request has a deadline and a size, on a new connection and on a kept one,
    and a client that does not read its answer is let go. uvloop sends what one turn of the loop writes as one piece:
    the head of an answer goes with its body.
    """

    _deadline: asyncio.TimerHandle | None = None  # for the head of a request
    _unread: asyncio.TimerHandle | None = None  # for the client to read what fills the buffers
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the head of the request is larger than {HEAD_BYTES:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._got_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._got_head()
        self._read_on()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._read_on()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(error_body(400, msg)).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + body)
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._head_bytes = 0
        self._deadline = self.loop.call_later(HEADER_S, self._late)

    def _late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # a part of the next request came while this one is answered
            self._wait_for_head()

    def _got_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _read_on(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class DrainingServer(uvicorn.Server):
    """uvicorn, ending with exit code 0 after a drain instead of dying of the signal."""

    def __init__(
        self, config: uvicorn.Config, server: Server, drain_s: float, listener: socket.socket
    ) -> None:
        super().__init__(config)
        self._server, self._drain_s, self._listener = server, drain_s, listener
        self._closing = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain, number)
        yield
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _drain(self, number: int) -> None:
        if self._server.draining.is_set() or number == signal.SIGINT:
            self.force_exit = self._closing  # a signal after the port has closed ends it at once
            self._close()
        else:
            asyncio.get_running_loop().call_later(self._drain_s, self._close)
            say(f"draining: the port closes in {self._drain_s:g} s, accepted requests are answered")
        self._server.draining.set()

    async def on_tick(self, counter: int) -> bool:
        return self._server.failure is not None or await super().on_tick(counter)

    def _close(self) -> None:
        if not self._closing:
            self._closing = True
            say("the port closes; accepted requests are answered")
            refuse_new(self._listener)
            asyncio.get_running_loop().call_later(TAKE_UP_S, setattr, self, "should_exit", True)


def run(
    app: Starlette,
    server: Server,
    listener: socket.socket,
    drain_s: float,
    tls: tuple[Path, Path] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain: `drain_s` lie between SIGTERM and the closing of the port. `tls`: a
    certificate and its key. Raises what opening a model raised.
    """
    config = uvicorn.Config(
        app,
        http=DeadlineProtocol,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=ANSWER_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        ws="none",
        ssl_certfile=tls and tls[0],
        ssl_keyfile=tls and tls[1],
    )
    for file in tls or ():
        if not file.is_file():
            raise WrongUse("TLS cannot begin", where=file, why="there is no such file", fix=TLS_FILES)
    try:
        config.load()
    except OSError as error:  # of a file, or what it holds
        why = str(getattr(error, "reason", None) or error.strerror or error).replace("_", " ").lower()
        raise WrongUse("TLS cannot begin", where=config.ssl_certfile or "", why=why, fix=TLS_FILES) from error
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    server.place = place = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/"
    names = ", ".join(model.name for model in server.models)
    say(f"loading {names}; {place}health answers, {place}ready says when the models do")
    serving = DrainingServer(config, server, drain_s, listener)
    began_s = time.monotonic()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serving.serve(sockets=[listener]))
    except SystemExit as error:  # of uvicorn, with a code that means something else here
        raise Failed("the server did not start", why="what uvicorn printed is above") from error
    if server.failure is not None:
        raise server.failure
    say(f"served for {time.monotonic() - began_s:.0f} s")


def read_keys(file: Path | None, variable: str | None) -> tuple[str, ...]:
    """API keys from a file (one a line, # begins a comment) and an environment variable (commas between).

    Raises WrongUse for a file that is not there or holds none.
    """
    keys: Sequence[str] = [key.strip() for key in (variable or "").split(",") if key.strip()]
    if file is None:
        return tuple(keys)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "give a text file with one key a line"
        raise WrongUse("the API keys cannot be read", where=file, why=why, fix=fix) from error
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not found:
        raise WrongUse("there is no API key in the file", where=file, fix="write one a line")
    return (*keys, *found)
