"""A model as the server sees it: its tokenizer, its engine, and what each endpoint asks of it. No HTTP here.

Everything that a request gets wrong raises WrongUse before anything is queued.
"""

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import Failed, WrongUse
from ..data.tokenizer import Tokenizer
from .api_types import CompletionBody, EmbeddingBody, FillMaskBody
from .backends import Loaded, open_backend
from .encoding import Encoding, check_ids, fill, frame, mask_text, unit
from .generation import Piece, Request
from .sampling import Sampling
from .scheduler import CausalEngine, EncoderEngine, Generating

Prompt = str | list[int]
Pieces = AsyncGenerator[tuple[int, Piece], None]  # of several answers, each with its request's number


@dataclass(frozen=True)
class Limits:
    """What a server holds at once. Beyond `queue` waiting jobs a request is answered with 429."""

    slots: int = 8
    queue: int = 256
    body_bytes: int = 4_000_000


class ServedModel:
    """A loaded model with its engine; `ready` once it has answered a first time."""

    def __init__(self, name: str, loaded: Loaded, limits: Limits) -> None:
        if loaded.tokenizer is None:
            raise WrongUse(
                "this model has no tokenizer.json", where=loaded.input.path, fix="put one beside the weights"
            )
        self.name, self.loaded, self.limits = name, loaded, limits
        self.tokenizer = Tokenizer.load(loaded.tokenizer)
        self.ready = False
        self.causal: CausalEngine | None = None
        self.encoder: EncoderEngine | None = None
        if loaded.causal is not None:
            self.causal = CausalEngine(
                name, loaded.causal, self._decode, slots=limits.slots, queue_limit=limits.queue,
                vocab_size=self.tokenizer.vocab_size,
            )  # fmt: skip
        elif loaded.encoder is not None:
            pad_id = self.tokenizer.pad_id or 0  # padding is masked: any id will do
            self.encoder = EncoderEngine(name, loaded.encoder, pad_id=pad_id, queue_limit=limits.queue)

    @property
    def engine(self) -> CausalEngine | EncoderEngine:
        engine = self.causal or self.encoder
        assert engine is not None
        return engine

    def start(self) -> None:
        """Warm up and begin to answer."""
        if self.loaded.causal is not None:
            cache = self.loaded.causal.new_cache(1)
            self.loaded.causal.forward(
                np.zeros((1, 2), np.int64), np.zeros(1, np.int64), np.zeros((1, 1), np.int64), cache
            )
        elif self.loaded.encoder is not None:
            ids = np.zeros((1, 2), np.int64)
            self.loaded.encoder.forward(ids, ids, ids == 0, ids)
        self.engine.start()
        self.ready = True

    def describe(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        endpoints = ["/v1/completions"] if self.causal else ["/v1/embeddings", "/v1/fill-mask"]
        backend = self.loaded.causal or self.loaded.encoder
        assert backend is not None
        mask = self.tokenizer.mask_id
        return {
            "id": self.name, "object": "model", "owned_by": "throughline", "created": 0, "family": self.loaded.family,
            "backend": backend.name, "context": backend.context, "endpoints": endpoints,
            "mask_token": None if mask is None else self._decode([mask]), "hash": self.loaded.input.hash,
        }  # fmt: skip

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def token_text(self, token_id: int) -> str:
        """One token as text, for logprobs and the token view."""
        return self._decode([token_id])

    # --- completions ---

    def jobs(self, body: CompletionBody) -> tuple[list[Request], list[str]]:
        """The requests of a completion body, prompts times `n`, and the prompt text of each."""
        requests, texts = [], []
        prompts = _as_list(body.prompt)
        _check_count(len(prompts) * body.n, self.limits.queue, "prompt")
        for prompt in prompts:
            ids = self._prompt_ids(prompt)
            text = prompt if isinstance(prompt, str) else self._decode(prompt)
            for number in range(body.n):
                seed = None if body.seed is None else body.seed + number
                sampling = Sampling(
                    body.temperature, body.top_k, body.top_p, body.min_p, body.repetition_penalty, seed
                )
                requests.append(
                    Request(
                        ids, body.max_tokens, sampling, body.stops(), self.tokenizer.eos_id, body.logprobs
                    )
                )
                texts.append(text)
        return requests, texts

    async def generate(self, requests: list[Request], whole: bool = False) -> Pieces:
        """Pieces of all answers as they come, as (request number, piece). Leaving the loop early gives the slots back.

        `whole`: nobody looks at the pieces before an answer is complete, so they come then; waking this thread for every
        token costs more than a small model's decode step.
        """
        assert self.causal is not None
        loop, sent = asyncio.get_running_loop(), asyncio.Queue[tuple[int, list[Piece] | Failed]]()

        def teller(number: int) -> Callable[[Piece | Failed], None]:
            held: list[Piece] = []

            def tell(piece: Piece | Failed) -> None:
                nonlocal held
                if isinstance(piece, Failed):
                    _send(loop, sent.put_nowait, (number, piece))
                    return
                held.append(piece)
                if piece.finish or not whole:
                    _send(loop, sent.put_nowait, (number, held))
                    held = []

            return tell

        jobs = [Generating(request, teller(number)) for number, request in enumerate(requests)]
        self.causal.submit(jobs)
        unfinished = len(jobs)
        try:
            while unfinished:
                number, pieces = await sent.get()
                if isinstance(pieces, Failed):
                    raise pieces
                for piece in pieces:
                    unfinished -= piece.finish is not None
                    yield number, piece
        finally:
            if unfinished:
                for job in jobs:
                    job.cancel()

    def _prompt_ids(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            eos_id = self.tokenizer.eos_id
            # Nothing to continue: the model begins a document, as it does after an end-of-text token.
            return np.array([eos_id]) if len(ids) == 0 and eos_id is not None else ids
        check_ids(prompt, self.loaded.config.vocab_size, "prompt")
        return np.array(prompt, np.int64)

    # --- encoder endpoints ---

    async def embed(self, body: EmbeddingBody) -> tuple[list[list[float] | str], int]:
        """An embedding per input, of length 1, as numbers or base64 (float32, little end first), and the tokens read."""
        prompts = _as_list(body.input)
        _check_count(len(prompts), self.limits.queue, "input")
        rows = await asyncio.to_thread(
            lambda: [frame(self.tokenizer, prompt, *self._sizes) for prompt in prompts]
        )
        answers = await self._encode([Encoding(row) for row in rows])
        vectors = [unit(answer["sentence_embedding"]) for answer in answers]
        if body.encoding_format == "base64":
            return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors], sum(
                map(len, rows)
            )
        return [vector.tolist() for vector in vectors], sum(map(len, rows))

    async def fill_mask(self, body: FillMaskBody) -> tuple[dict[str, Any], int]:
        """For every mask in the text its most probable tokens, the text with the best ones, and the tokens read."""
        text = await asyncio.to_thread(mask_text, self.tokenizer, body.input, *self._sizes)
        (answer,) = await self._encode([text])
        return fill(self.tokenizer, text, answer["mlm_logits"], body.top_k), len(text.ids)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.loaded.config.sequence_length, self.loaded.config.vocab_size

    async def _encode(self, texts: list[Encoding]) -> list[dict[str, np.ndarray]]:
        assert self.encoder is not None
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in texts]

        def teller(future: asyncio.Future):
            return lambda answer: _send(loop, _settle, future, answer)

        self.encoder.submit([replace(text, tell=teller(future)) for text, future in zip(texts, futures)])
        return await asyncio.gather(*futures)


