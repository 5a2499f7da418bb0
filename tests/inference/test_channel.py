"""Messages between the HTTP process and a model's: cut anywhere, read whole; and the end of either side."""

import socket
import threading
import time

import pytest
from throughline.inference.serving.channel import Inbox, Parts, pack

SENT = [
    ({"do": "read", "job": 1}, b"\x01\x02"),
    ({"do": "cancel", "jobs": [1]}, b""),
    ({"ä": "€"}, b"x" * 300),
]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000])
def test_messages_are_whole_however_they_are_cut(size: int) -> None:
    """8 bytes of lengths come first: cuts before, at and behind them, and several messages in one piece."""
    stream = b"".join(pack(*message) for message in SENT)
    parts = Parts()
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert [message for piece in pieces for message in parts.feed(piece)] == SENT


def test_an_inbox_gives_what_has_come_and_says_when_the_other_side_has_ended() -> None:
    ours, theirs = socket.socketpair()
    inbox = Inbox(theirs)
    assert inbox.take(wait=False) == []
    ours.sendall(b"".join(pack(*message) for message in SENT))
    assert inbox.take(wait=True) == SENT and not inbox.ended
    ours.close()
    assert inbox.take(wait=True) == [] and inbox.ended
    inbox.close()
    theirs.close()


def test_a_bell_ends_the_wait_of_an_inbox() -> None:
    """A grammar that is ready on another thread: the wait ends without a message, and waits again after it."""
    ours, theirs = socket.socketpair()
    inbox = Inbox(theirs)
    threading.Timer(0.05, inbox.ring).start()
    assert inbox.take(wait=True) == []
    threading.Timer(0.05, ours.sendall, [pack(*SENT[0])]).start()
    began_s = time.monotonic()
    assert inbox.take(wait=True) == SENT[:1] and time.monotonic() - began_s > 0.02  # the bell rang once
    for one in (inbox, ours, theirs):
        one.close()
