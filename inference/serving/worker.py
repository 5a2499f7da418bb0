"""The process of one model: it opens the model, runs its engine, and answers messages on a socket.

The HTTP process starts it as `python -m throughline.inference.serving.worker FD` and sends `Open`, then `Ask` and
`Cancel`. It ends when the socket does: a server that dies leaves no model behind. Signals meant for the whole
group are left to the HTTP process, which drains first.

An engine answers in batches, a turn at a time. A batch that breaks is answered with its error and the engine goes
on with the next one. Who may ask for how much is decided before: see `remote`.
"""

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...core.backend import EncoderBackend
from ...core.console import warn
from ...core.errors import Failed, ThroughlineError, WrongUse
from ...core.logits import log_softmax
from ...data.tokenizer import Tokenizer
from ..runtimes.backends import Loaded, open_backend
from ..runtimes.bench import call_of
from .channel import Ask, Broken, Cancel, Inbox, Made, Message, Open, Read, Ready, Turn, Work, pack
from .constrain import Grammars, Guide
from .encoding import Encoding, batch_limits, encode_batch, take_batch
from .slots import SlotBatch

LOOK_MS = 2  # between two looks at grammars in the making, where there is nothing else to do


def serve(connection: socket.socket) -> None:
    """Answer until the other side ends."""

    def say(*messages: Message) -> None:
        with contextlib.suppress(OSError):  # the other side has ended: the reader notices
            connection.sendall(b"".join(map(pack, messages)))

    inbox = Inbox(connection)
    come: list[Message] = []
    while not come and not inbox.ended:
        come = inbox.take(None)
    if inbox.ended:
        return
    opening, *come = come
    assert isinstance(opening, Open)
    try:
        model = WorkerModel(opening, say)
    except Exception as error:  # of any library: the HTTP process must hear of it
        say(Broken.of(error, []))
        return
    say(Ready(model.describe()))
    # One thread reads and works: waking another one costs more than reading does.
    while not inbox.ended:
        for message in come + inbox.take(0 if come else model.patience_ms):
            model.take(message)
        come = []
        model.begin_prepared()
        if model.engine.busy:
            model.turn()


class CausalEngine(SlotBatch):
    """Continuous batching of a GPT; each turn tells what one step made."""

    def submit(self, number: int, work: Work, guide: Guide | None = None) -> None:
        """Queue an answer. Raises WrongUse when it cannot fit the model's context."""
        assert not isinstance(work, Encoding)
        self.add(work, guide).owner = number

    def turn(self) -> list[Message]:
        """One step of work on what is queued and begun."""
        made = []
        deltas = self.step()
        for sequence, delta in deltas:
            sequence.untold.append(delta)
            if delta.finish or not sequence.job.whole:
                made.append(Made(sequence.owner, sequence.began_s, len(deltas), sequence.untold))
                sequence.untold = []
        return [Turn(made)] if made else []


