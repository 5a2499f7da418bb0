"""The port: bound before anything is loaded, with deadlines for connections, TLS, and a drain that loses nothing.

SIGHUP, or another content of the files, reads API keys and TLS certificates again; no connection is dropped.

SIGTERM: `/ready` turns 503 and answers say `Connection: close`, but requests are still taken for some seconds,
in which load balancers look elsewhere; then no new connection is made, those that the kernel has made are taken
up, the port closes, what was accepted is answered, and the process ends with 0. SIGINT leaves the seconds out.
A second signal does so too, a third ends everything at once.
"""

import asyncio
import ctypes
import errno
import json
import resource
import select
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
import uvloop
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...core.console import background_stderr, say
from ...core.errors import Failed, WrongUse
from .calls import Server, error_body
from .reload import ReloadedFile, bad_certificate, read_certificate

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
ANSWER_S = 60  # an answer that takes longer than this after the port has closed is cut
HEADER_S = 15.0  # for a client to send the head of a request
HEAD_BYTES = 1 << 16  # of the head of a request; what comes in pieces counts twice
LINE_BYTES = 512  # that each of its lines counts besides
# of a body: what its smaller pieces lack of it is bounded, for each costs as much as a large one
PIECE_BYTES, LACKING_BYTES = 64, 1 << 13
PIPELINED = 16  # requests that may come behind one that is not answered
CONNECTIONS, OWN_FILES = 4096, 64
MOST_FILES = 10_240  # that macOS lets a process open, whatever its hard limit says
LOOK_TICKS = (
    10  # of uvicorn, a tenth of a second each, between two looks at the files of keys and certificates
)
BACKLOG = 1024  # connections that one turn of the loop takes up, some 50 us each
BODY_S = 45.0  # for its body, whoever reads it: longer than `body_s`, whose end is an answer
UNREAD_S = 30.0  # for a client to read on when the buffers of its connection are full
TAKE_UP_S = 0.2  # between the last new connection and the closing of the port
KEPT_S = 1.0  # from the signal on, in which a kept connection's next request is still answered, and told to be the last
KEEP_ALIVE_S = 75  # above the 60 s of common proxies, so that they close idle connections and not we


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, before any model is loaded. Raises WrongUse for a taken port or an address not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio switches Nagle's algorithm off only then: it costs 40 ms a request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        other = "give another port with --port (0 = any free one)"
        fixes = {errno.EADDRINUSE: f"stop what is using it, or {other}", errno.EACCES: other}
        fix = fixes.get(error.errno or 0, "give an address of this machine with --host")
        what, why = f"cannot listen on port {port}", (error.strerror or str(error)).lower()
        raise WrongUse(what, where=f"{host}:{port}", why=why, fix=fix) from error
    return listener


def refuse_new(listener: socket.socket) -> None:
    """Let the kernel drop what would begin a connection, so that none is made and then reset by closing: a client tries
    again after a second and finds the port closed. A filter of packets (classic BPF, which needs no rights) looks at
    the 14th byte of the TCP header for SYN without ACK.
    """
    drop_syn = (
        (0x30, 0, 0, 13),  # load the byte of flags
        (0x54, 0, 0, 0x12),  # of which SYN and ACK
        (0x15, 0, 1, 0x02),  # SYN alone: the next line, else the one after
        (0x06, 0, 0, 0),  # nothing of the packet is kept
        (0x06, 0, 0, 0xFFFFFFFF),  # all of it
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in drop_syn))
    program = struct.pack("HL", len(drop_syn), ctypes.addressof(code))
    with suppress(OSError):  # of a kernel that has no such thing
        listener.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER, which Python does not name


