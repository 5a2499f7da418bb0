"""Messages between the HTTP process and the process of a model: MessagePack of the types below, its length first.
Nothing is unpickled, so that neither side can make the other run code.
"""

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from ...core.backend import BackendOptions
from ...core.console import warn
from ...core.errors import Failed, Refused, ThroughlineError, WrongUse
from .encoding import Encoding
from .generation import Job, TextDelta

LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 18
KINDS = {"WrongUse": WrongUse, "MissingExtra": WrongUse, "Refused": Refused}
Work = Job | Encoding


class Open(msgspec.Struct, tag=True):
    """The first message to a process: the model to open."""

    name: str
    path: str
    slots: int
    options: BackendOptions
    speculate: int = 0
    draft: str = ""  # the model that guesses


class Ask(msgspec.Struct, tag=True):
    """All work of one request; its answers are numbered from `first` on, `n` of each job."""

    first: int
    work: list[Work]
    # time.monotonic() by which its first answer is queued; the more it asks for, the later the rest
    due_s: float = 0.0
    tenant: str = ""  # whose earlier prompts may be known


class Cancel(msgspec.Struct, tag=True):
    """Nobody waits for these answers any more."""

    numbers: list[int]


class Ready(msgspec.Struct, tag=True):
    """The model is open; what the HTTP process must know of it."""

    facts: dict[str, Any]


class Broken(msgspec.Struct, tag=True):
    """An error in the place of these answers; of none of them: the model cannot be opened."""

    numbers: list[int]
    kind: str
    said: dict[str, str]  # `what`, `where`, `why` and `fix`

    @classmethod
    def of(cls, error: Exception, numbers: list[int]) -> "Broken":
        """As a message can carry it; the log has what clients do not hear."""
        if numbers and not isinstance(error, WrongUse):
            warn(f"{len(numbers)} answers failed: {type(error).__name__}: {error}")
        if not isinstance(error, ThroughlineError):  # of an answer, a client hears nothing of our insides
            what = "the model failed on this answer" if numbers else f"{type(error).__name__}: {error}"
            return cls(numbers, "Failed", {"what": what})
        said = {name: getattr(error, name) for name in ("what", "where", "why", "fix")}
        return cls(numbers, type(error).__name__, said)

    def error(self) -> ThroughlineError:
        """The error that `of` was given."""
        return KINDS.get(self.kind, Failed)(**self.said)


class Made(msgspec.Struct, array_like=True):
    """Some steps of a generated answer."""

    number: int
    began_s: float
    batch: int  # answers that the last step was of
    deltas: list[TextDelta]


class Beat(msgspec.Struct, tag=True):
    """Heartbeat of a model's process, once a second whatever else it does."""

    busy_s: float  # that the present step has taken so far; 0 between two steps
    cache_usage: float = 0.0  # share of the key-value cache that holds tokens


class Turn(msgspec.Struct, tag=True):
    """Output of one step of a batch."""

    made: list[Made]
    guessed: int = 0  # tokens ahead
    right: int = 0  # of them


class Read(msgspec.Struct, tag=True):
    """An encoder's answer: the outputs that were wanted."""

    number: int
    arrays: dict[str, np.ndarray]
    began_s: float
    ended_s: float
    batch: int


Message = Open | Ask | Cancel | Ready | Broken | Beat | Turn | Read


def _plain(array: np.ndarray) -> tuple[Any, ...]:
    return array.dtype.str, array.shape, array.tobytes()


def _array(kind: type[np.ndarray], value: Any) -> np.ndarray:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode = msgspec.msgpack.Decoder(Message, dec_hook=_array).decode


def pack(message: Message) -> bytes:
    """The bytes that carry a message."""
    data = _encode(message)
    return LENGTH.pack(len(data)) + data


class Parts:
    """Bytes as they come; messages as they are whole."""

    def __init__(self) -> None:
        self._come = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that these bytes complete."""
        self._come += data
        while len(self._come) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._come)[0]
            if len(self._come) < end:
                break
            whole = bytes(self._come[LENGTH.size : end])
            del self._come[:end]
            yield _decode(whole)


class Inbox:
    """The model's end of the socket, read between two steps of work by the thread that does the work."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._parts = connection, Parts()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.ended = False  # the other side has

    def take(self, wait_ms: int) -> list[Message]:
        """What has come; waits so long for a message or the end."""
        if not self._poll.poll(wait_ms):
            return []
        try:
            data = self._connection.recv(READ_BYTES)
        except OSError:
            data = b""
        self.ended = not data
        return list(self._parts.feed(data))


class Messages(asyncio.Protocol):
    """The HTTP process's end: hands on each message when it is whole, and says when the other side has ended."""

    def __init__(self, take: Callable[[Message], None], ended: Callable[[], None]) -> None:
        self._take, self._ended, self._parts = take, ended, Parts()

    def data_received(self, data: bytes) -> None:
        for message in self._parts.feed(data):
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