class EncoderEngine:
    """Batches texts of similar length, as many as the runtime takes; never waits for more to come."""

    def __init__(self, backend: EncoderBackend, pad_id: int, vocab_size: int) -> None:
        self._backend, self._pad_id, self._vocab_size = backend, pad_id, vocab_size
        self._limits = batch_limits(backend)
        self.queue: dict[int, Encoding] = {}
        self._batch: list[int] = []

    @property
    def busy(self) -> bool:
        """Whether a turn would do something."""
        return bool(self.queue)

    def submit(self, number: int, work: Work, guide: Guide | None = None) -> None:
        """Queue a text."""
        assert isinstance(work, Encoding)
        self.queue[number] = work

    def drop(self, numbers: set[int]) -> None:
        """Nobody reads these answers any more."""
        self.queue = {number: text for number, text in self.queue.items() if number not in numbers}

    def turn(self) -> list[Message]:
        """The oldest text with those queued ones that are nearest in length."""
        self._batch = take_batch(self.queue, self._limits)
        texts = [self.queue.pop(number) for number in self._batch]
        began_s = time.monotonic()
        answers = encode_batch(self._backend, texts, self._pad_id)
        wanted = [self._wanted(text, answer) for text, answer in zip(texts, answers)]
        times = began_s, time.monotonic(), len(texts)
        return [Read(number, arrays, *times) for number, arrays in zip(self._batch, wanted)]

    def _wanted(self, text: Encoding, answer: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not text.top_k:
            return {name: answer[name] for name in text.want}
        logits_NV = answer["mlm_logits"].astype(np.float64)[:, : self._vocab_size]
        probabilities_NV = np.exp(log_softmax(logits_NV))
        best_NK = np.argsort(-probabilities_NV, kind="stable")[:, : text.top_k]
        return {"ids": best_NK, "probabilities": np.take_along_axis(probabilities_NV, best_NK, 1)}

    def broken(self) -> list[int]:
        """The answers that an error in a turn has lost."""
        return self._batch


class WorkerModel:
    """The model, its tokenizer and its engine; messages in, answers out."""

    def __init__(self, opening: Open, say: Callable[..., None]) -> None:
        self._say = say
        self.loaded = open_backend(opening.path, opening.options)
        if self.loaded.tokenizer is None:
            fix = "put the one that it was trained with beside the weights"
            raise WrongUse("this model has no tokenizer.json", where=self.loaded.input.path, fix=fix)
        self.tokenizer = tokenizer = Tokenizer.load(self.loaded.tokenizer)
        self._outputs = warm_up(self.loaded)
        self.engine: CausalEngine | EncoderEngine
        if self.loaded.causal is not None:
            rest = opening.slots, tokenizer.vocab_size, tokenizer.eos_id
            self.engine = CausalEngine(self.loaded.causal, tokenizer.decode, *rest)
        else:
            assert self.loaded.encoder is not None
            pad_id = tokenizer.pad_id or 0  # padding is masked: any id will do
            self.engine = EncoderEngine(self.loaded.encoder, pad_id, tokenizer.vocab_size)
        self._grammars: Grammars | None = None  # made when somebody asks
        # Reading a vocabulary for the grammars takes a second: answers in the making go on beside it.
        self._beside = ThreadPoolExecutor(1, "grammars")
        self._preparing: dict[int, tuple[Work, Future[Guide]]] = {}

    @property
    def patience_ms(self) -> int | None:
        """How long it may wait for a message: not with work to do, for ever without any."""
        return 0 if self.engine.busy else LOOK_MS if self._preparing else None

    def describe(self) -> dict[str, Any]:
        """What the HTTP process must know of the model."""
        backend = self.loaded.backend
        assert self.loaded.tokenizer is not None
        return {
            "family": self.loaded.family,
            "backend": backend.name,
            **{name: getattr(backend, name) for name in ("device", "dtype", "vocab_size")},
            "context": self.loaded.sentence.context(backend.context),
            "sentence": asdict(self.loaded.sentence),
            "tokenizer": str(Path(self.loaded.tokenizer).resolve()),
            "hash": self.loaded.input.hash,
            "outputs": self._outputs,
            "classes": self.loaded.classes,
        }

    def take(self, message: Message) -> None:
        """Do what a message asks; what is wrong with a job is its answer."""
        if isinstance(message, Cancel):
            for number in message.numbers:
                self._preparing.pop(number, None)
            self.engine.drop(set(message.numbers))
            return
        assert isinstance(message, Ask)
        answers = [one for work in message.work for one in work.each()]
        for number, work in enumerate(answers, message.first):
            if isinstance(work, Encoding) or work.constraint is None:
                self._submit(number, work)
                continue
            self._preparing[number] = (work, self._beside.submit(self._guide, work.constraint))

    def begin_prepared(self) -> None:
        """Queue the jobs whose grammars are ready."""
        ready = {number: one for number, one in self._preparing.items() if one[1].done()}
        for number, (work, guide) in ready.items():
            del self._preparing[number]
            self._submit(number, work, guide)

    def turn(self) -> None:
        """One turn of the engine, and what it says."""
        try:
            messages = self.engine.turn()
        except Exception as error:  # whatever a backend throws: those who wait must hear of it
            why = f"{type(error).__name__}: {error}"
            warn(f"a batch failed: {why}")
            failure = Failed("the model failed on this batch", why=why)
            messages = [Broken.of(failure, self.engine.broken())]
        self._say(*messages)

    def _submit(self, number: int, work: Work, guide: "Future[Guide] | None" = None) -> None:
        try:
            self.engine.submit(number, work, guide.result() if guide else None)
        except Exception as error:
            self._say(Broken.of(error, [number]))

    def _guide(self, constraint: dict[str, Any]) -> Guide:
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer)
        return self._grammars.guide(constraint)


def warm_up(loaded: Loaded) -> list[str]:
    """One forward, so that a model that cannot run is known before anybody asks; the names of an encoder's
    outputs.
    """
    try:
        if loaded.encoder is not None:
            loaded.encoder.lane()  # opened before somebody waits for it
        found = call_of(loaded, tokens=2)()
    except ThroughlineError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise Failed("the model failed on its first input", where=loaded.input.path, why=why) from error
    return sorted(found) if loaded.encoder is not None else []


def main() -> None:
    """`python -m throughline.inference.serving.worker FD`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