class DeadlineProtocol(HttpToolsProtocol):
    """HTTP/1.1 in which the head of a request has a deadline and a size, on a new connection and on a kept one, few
    requests wait behind one another, and a client that does not read its answer is let go. uvloop sends what one turn
    of the loop writes as one piece: the head of an answer goes with its body.
    """

    # Those that owe us a request, the longest first: they are let go where there are too many connections.
    owing: ClassVar[dict["DeadlineProtocol", None]] = {}
    most: ClassVar[int] = CONNECTIONS
    _deadline: asyncio.TimerHandle | None = None  # for the head of a request, then for its body
    _unread: asyncio.TimerHandle | None = None  # for the client to read what fills the buffers
    _head_bytes, _in_head, _lacking = 0, False, 0
    _unanswered = 0  # requests whose head has come
    _refusal: str | None = None  # of a broken request, until those before it are answered
    _too_many = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most and self.owing:
            longest = next(iter(self.owing))
            del self.owing[longest]  # the next one of many at once lets another go
            longest.transport.abort()
        self._wait_for_head()

    def data_received(self, data: Any) -> None:
        super().data_received(data)
        if self._deadline is None and self._answered:  # white space: the timer of idle connections has gone
            self._wait_for_head()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"the head of the request is larger than {HEAD_BYTES:,} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._wait_for_head()
        if len(self.pipeline) >= PIPELINED:
            self._too_many = True
            raise ValueError  # the parser's own error, a 400

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + LINE_BYTES
        if self._head_bytes > HEAD_BYTES:
            raise ValueError

    def on_headers_complete(self) -> None:
        self._expect(BODY_S)
        self._in_head, self._lacking = False, 0
        self._unanswered += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._lacking = max(0, self._lacking + PIECE_BYTES - len(body))
        if self._lacking > LACKING_BYTES:
            raise ValueError

    def on_message_complete(self) -> None:
        self._expect(None)
        self.owing.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered -= 1
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._refusal is not None and not self._unanswered:
            self._refuse(self._refusal)
            return
        self.owing[self] = None

    def shutdown(self) -> None:
        if not (
            self._answered and self._has_unread()
        ):  # else a request has come, which is answered as the last one
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self.owing.pop(self, None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is broken, in its turn: those before it are answered first."""
        if self._refusal is not None:
            return
        if self._too_many:
            msg = f"more than {PIPELINED} requests were sent behind one that is not answered"
        cycle = self.cycle
        in_body = cycle is not None and cycle.more_body and not cycle.response_complete
        if self._unanswered > in_body:
            if in_body and self.pipeline:  # it waits behind the others
                self.pipeline.popleft()
                self._unanswered -= 1
            self._refusal = msg
            self.flow.pause_reading()
        elif (
            in_body and cycle.response_started
        ):  # an error in the middle of its answer would be taken for a part of it
            self.transport.close()
        else:
            self._refuse(msg)

    def _refuse(self, msg: str) -> None:
        body = json.dumps(error_body(400, msg)).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + body)
        self.transport.close()

    def _has_unread(self) -> bool:
        """Whether the kernel holds something that was not read yet."""
        looking = select.poll()
        looking.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(looking.poll(0))

    @property
    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._head_bytes, self._in_head = 0, True
        self.owing[self] = None
        self._expect(HEADER_S)

    def _late(self) -> None:
        if self._answered or not self._in_head:
            self.transport.close()
        else:  # a part of the next request came while this one is answered
            self._wait_for_head()

    def _expect(self, seconds: float | None) -> None:
        """Until when the client must have sent what it owes (None: it owes nothing)."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._late)


class Reading(asyncio.BufferedProtocol):
    """Reads for a DeadlineProtocol, which is no such protocol, into one place. uvloop's own reads are 256 KB of every
    connection in a turn of the loop; the first of these pauses a body, of which 64 KiB may wait.
    """

    _place = memoryview(bytearray(68_000))

    def __init__(self, **how: Any) -> None:
        self._inner = DeadlineProtocol(**how)
        for name in ("connection_made", "connection_lost", "eof_received", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(self._inner, name))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._place

    def buffer_updated(self, nbytes: int) -> None:
        self._inner.data_received(self._place[:nbytes])


class DrainingServer(uvicorn.Server):
    """uvicorn, ending with exit code 0 after a drain instead of dying of the signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        server: Server,
        listener: socket.socket,
        reloaded: Sequence[ReloadedFile] = (),
    ) -> None:
        super().__init__(config)
        self._server, self._listener, self._closing = server, listener, False
        self._reloaded = reloaded

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    def handle_exit(self, sig: int, frame: Any) -> None:
        asyncio.get_running_loop().call_soon_threadsafe(self._drain, sig)

    def reload(self) -> None:
        """Read keys and certificates again."""
        for files in self._reloaded:
            files.changed()
            files.reload()

    def _drain(self, number: int) -> None:
        again = self._server.draining.is_set()
        self._server.draining.set()
        if again or number == signal.SIGINT:
            self.force_exit = self._closing  # a signal after the port has closed ends it at once
            self._close()
        else:
            seconds = self._server.limits.drain_s
            asyncio.get_running_loop().call_later(seconds, self._close, seconds)
            say(f"draining: the port closes in {seconds:g} s, accepted requests are answered")

    async def on_tick(self, counter: int) -> bool:
        if counter % LOOK_TICKS == 0 and self._reloaded:
            await self._look()
        return self._server.failure is not None or await super().on_tick(counter)

    async def _look(self) -> None:
        """Read files again that have changed. A file system that does not answer holds no request up."""
        for files in self._reloaded:
            if await asyncio.to_thread(files.changed):
                files.reload()

    def _close(self, drained_s: float = 0.0) -> None:
        """Make no new connection, and close the kept ones when they had time for a last request."""
        if not self._closing:
            self._closing = True
            refuse_new(self._listener)
            rest_s = KEPT_S - drained_s if self.server_state.connections else 0.0
            asyncio.get_running_loop().call_later(max(TAKE_UP_S, rest_s), setattr, self, "should_exit", True)
            say("the port closes; accepted requests are answered")


def connections() -> int:
    """Let this process open as many files as it may; how many connections they allow."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = most == resource.RLIM_INFINITY
    for files in [most, MOST_FILES] if unlimited or most > MOST_FILES else [most]:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
        except (ValueError, OSError):  # macOS refuses what is above its own maximum
            continue
        return CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files - OWN_FILES)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(CONNECTIONS, max(1, soft - OWN_FILES))


