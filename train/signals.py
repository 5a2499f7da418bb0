"""Stopping on request: SIGTERM and the first Ctrl-C let the step end and the run be saved."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..core.console import say
from ..core.errors import EXIT_INTERRUPTED


class StopNow(Exception):
    """Raised by a signal inside `Signals.interruptible`."""


class Signals:
    """Which signal asked the run to stop, if any. A context manager; outside the main thread it does nothing.

    A second Ctrl-C ends the process at once: what was being written stays aside under a temporary name.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.agreed = False  # by all processes of a run, to stop for it
        self._raise = False
        self._old: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def number(self) -> int:
        """The signal that this process has received, 0 for none."""
        return int(self.received or 0)

    def agree(self, number: int) -> None:
        """Some process has received this one (0: none): all stop for the same."""
        if number:
            self.agreed, self.received = True, signal.Signals(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT and number == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            say("\nfinishing the step and saving; Ctrl-C again quits at once")
        if self._raise:
            self._raise = False
            raise StopNow

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A part that changes nothing (an evaluation): a signal ends it at once with StopNow."""
        if self.received is not None:
            raise StopNow
        self._raise = True
        try:
            yield
        finally:
            self._raise = False

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)  # type: ignore[arg-type]
