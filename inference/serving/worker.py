"""The process of one model: it opens the model, runs its engine a turn at a time, and answers messages on a socket.

The HTTP process starts it as `python -m throughline.inference.serving.worker FD` and sends `Open`, then `Ask` and
`Cancel`. It ends when the socket does: a server that dies leaves no model behind. Signals meant for the whole group
are left to the HTTP process, which drains first. Who may ask for how much is decided before: see `remote`.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from bisect import insort
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...core.backend import CausalBackend, EncoderBackend, Limits, Span, log_softmax, on_host
from ...core.console import background_stderr, configure_log, guarded_stderr, warn
from ...core.errors import Failed, Refused, ThroughlineError, WrongUse
from ...data.chat import ChatTemplate
from ...data.model_settings import end_ids
from ...data.tokenizer import Tokenizer
from ..runtimes.backends import Loaded, open_text_model
from .channel import Ask, Beat, Broken, Cancel, Inbox, Made, Message, Open, Read, Ready, Turn, Work, pack
from .encoding import Encoding, batch_limits, encode_batch, take_batch
from .generation import Grammars, Guide
from .slots import NO_NUMBER, PREFIX_BYTES, SlotBatch, in_halves

BEAT_MS = 1000  # between two heartbeats
TOLD_TOGETHER = 64  # tokens of an answer that nobody sees before it is whole
TOKEN_S = 0.005  # by which each token that a request asks for delays it behind those that ask for less
LOOKED_AT = 1024  # texts of the queue among which a batch is chosen: a request may bring thousands
LOOK_MS = 2  # between two looks at grammars in the making, where there is nothing else to do
Making = Future[Guide] | None


def serve(connection: socket.socket) -> None:
    """Answer until the other side ends."""
    sending = threading.Lock()

    def say(*messages: Message) -> None:
        with contextlib.suppress(OSError), sending:  # the other side has ended: the reader notices
            connection.sendall(b"".join(map(pack, messages)))

    inbox = Inbox(connection)
    while not (come := inbox.take(BEAT_MS)):
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
    with Heartbeat(model, say) as heartbeat:
        while not inbox.ended:
            messages = come + inbox.take(0 if come else model.patience_ms)
            come = []
            heartbeat.step_began_s = time.monotonic()
            for message in messages:
                model.take(message)
            model.turn()
            heartbeat.step_began_s = None


class Heartbeat:
    """Says once a second, from a thread of its own, that the process lives and how long its present step takes.

    A long step (the first compilation of a shape, TensorRT's build of an engine, a long prompt on a slow CPU) is
    thereby told from a process that has stopped; the HTTP process decides how long either may last.
    """

    def __init__(self, model: "WorkerModel", say: Callable[..., None]) -> None:
        self._model, self._say = model, say
        self._ended = threading.Event()
        self.step_began_s: float | None = None  # monotonic

    def __enter__(self) -> "Heartbeat":
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_MS / 1000):
            began_s = self.step_began_s
            busy_s = 0.0 if began_s is None else time.monotonic() - began_s
            self._say(Beat(busy_s, self._model.engine.cache_usage))


class CausalEngine(SlotBatch):
    """Continuous batching of a GPT; each turn tells what one step made."""

    def submit(self, number: int, work: Work, making: Making, due_s: float, tenant: str) -> None:
        """Queue an answer. Raises WrongUse when it cannot fit the model's context."""
        assert not isinstance(work, Encoding)
        sequence = self.add(work, None, due_s, tenant)
        sequence.owner, sequence.making = number, making

    def drop(self, owners: set[Any]) -> None:
        """See `SlotBatch.drop`; a grammar for which nobody waits any more is not begun."""
        left = {sequence.making for sequence in self.waiting if sequence.owner in owners}
        super().drop(owners)
        for making in left - {sequence.making for sequence in self.waiting}:
            if making is not None:
                making.cancel()

    @property
    def cache_usage(self) -> float:
        """Tokens that the sequences in the making hold, as a share of all places of the cache."""
        held = sum(sequence.past for sequence in tuple(self._live))
        return held / (self.slots * self.backend.context)

    def turn(self) -> list[Message]:
        """One step of work on what is queued and begun."""
        deltas, made = self.step(), []
        rows = len({id(sequence) for sequence, _ in deltas})
        for sequence, delta in deltas:
            sequence.untold.append(delta)
            if delta.finish or not sequence.job.whole or len(sequence.untold) == TOLD_TOGETHER:
                made.append(Made(sequence.owner, sequence.began_s, rows, sequence.untold))
                sequence.untold = []
        told: list[Message] = [Turn(made, self.guessed, self.right)] if made or self.guessed else []
        told += [Broken.of(error, [sequence.owner]) for sequence, error in self.failed]
        self.failed, self.guessed, self.right = [], 0, 0
        return told


class EncoderEngine:
    """Batches texts of similar length, as many as the runtime takes; never waits for more to come."""

    cache_usage = 0.0  # it has no cache

    def __init__(self, backend: EncoderBackend, pad_id: int, vocab_size: int) -> None:
        self._backend, self._pad_id, self._vocab_size = backend, pad_id, vocab_size
        self._limits = batch_limits(backend)
        self.waiting: list[tuple[float, int, Encoding]] = []  # by when they are due
        self.sick = False  # see `SlotBatch`

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, number: int, work: Work, making: Making, due_s: float, tenant: str) -> None:
        assert isinstance(work, Encoding)
        insort(self.waiting, (due_s, number, work), key=lambda one: one[0])

    def drop(self, numbers: set[int]) -> None:
        self.waiting = [one for one in self.waiting if one[1] not in numbers]

    def turn(self) -> list[Message]:
        """The text that is due with those of the next in the queue that are nearest in length."""
        texts = {number: text for _, number, text in self.waiting[:LOOKED_AT]}
        batch = take_batch(texts, self._limits)
        self.drop({*batch})

        def read(numbers: list[int]) -> list[Message]:
            began_s = time.monotonic()
            answers = encode_batch(self._backend, [texts[number] for number in numbers], self._pad_id)
            times, told = (began_s, time.monotonic(), len(numbers)), list[Message]()
            for number, answer in zip(numbers, answers):
                arrays = self._wanted(texts[number], answer)
                sound = all(np.isfinite(array).all() for array in arrays.values())
                told.append(Read(number, arrays, *times) if sound else Broken.of(Failed(NO_NUMBER), [number]))
            return told

        done, failed, most = in_halves(batch, read, len(batch))
        if most < len(batch):
            self._limits = self._limits.within(Limits(rows=most))
        self.sick = not done
        return [one for _, told in done for one in told] + [Broken.of(error, [i]) for i, error in failed]

    def _wanted(self, text: Encoding, answer: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not text.top_k:
            return {name: answer[name] for name in text.want}
        logits_NV = answer["mlm_logits"].astype(np.float64)[:, : self._vocab_size]
        probabilities_NV = np.exp(log_softmax(logits_NV))
        best_NK = np.argsort(-probabilities_NV, kind="stable")[:, : text.top_k]
        return {"ids": best_NK, "probabilities": np.take_along_axis(probabilities_NV, best_NK, 1)}


class WorkerModel:
    """The model, its tokenizer and its engine; messages in, answers out."""

    def __init__(self, opening: Open, say: Callable[..., None]) -> None:
        self._say = say
        self.loaded, tokenizer = open_text_model(opening.path, "", opening.options)
        self.tokenizer = tokenizer
        self._outputs = warm_up(self.loaded)
        assert self.loaded.tokenizer is not None
        directory = self.loaded.tokenizer.parent
        self.engine: CausalEngine | EncoderEngine
        if self.loaded.causal is not None:
            ends = end_ids(directory, tokenizer)
            rest = opening.slots, tokenizer.vocab_size, ends, PREFIX_BYTES, opening.speculate
            draft = open_draft(opening, tokenizer) if opening.draft else None
            if draft is not None:
                draft.context = min(draft.context, self.loaded.causal.context)
            self.engine = engine = CausalEngine(self.loaded.causal, tokenizer, *rest, draft)
            if engine.slots < opening.slots:
                fitting = f"{engine.slots} sequences at a time, as many as fit, not {opening.slots}"
                warn(f"{opening.name}: {fitting}")
        else:
            assert self.loaded.encoder is not None
            pad_id = tokenizer.pad_id or 0  # padding is masked: any id will do
            self.engine = EncoderEngine(self.loaded.encoder, pad_id, tokenizer.vocab_size)
        # Reading a vocabulary for the grammars takes a second: answers in the making go on beside it.
        self._grammars = lru_cache(1)(lambda: Grammars(tokenizer, turn_ends(directory, tokenizer)))
        self._beside = ThreadPoolExecutor(1, "grammars")

    @property
    def patience_ms(self) -> int:
        """How long it may wait for a message: not with work to do."""
        return 0 if self.engine.busy else LOOK_MS if self.engine.waiting else BEAT_MS

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
            # not resolved: the hub's cache links each file to another place, and what stands beside it is here
            "tokenizer": os.path.abspath(self.loaded.tokenizer),
            "hash": self.loaded.input.hash,
            "outputs": self._outputs,
            "classes": self.loaded.classes,
            "problem_type": self.loaded.problem if self.loaded.classes else "",
        }

    def take(self, message: Message) -> None:
        """Do what a message asks; what is wrong with a job is its answer."""
        if isinstance(message, Cancel):
            self.engine.drop(set(message.numbers))
            return
        assert isinstance(message, Ask)
        number, due_s = message.first, message.due_s
        for work in message.work:
            constraint = None if isinstance(work, Encoding) else work.constraint
            making = self._beside.submit(self._guide, constraint) if constraint else None
            for one in work.each():
                due_s += one.cost * TOKEN_S
                try:
                    self.engine.submit(number, one, making, due_s, message.tenant)
                except Exception as error:
                    self._say(Broken.of(error, [number]))
                number += 1

    def turn(self) -> None:
        """A turn of the engine, if there is work."""
        if not self.engine.busy:
            return
        self._say(*self.engine.turn())
        if self.engine.sick:
            warm_up(self.loaded)  # it may have been what was asked; if not, another process may do better

    def _guide(self, constraint: str) -> Guide:
        return self._grammars().guide(constraint)


