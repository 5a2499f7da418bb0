"""Messages between the HTTP process and the process of a model: a JSON object and a block of bytes, their
lengths first. Nothing is unpickled, so that neither side can make the other run code.
"""

import asyncio
import json
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...core.errors import Failed, Refused, ThroughlineError, WrongUse

LENGTHS = struct.Struct("<II")  # bytes of the JSON object, bytes of the block
READ_BYTES = 1 << 18
KINDS: dict[str, type[ThroughlineError]] = {
    "WrongUse": WrongUse,
    "MissingExtra": WrongUse,
    "Refused": Refused,
}

Message = tuple[dict[str, Any], bytes]


def pack(message: dict[str, Any], block: bytes = b"") -> bytes:
    """The bytes that carry a message."""
    text = json.dumps(message).encode()
    return LENGTHS.pack(len(text), len(block)) + text + block


class Parts:
    """Bytes as they come; messages as they are whole."""

    def __init__(self) -> None:
        self._come = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that these bytes complete."""
        self._come += data
        while len(self._come) >= LENGTHS.size:
            text_bytes, block_bytes = LENGTHS.unpack_from(self._come)
            middle = LENGTHS.size + text_bytes
            end = middle + block_bytes
            if len(self._come) < end:
                break
            text, block = self._come[LENGTHS.size : middle], bytes(self._come[middle:end])
            del self._come[:end]
            yield json.loads(text), block


class Inbox:
    """The model's end of the socket, read between two steps of work by the thread that does the work."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._parts = connection, Parts()
        self._bell, self._rope = socket.socketpair()
        self._poll = select.poll()
        for one in (connection, self._bell):
            self._poll.register(one, select.POLLIN)
        self.ended = False  # the other side has

    def take(self, wait: bool) -> list[Message]:
        """What has come; waits, if told, for a message, the end, or `ring`."""
        ready = {descriptor for descriptor, _ in self._poll.poll(None if wait else 0)}
        if self._bell.fileno() in ready:
            self._bell.recv(READ_BYTES)
        if self._connection.fileno() not in ready:
            return []
        try:
            data = self._connection.recv(READ_BYTES)
        except OSError:
            data = b""
        self.ended = not data
        return list(self._parts.feed(data))

    def ring(self) -> None:
        """End a waiting `take`; any thread may."""
        self._rope.send(b"!")

    def close(self) -> None:
        """Give the bell back."""
        self._bell.close()
        self._rope.close()


class Messages(asyncio.Protocol):
    """The HTTP process's end of the socket: hands on each message when it is whole, and says when the other side
    has ended.
    """

    def __init__(self, take: Callable[[dict[str, Any], bytes], None], ended: Callable[[], None]) -> None:
        self._take, self._ended, self._parts = take, ended, Parts()

    def data_received(self, data: bytes) -> None:
        for message, block in self._parts.feed(data):
            self._take(message, block)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()


def pack_arrays(arrays: dict[str, np.ndarray]) -> tuple[list[list[Any]], bytes]:
    """Arrays as a description for the JSON object and the block of their bytes."""
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    return described, b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())


def unpack_arrays(described: list[list[Any]], block: bytes) -> dict[str, np.ndarray]:
    """What `pack_arrays` packed."""
    arrays, start = {}, 0
    for name, dtype, shape in described:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(block[start : start + size], dtype).reshape(shape)
        start += size
    return arrays


def error_message(error: Exception) -> dict[str, Any]:
    """An error as a message can carry it."""
    if isinstance(error, ThroughlineError):
        parts = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
        return {"kind": type(error).__name__, **parts}
    return {"kind": "Failed", "what": f"{type(error).__name__}: {error}", "where": "", "why": "", "fix": ""}


def error_from(message: dict[str, Any]) -> ThroughlineError:
    """The error that `error_message` carried."""
    kind = KINDS.get(message["kind"], Failed)
    error = kind.__new__(kind)
    ThroughlineError.__init__(
        error, message["what"], where=message["where"], why=message["why"], fix=message["fix"]
    )
    return error
