"""The process of one model: it opens the model, runs its engine, and answers messages on a socket.

The HTTP process starts it as `python -m throughline.inference.serving.worker FD` and sends `open`, then `generate`,
`read` and `cancel`. It ends when the socket does: a server that dies leaves no model behind. Signals meant
for the whole group are left to the HTTP process, which drains first.
"""

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ...core.backend import BackendOptions
from ...core.errors import Failed, ThroughlineError, WrongUse
from ...core.logits import log_softmax
from ...data.tokenizer import Tokenizer
from ..runtimes.backends import Loaded, open_backend
from ..runtimes.sampling import Sampling
from .channel import Inbox, Message, error_message, pack, pack_arrays
from .constrain import Grammars
from .encoding import Encoding
from .generation import Guide, Request, TextDelta
from .scheduler import CausalEngine, EncoderEngine, Generating, Job, Reading, Told


def serve(connection: socket.socket) -> None:
    """Answer until the other side ends."""
    with contextlib.closing(Inbox(connection)) as inbox:
        come: list[Message] = []
        while not come and not inbox.ended:
            come = inbox.take(wait=True)
        if inbox.ended:
            return
        speaker = Speaker(connection)
        try:
            model = WorkerModel(come[0][0], speaker, inbox.ring)
        except Exception as error:  # of any library: the HTTP process must hear of it
            speaker.say({"at": "failed", "error": error_message(error)})
            return
        speaker.say({"at": "ready", **model.describe()})
        # One thread reads and works: waking another one costs more than reading does.
        while not inbox.ended:
            for message, block in inbox.take(wait=not model.engine.busy):
                model.take(message, block)
            model.begin_prepared()
            if model.engine.busy:
                model.engine.turn()