def turn_ends(directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end a text, or an answer in a chat."""
    template, _ = ChatTemplate.find_usable(directory, tokenizer)
    if template is not None:
        return template.end_ids
    return frozenset(end_ids(directory, tokenizer))


def open_draft(opening: Open, tokenizer: Tokenizer) -> CausalBackend:
    """The model that guesses. Raises WrongUse for one that is no GPT or has another vocabulary."""
    options = replace(opening.options, context=None, runtime="own", dtype="auto")
    loaded, own = open_text_model(opening.draft, "gpt", options)
    if differing := own.vocab.items() ^ tokenizer.vocab.items():
        text, number = min(differing, key=lambda one: one[1])
        why = f"token {number} ({text!r}) is not the same in {opening.path}"
        fix = "give a model that was trained with the same tokenizer.json"
        raise WrongUse("the draft model has another vocabulary", where=opening.draft, why=why, fix=fix)
    assert loaded.causal is not None
    return loaded.causal


def warm_up(loaded: Loaded) -> list[str]:
    """Compute one forward: a model that cannot run, or gives no finite number, is known before anybody asks. Return the
    names of an encoder's outputs. Raises Failed and Refused.
    """
    try:
        outputs = first_outputs(loaded)
    except ThroughlineError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise Failed("the model failed on its first input", where=loaded.input.path, why=why) from error
    for name, values in outputs.items():
        if values.size and not np.isfinite(values).any():
            what, why = "the model computes no finite number", f"every value of its {name} is NaN or infinite"
            fix = (
                "try --dtype fp32; if that does not help, the weights hold NaN or infinite values: use others"
            )
            raise Refused(what, where=loaded.input.path, why=why, fix=fix)
    return sorted(outputs) if loaded.encoder is not None else []


def first_outputs(loaded: Loaded) -> dict[str, np.ndarray]:
    """Run two tokens through the model and return an encoder's outputs or a GPT's next-token `logits`."""
    ids = np.random.default_rng(0).integers(0, loaded.config.vocab_size, (1, 2))
    if loaded.encoder is not None:
        loaded.encoder.lane()  # opened before somebody waits for it
        ask = np.zeros((1, 1), np.int64)
        return loaded.encoder.forward(ids, np.zeros_like(ids), np.ones(ids.shape, bool), ask)
    backend = loaded.causal
    assert backend is not None
    cache = backend.new_cache(1)
    backend.step([Span(0, 0, ids[0])], cache)
    return {"logits": on_host(backend.step([Span(0, 2, ids[0, :1])], cache))}


def main() -> None:
    """`python -m throughline.inference.serving.worker FD LOG_FORMAT LOG_LEVEL`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, *log_settings = sys.argv[1:]
    configure_log(*log_settings)
    with guarded_stderr(), background_stderr():
        serve(socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    main()
