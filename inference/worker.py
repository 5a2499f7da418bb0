"""The process of one model: it opens the model, runs its engine, and answers messages on a socket.

The HTTP process starts it as `python -m throughline.inference.worker FD` and sends `open`, then `generate`,
`read` and `cancel`. It ends when the socket does: a server that dies leaves no model behind. Signals meant
for the whole group are left to the HTTP process, which drains first.
"""

import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..core.backend import BackendOptions
from ..core.errors import Failed, ThroughlineError, WrongUse
from ..data.tokenizer import Tokenizer
from .backends import Loaded, open_backend
from .channel import error_message, pack, pack_arrays, read
from .constrain import Grammars
from .encoding import Encoding
from .generation import Guide, Request, TextDelta
from .sampling import Sampling, log_softmax
from .scheduler import CausalEngine, EncoderEngine, Generating, Job, Reading, Told


def serve(connection: socket.socket) -> None:
    """Answer until the other side ends."""
    file = connection.makefile("rb")
    first = read(file)
    if first is None:
        return
    speaker = Speaker(connection)
    try:
        model = WorkerModel(first[0], speaker)
    except Exception as error:  # of any library: the HTTP process must hear of it
        speaker.say({"at": "failed", "error": error_message(error)})
        return
    speaker.say({"at": "ready", **model.describe()})
    model.engine.start()
    while (message := read(file)) is not None:
        model.take(*message)
    model.engine.stop()


class Speaker:
    """Sends messages; several threads may."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._one_at_a_time = connection, threading.Lock()

    def say(self, message: dict[str, Any], block: bytes = b"") -> None:
        """Send a message. Nothing happens when the other side has ended: the reader notices."""
        try:
            with self._one_at_a_time:
                self._connection.sendall(pack(message, block))
        except OSError:
            pass


class WorkerModel:
    """The model, its tokenizer and its engine; messages in, answers out."""

    def __init__(self, opening: dict[str, Any], speaker: Speaker) -> None:
        self._speaker = speaker
        self.loaded = open_backend(opening["path"], BackendOptions(**opening["options"]))
        if self.loaded.tokenizer is None:
            fix = "put the one that it was trained with beside the weights"
            raise WrongUse("this model has no tokenizer.json", where=self.loaded.input.path, fix=fix)
        self.tokenizer = Tokenizer.load(self.loaded.tokenizer)
        self._outputs = warm_up(self.loaded)
        self.engine = self._engine(opening["name"], opening["slots"])
        self._held: dict[int, list[list[Any]]] = {}  # parts of answers that are sent whole
        self._made_now: list[list[Any]] = []  # of this turn, sent as one message
        self._batch = 0
        self._grammars: Grammars | None = (
            None  # made when somebody asks: reading the vocabulary takes a second
        )

    def _engine(self, name: str, slots: int) -> CausalEngine | EncoderEngine:
        if self.loaded.causal is not None:
            vocab_size = self.tokenizer.vocab_size
            decode, turned = self.tokenizer.decode, self._turned
            return CausalEngine(name, self.loaded.causal, decode, turned, slots=slots, vocab_size=vocab_size)
        assert self.loaded.encoder is not None
        pad_id = self.tokenizer.pad_id or 0  # padding is masked: any id will do
        return EncoderEngine(name, self.loaded.encoder, self._turned, pad_id=pad_id)

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
            self.engine.cancel(set(message["jobs"]))
            return
        try:
            self._submit(message, np.frombuffer(block, np.int32).astype(np.int64))
        except Exception as error:
            self._speaker.say({"at": "error", "job": message["job"], "error": error_message(error)})

    def _submit(self, message: dict[str, Any], ids: np.ndarray) -> None:
        if isinstance(self.engine, EncoderEngine):
            text = Encoding(ids, np.array(message["ask"], np.int64), message["first_tokens"])
            self.engine.submit([Reading(message["job"], self._read, text=text, details=message)])
            return
        sampling = message["sampling"]
        bias = tuple((int(i), float(value)) for i, value in sampling["logit_bias"])
        request = Request(
            ids,
            message["max_tokens"],
            Sampling(**sampling | {"logit_bias": bias}),
            tuple(message["stop"]),
            self.tokenizer.eos_id,
            message["logprobs"],
            message["logprobs"] if message["prompt_logprobs"] else None,
            self._guide(message["constraint"]),
        )
        job = Generating(message["job"], self._made, request=request, whole=message["whole"])
        self.engine.submit([job])

    def _guide(self, constraint: dict[str, Any] | None) -> Guide | None:
        if constraint is None:
            return None
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
            return sorted(loaded.encoder.forward(ids, ids, ids == 0, ids))
    except ThroughlineError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise Failed("the model failed on its first input", where=loaded.input.path, why=why) from error
    return []


def main() -> None:
    """`python -m throughline.inference.worker FD`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