def run(
    app: Starlette,
    server: Server,
    listener: socket.socket,
    tls: Sequence[Path | None],
    reloaded: Sequence[ReloadedFile] = (),
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `tls`: a certificate and its key, or Nones; they and the files of
    `reloaded` are read again when they change. Raises as opening did.
    """
    how: dict[str, Any] = {"lifespan": "on", "ws": "none", "http": Reading}
    # no line for each request that is no HTTP: a client could fill the disk with them
    how |= {"log_config": None, "log_level": "error", "access_log": False, "server_header": False}
    how |= {"timeout_graceful_shutdown": ANSWER_S, "timeout_keep_alive": KEEP_ALIVE_S, "backlog": BACKLOG}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the loop takes it: a reload must not end a start
    DeadlineProtocol.most = connections()
    config = uvicorn.Config(app, **how, ssl_certfile=tls[0], ssl_keyfile=tls[1])
    try:
        config.load()
    except OSError as error:  # of a file, or what it holds
        raise bad_certificate(error, tls[0] or "") from error
    certificate, key = tls
    if certificate is not None and key is not None:
        context = config.ssl
        assert context is not None

        def read_again() -> None:
            read_certificate(context, certificate, key)

        reloaded = [
            *reloaded,
            ReloadedFile("the TLS certificate and its key", [certificate, key], read_again),
        ]
    host, port = listener.getsockname()[:2]
    server.place = place = (
        f"{'https' if config.is_ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/"
    )
    names = ", ".join(model.name for model in server.models) or "no model"
    with background_stderr():
        say(f"loading {names}; {place}health answers, {place}ready says when the models do")
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(DrainingServer(config, server, listener, reloaded).serve(sockets=[listener]))
        except SystemExit as error:  # of uvicorn, with a code that means something else here
            raise Failed("the server did not start", why="what uvicorn printed is above") from error
    if server.failure is not None:
        raise server.failure
