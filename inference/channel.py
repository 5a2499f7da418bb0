"""Messages between the HTTP process and the process of a model: a JSON object and a block of bytes, their
lengths first. Nothing is unpickled, so that neither side can make the other run code.
"""

import asyncio
import json
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from ..core.errors import Failed, Refused, ThroughlineError, WrongUse

LENGTHS = struct.Struct("<II")  # bytes of the JSON object, bytes of the block
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


def read(file: BinaryIO) -> Message | None:
    """The next message; None when the other side has ended."""
    head = file.read(LENGTHS.size)
    if len(head) < LENGTHS.size:
        return None
    text_bytes, block_bytes = LENGTHS.unpack(head)
    body = file.read(text_bytes + block_bytes)
    return (
        None if len(body) < text_bytes + block_bytes else (json.loads(body[:text_bytes]), body[text_bytes:])
    )


class Messages(asyncio.Protocol):
    """The HTTP process's end of the socket: hands on each message when it is whole, and says when the other side
    has ended.
    """

    def __init__(self, take: Callable[[dict[str, Any], bytes], None], ended: Callable[[], None]) -> None:
        self._take, self._ended = take, ended
        self._come = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._come += data
        at = 0
        while len(self._come) - at >= LENGTHS.size:
            text_bytes, block_bytes = LENGTHS.unpack_from(self._come, at)
            text = at + LENGTHS.size
            end = text + text_bytes + block_bytes
            if len(self._come) < end:
                break
            block = bytes(self._come[text + text_bytes : end])
            message = json.loads(self._come[text : text + text_bytes])
            at = end
            self._take(message, block)
        del self._come[:at]

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