class Speaker:
    """Sends messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def say(self, message: dict[str, Any], block: bytes = b"") -> None:
        """Send a message. Nothing happens when the other side has ended: the reader notices."""
        with contextlib.suppress(OSError):
            self._connection.sendall(pack(message, block))


class WorkerModel:
    """The model, its tokenizer and its engine; messages in, answers out."""

    def __init__(self, opening: dict[str, Any], speaker: Speaker, ring: Callable[[], None]) -> None:
        self._speaker, self._ring = speaker, ring
        self.loaded = open_backend(opening["path"], BackendOptions(**opening["options"]))
        if self.loaded.tokenizer is None:
            fix = "put the one that it was trained with beside the weights"
            raise WrongUse("this model has no tokenizer.json", where=self.loaded.input.path, fix=fix)
        self.tokenizer = Tokenizer.load(self.loaded.tokenizer)
        self._outputs = warm_up(self.loaded)
        self.engine = self._engine(opening["slots"])
        self._held: dict[int, list[list[Any]]] = {}  # parts of answers that are sent whole
        self._made_now: list[list[Any]] = []  # of this turn, sent as one message
        self._batch = 0
        self._grammars: Grammars | None = None  # made when somebody asks
        # Reading a vocabulary for the grammars takes a second: answers in the making go on beside it.
        self._beside = ThreadPoolExecutor(1, "grammars")
        self._preparing: dict[int, tuple[dict[str, Any], np.ndarray, Future[Guide]]] = {}

    def _engine(self, slots: int) -> CausalEngine | EncoderEngine:
        if self.loaded.causal is not None:
            vocab_size = self.tokenizer.vocab_size
            decode, turned = self.tokenizer.decode, self._turned
            return CausalEngine(self.loaded.causal, decode, turned, slots=slots, vocab_size=vocab_size)
        assert self.loaded.encoder is not None
        pad_id = self.tokenizer.pad_id or 0  # padding is masked: any id will do
        return EncoderEngine(self.loaded.encoder, self._turned, pad_id=pad_id)

    def describe(self) -> dict[str, Any]:
        """What the HTTP process must know of the model."""
        backend = self.loaded.causal or self.loaded.encoder
        assert backend is not None and self.loaded.tokenizer is not None
        return {
            "family": self.loaded.family,
            "backend": backend.name,
            "device": backend.device,
            "dtype": backend.dtype,
            "context": backend.context,
            "vocab_size": backend.vocab_size,
            "tokenizer": str(Path(self.loaded.tokenizer).resolve()),
            "hash": self.loaded.input.hash,
            "outputs": self._outputs,
            "classes": self.loaded.classes,
        }

    def take(self, message: dict[str, Any], block: bytes) -> None:
        """Do what a message asks; what is wrong with a job is its answer."""
        if message["do"] == "cancel":
            for number in message["jobs"]:
                self._preparing.pop(number, None)
            self.engine.cancel(set(message["jobs"]))
            return
        ids = np.frombuffer(block, np.int32).astype(np.int64)
        if message.get("constraint") is None:
            self._submit(message, ids)
        else:
            guide = self._beside.submit(self._guide, message["constraint"])
            self._preparing[message["job"]] = (message, ids, guide)
            guide.add_done_callback(lambda _: self._ring())

    def begin_prepared(self) -> None:
        """Queue the jobs whose grammars are ready."""
        for message, ids, guide in [one for one in self._preparing.values() if one[2].done()]:
            del self._preparing[message["job"]]
            self._submit(message, ids, guide)

    def _submit(self, message: dict[str, Any], ids: np.ndarray, guide: "Future[Guide] | None" = None) -> None:
        try:
            if isinstance(self.engine, EncoderEngine):
                text = Encoding(ids, np.array(message["ask"], np.int64), message["first_tokens"])
                self.engine.submit([Reading(message["job"], self._read, text=text, details=message)])
            else:
                request = self._request(message, ids, guide.result() if guide else None)
                job = Generating(message["job"], self._made, request=request, whole=message["whole"])
                self.engine.submit([job])
        except Exception as error:
            self._speaker.say({"at": "error", "job": message["job"], "error": error_message(error)})

    def _request(self, message: dict[str, Any], ids: np.ndarray, guide: Guide | None) -> Request:
        sampling = message["sampling"]
        bias = tuple((int(i), float(value)) for i, value in sampling["logit_bias"])
        return Request(
            ids,
            message["max_tokens"],
            Sampling(**sampling | {"logit_bias": bias}),
            tuple(message["stop"]),
            self.tokenizer.eos_id,
            message["logprobs"],
            message["logprobs"] if message["prompt_logprobs"] else None,
            guide,
        )

    def _guide(self, constraint: dict[str, Any]) -> Guide:
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer)
        return self._grammars.guide(constraint)

    def _made(self, job: Job, told: Told, batch: int) -> None:
        """A step of an answer is sent with the others of this turn, or kept until the answer is whole."""
        assert isinstance(job, Generating)
        self._batch = batch
        if isinstance(told, Failed):
            self._held.pop(job.number, None)
            self._speaker.say({"at": "error", "job": job.number, "error": error_message(told)})
            return
        assert isinstance(told, TextDelta)
        token = told.token and [told.token.id, told.token.logprob, told.token.top]
        held = self._held.setdefault(job.number, [])
        prompt = told.prompt and [[one.id, one.logprob, one.top] for one in told.prompt]
        held.append([told.text, token, told.finish, time.monotonic(), prompt, told.cached_tokens])
        if told.finish or not job.whole:
            del self._held[job.number]
            if told.finish != "cancelled":
                self._made_now.append([job.number, job.began_s, held])

    def _turned(self) -> None:
        if self._made_now:
            made, self._made_now = self._made_now, []
            self._speaker.say({"at": "made", "batch": self._batch, "jobs": made})

    def _read(self, job: Job, told: Told, batch: int) -> None:
        """An encoder's answer goes out, reduced to what was asked for."""
        assert isinstance(job, Reading)
        if isinstance(told, Failed):
            self._speaker.say({"at": "error", "job": job.number, "error": error_message(told)})
            return
        assert isinstance(told, dict)
        described, block = pack_arrays(self._reduce(told, job.details))
        times = {"began_s": job.began_s, "ended_s": time.monotonic(), "batch": batch}
        self._speaker.say({"at": "read", "job": job.number, "arrays": described, **times}, block)

    def _reduce(self, answer: dict[str, np.ndarray], details: dict[str, Any]) -> dict[str, np.ndarray]:
        if not details["ask"]:
            return {name: answer[name] for name in details["want"]}
        logits_NV = answer["mlm_logits"].astype(np.float64)[:, : self.tokenizer.vocab_size]
        probabilities_NV = np.exp(log_softmax(logits_NV))
        best_NK = np.argsort(-probabilities_NV, kind="stable")[:, : details["top_k"]]
        return {"ids": best_NK, "probabilities": np.take_along_axis(probabilities_NV, best_NK, 1)}


def warm_up(loaded: Loaded) -> list[str]:
    """One forward, so that a model that cannot run is known before anybody asks; the names of an encoder's
    outputs.
    """
    ids = np.zeros((1, 2), np.int64)
    try:
        if loaded.causal is not None:
            one = np.zeros((1, 1), np.int64)
            loaded.causal.forward(ids, np.zeros(1, np.int64), one, loaded.causal.new_cache(1))
        elif loaded.encoder is not None:
            loaded.encoder.lane()  # opened before somebody waits for it
            return sorted(loaded.encoder.forward(ids, ids, ids == 0, ids))
    except ThroughlineError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise Failed("the model failed on its first input", where=loaded.input.path, why=why) from error
    return []


def main() -> None:
    """`python -m throughline.inference.serving.worker FD`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
