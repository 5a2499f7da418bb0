"""The signals that ask a command to save what it has and to end: SIGTERM of a scheduler, SIGHUP of a lost terminal."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

# Windows has no SIGHUP
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if name in signal.Signals.__members__
)


@contextmanager
def handling(handler: Handler, numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Handle these signals while the block runs, in the main thread; the others may set no handlers.

    A SIGHUP that is ignored stays ignored: `nohup` asks for a command that outlives its terminal.
    """
    replaced: dict[signal.Signals, object] = {}
    try:
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            ignored = signal.getsignal(number) is signal.SIG_IGN
            if number.name == "SIGHUP" and ignored:
                continue
            replaced[number] = signal.signal(number, handler)
        yield
    finally:
        for number, previous in replaced.items():
            signal.signal(number, previous)  # type: ignore[arg-type]


@contextmanager
def raising(error: Callable[[str], BaseException]) -> Iterator[None]:
    """Raise `error` of the signal's name at the first of STOP_SIGNALS while the block runs, and ignore later ones: the
    kernel and the shell both report a lost terminal.
    """
    received = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if not received:
            received = True
            raise error(signal.Signals(number).name)

    with handling(stop):
        yield