def _send(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in the event loop, from an engine's thread."""
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to tell
        loop.call_soon_threadsafe(function, *arguments)


def _settle(future: asyncio.Future, answer: dict[str, np.ndarray] | Failed) -> None:
    if future.done():  # the client went away
        return
    if isinstance(answer, Failed):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _as_list(texts: Any) -> list[Prompt]:
    """One text, one list of ids, or several of either: always a list of prompts."""
    single = isinstance(texts, str) or isinstance(texts[0], int)
    return [texts] if single else texts


def _check_count(count: int, limit: int, where: str) -> None:
    if count > limit:
        raise WrongUse(
            "too many texts in one request", where=where, why=f"{count} > {limit}", fix="send them in parts"
        )


def load_served(specs: Sequence[str], limits: Limits, threads: int | None = None) -> list[ServedModel]:
    """Models by `PATH` or `NAME=PATH`; a path's name is its last part. Raises WrongUse for a name given twice."""
    models: dict[str, ServedModel] = {}
    for spec in specs:
        name, equals, path = spec.partition("=")
        if not equals or Path(spec).exists():
            path, name = spec, Path(spec).resolve().name
        if not (name and path):
            raise WrongUse("a model needs a name and a path", where=spec, fix="give NAME=PATH, or PATH alone")
        if name in models:
            raise WrongUse(f"two models are called {name!r}", where=path, fix="give names: NAME=PATH")
        models[name] = ServedModel(name, open_backend(path, threads), limits)
    return list(models.values())
