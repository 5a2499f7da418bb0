"""Messages between the HTTP process and a model's: cut anywhere, read whole; and the end of either side."""

import socket

import numpy as np
import pytest
from throughline.core.errors import MissingExtra, WrongUse
from throughline.inference.runtimes.sampling import Sampling
from throughline.inference.serving.channel import Ask, Broken, Cancel, Inbox, Made, Parts, Read, Turn, pack
from throughline.inference.serving.encoding import Encoding
from throughline.inference.serving.generation import Job, TextDelta, Token

TOKEN = Token(7, -0.5, ((7, -0.5), (1, -2.0)))
SENT = [
    Cancel([1]),
    Turn([Made(3, 1.5, 2, [TextDelta("ä€", TOKEN, None, (Token(5),), 4, 2.5), TextDelta("", None, "stop")])]),
    Broken([1, 2], "WrongUse", {"what": "x" * 300, "where": "here"}),
]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000])
def test_messages_are_whole_however_they_are_cut(size: int) -> None:
    """4 bytes of length come first: cuts before, at and behind them, and several messages in one piece."""
    stream = b"".join(map(pack, SENT))
    parts = Parts()
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert [message for piece in pieces for message in parts.feed(piece)] == SENT


def test_work_and_arrays_arrive_as_they_were() -> None:
    """Every field of a job differs from its default here: one that is not carried shows."""
    sampling = Sampling(0.5, 3, 0.9, 0.1, 1.2, 2**63 - 1, -1.0, 1.5, ((4, -100.0),))
    ids = np.arange(5)
    job = Job(ids, 9, sampling, ("a", "b"), 2, 3, '{"json": {"type": ["object"]}}', 4, True)
    text = Encoding(ids, np.array([1, 3]), 2, ("x",), 5)
    (ask,) = Parts().feed(pack(Ask(6, [job, text])))
    for sent, come in zip((job, text), ask.work, strict=True):
        assert type(come) is type(sent)
        for name in sent.__struct_fields__:
            given, found = getattr(sent, name), getattr(come, name)
            assert np.array_equal(given, found) if isinstance(given, np.ndarray) else given == found, name
    arrays = {"a": np.float32([[1.5, 2]]), "b": np.zeros((0, 3), np.int64)}
    (read,) = Parts().feed(pack(Read(1, arrays, 0.0, 1.0, 2)))
    for name, array in arrays.items():
        assert read.arrays[name].dtype == array.dtype and read.arrays[name].shape == array.shape
        np.testing.assert_array_equal(read.arrays[name], array)


def test_errors_keep_their_kind_and_parts() -> None:
    for error, kind in ((WrongUse("w", where="p", why="y", fix="f"), WrongUse), (KeyError("k"), Exception)):
        (broken,) = Parts().feed(pack(Broken.of(error, [1])))
        assert isinstance(broken.error(), kind) and broken.numbers == [1]
    assert str(Broken.of(WrongUse("w", where="p", fix="f"), []).error()) == str(
        WrongUse("w", where="p", fix="f")
    )
    assert isinstance(Broken.of(MissingExtra("x", "y", "z"), []).error(), WrongUse)


def test_an_inbox_gives_what_has_come_and_says_when_the_other_side_has_ended() -> None:
    ours, theirs = socket.socketpair()
    inbox = Inbox(theirs)
    assert inbox.take(0) == []
    ours.sendall(b"".join(map(pack, SENT)))
    assert inbox.take(1000) == SENT and not inbox.ended
    ours.close()
    assert inbox.take(1000) == [] and inbox.ended
    theirs.close()
