"""A model as the HTTP process sees it: its tokenizer, what each endpoint asks of it, and its process. No HTTP
here.

Everything that a request gets wrong raises WrongUse before anything is queued.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from ...core.backend import BackendOptions
from ...core.errors import ThroughlineError, WrongUse
from ...data.tokenizer import Tokenizer
from ..runtimes.source import no_model
from .api_types import CompletionBody, Generation
from .chat import ChatTemplate
from .encoding import check_ids, frame
from .generation import TextDelta, Token, check_length
from .remote import Answer, Made, Read, Remote
from .telemetry import Telemetry, Watch

Prompt = str | list[int]
TOKEN_TEXTS = 1 << 16  # tokens whose text is remembered, some 4 MB


@dataclass(frozen=True)
class Limits:
    """What a server holds at once, and how long. Beyond `queue` waiting jobs a request is answered with 429."""

    slots: int = 8
    queue: int = 256
    body_bytes: int = 4_000_000
    max_tokens: int | None = None  # generated per answer; None = what fits the context
    max_n: int = 128
    request_s: float = 600.0  # from the first byte of a body to the last of the answer
    body_s: float = 30.0  # for the client to send its body


@dataclass(frozen=True)
class Asked:
    """One answer to generate."""

    prompt_ids: np.ndarray
    prompt: str
    max_tokens: int
    sampling: dict[str, Any]
    stop: tuple[str, ...]
    logprobs: int | None
    prompt_logprobs: bool = False
    constraint: dict[str, Any] | None = None


Deltas = AsyncGenerator[tuple[int, TextDelta], None]  # of several answers, each with its number


class ServedModel:
    """One model; `ready` while its process answers."""

    def __init__(self, name: str, remote: Remote, limits: Limits, telemetry: Telemetry) -> None:
        self.name, self.remote, self.limits = name, remote, limits
        self.telemetry = telemetry
        self._tokenizer: Tokenizer | None = None
        self.chat: ChatTemplate | None = None
        self.token_text = lru_cache(TOKEN_TEXTS)(lambda token_id: self.tokenizer.decode([token_id]))

    async def start(self) -> None:
        """Start the process and read the tokenizer. Raises what opening the model raised."""
        await self.remote.start()
        path = Path(self.facts["tokenizer"])
        self._tokenizer = await asyncio.to_thread(Tokenizer.load, path)
        self.chat = ChatTemplate.find(path.parent, self._tokenizer) if self.causal else None

    @property
    def facts(self) -> dict[str, Any]:
        return self.remote.facts

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self.remote.check_room(0)  # says that the model is loading
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def ready(self) -> bool:
        return self.remote.ready and self._tokenizer is not None

    @property
    def causal(self) -> bool:
        return self.facts.get("family") == "gpt"

    @property
    def endpoints(self) -> list[str]:
        """What this model answers; nothing while it loads for the first time."""
        if not self.facts:
            return []
        if self.causal:
            return ["/v1/completions", *(["/v1/chat/completions"] if self.chat else [])]
        found = ["/v1/embeddings"]
        masks = self._tokenizer is not None and self._tokenizer.mask_id is not None
        if masks and "mlm_logits" in self.facts["outputs"]:
            found.append("/v1/fill-mask")
        if self.facts.get("classes"):
            found += ["/v1/classify", "/v1/rerank"]
        return found

    def describe(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        mask = self._tokenizer.mask_id if self._tokenizer else None
        described = {"id": self.name, "object": "model", "owned_by": "throughline", "created": 0}
        shown = ("family", "backend", "device", "dtype", "context", "vocab_size", "hash", "classes")
        described |= {name: self.facts[name] for name in shown if self.facts.get(name)}
        return described | {
            "max_model_len": self.facts.get("context"),
            "endpoints": self.endpoints,
            "mask_token": None if mask is None else self.token_text(mask),
            "ready": self.ready,
        }

    # --- generating ---

    def asked(
        self, body: Generation, prompt: Prompt, ids: np.ndarray, max_tokens: int, logprobs: int | None
    ) -> list[Asked]:
        """The `n` answers that a body wants for one prompt. Raises WrongUse."""
        echo = isinstance(body, CompletionBody) and body.echo
        self._check_size(ids, max_tokens, body.n, echo)
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt) if echo else ""
        answers = []
        for number in range(body.n):
            sampling = {
                "temperature": body.temperature,
                "top_k": body.top_k,
                "top_p": body.top_p,
                "min_p": body.min_p,
                "repetition_penalty": body.repetition_penalty,
                "seed": None if body.seed is None else body.seed + number,
                "frequency_penalty": body.frequency_penalty,
                "presence_penalty": body.presence_penalty,
                "logit_bias": [[int(i), bias] for i, bias in body.logit_bias.items()],
            }
            answers.append(
                Asked(
                    ids,
                    text,
                    max_tokens,
                    sampling,
                    body.stops(),
                    logprobs,
                    echo and logprobs is not None,
                    body.constraint(),
                )
            )
        return answers

    def completion(self, body: CompletionBody) -> list[Asked]:
        """The answers that a completion body wants: prompts times `n`."""
        prompts = as_list(body.prompt)
        self.check_count(len(prompts) * body.n, "prompt")
        return [
            asked
            for prompt in prompts
            for asked in self.asked(body, prompt, self._prompt_ids(prompt), body.max_tokens, body.logprobs)
        ]

    def check_count(self, count: int, where: str) -> None:
        """Refuse more texts in one request than the queue holds."""
        if count > self.limits.queue:
            why = f"{count} > {self.limits.queue}"
            raise WrongUse("too many texts in one request", where=where, why=why, fix="send them in parts")

    def room(self, prompt_tokens: int) -> int:
        """New tokens that fit behind a prompt."""
        room = max(self.facts["context"] - prompt_tokens, 1)
        return room if self.limits.max_tokens is None else min(room, self.limits.max_tokens)

    def _check_size(self, ids: np.ndarray, max_tokens: int, n: int, echo: bool) -> None:
        if len(ids) == 0:
            raise WrongUse("the prompt is empty", where="prompt", fix="give at least one token of text")
        if max_tokens == 0 and not echo:
            raise WrongUse("max_tokens is 0", where="max_tokens", fix="ask for a token, or for echo")
        if n > self.limits.max_n:
            raise WrongUse("n is above this server's limit", where="n", why=f"{n} > {self.limits.max_n}")
        most = self.limits.max_tokens
        if most is not None and max_tokens > most:
            why = f"{max_tokens} > {most}"
            raise WrongUse("max_tokens is above this server's limit", where="max_tokens", why=why)
        check_length(len(ids), max_tokens, self.facts["context"])

    def _prompt_ids(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            eos_id = self.tokenizer.eos_id
            # Nothing to continue: the model begins a document, as it does after an end-of-text token.
            return np.array([eos_id]) if len(ids) == 0 and eos_id is not None else ids
        check_ids(prompt, self.facts["vocab_size"], "prompt")
        return np.array(prompt, np.int64)

    async def generate(self, answers: list[Asked], watch: Watch, whole: bool = False) -> Deltas:
        """Deltas of all answers as they come, as (number, delta). Leaving the loop early gives the slots
        back. `whole`: nobody looks at the deltas before an answer is complete, so they come then.
        """
        sent = asyncio.Queue[tuple[int, Answer]]()
        jobs = []
        for number, asked in enumerate(answers):
            message = {
                "do": "generate",
                "max_tokens": asked.max_tokens,
                "sampling": asked.sampling,
                "stop": asked.stop,
                "logprobs": asked.logprobs,
                "prompt_logprobs": asked.prompt_logprobs,
                "constraint": asked.constraint,
                "whole": whole,
            }
            jobs.append((message, asked.prompt_ids, _put(sent, number)))
        numbers = self.remote.submit(jobs)
        watch.submitted(prompt_tokens(answers))
        unfinished = len(jobs)
        try:
            while unfinished:
                number, answer = await sent.get()
                if isinstance(answer, ThroughlineError):
                    raise answer
                assert isinstance(answer, Made)
                for text, token, finish, at_s, prompt, cached in answer.deltas:
                    watch.token(number, at_s, answer.began_s, answer.batch, token is not None)
                    watch.cached += cached or 0
                    unfinished -= finish is not None
                    prompted = tuple(filter(None, map(_token, prompt or ())))
                    yield number, TextDelta(text, _token(token), finish, prompted, cached)
        finally:
            if unfinished:
                watch.cancelled(unfinished)
                self.remote.cancel(numbers)

    # --- reading ---

    def frames(self, texts: Sequence[Prompt], where: str = "input") -> list[np.ndarray]:
        """The ids of texts with special tokens. Raises WrongUse."""
        self.check_count(len(texts), where)
        return [frame(self.tokenizer, text, *self.sizes, where) for text in texts]

    @property
    def sizes(self) -> tuple[int, int]:
        return self.facts["context"], self.facts["vocab_size"]

    async def read(
        self,
        rows: Sequence[np.ndarray],
        watch: Watch,
        want: Sequence[str],
        firsts: Sequence[int] | None = None,
        **details: Any,
    ) -> list[dict[str, np.ndarray]]:
        """What the encoder says of each row of ids: the named outputs, or for masks the best tokens.

        `firsts`: how many ids of each row belong to the first of its two texts.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Read]] = [loop.create_future() for _ in rows]
        message = {"do": "read", "want": list(want), "ask": []} | details
        numbers = self.remote.submit(
            [
                (message | {"first_tokens": first}, row, _settle(future))
                for row, future, first in zip(rows, futures, firsts or repeat(None))
            ]
        )
        watch.submitted(sum(map(len, rows)))
        try:
            answers = [await future for future in futures]
        finally:
            if left := [number for number, future in zip(numbers, futures) if not future.done()]:
                watch.cancelled(len(left))
                self.remote.cancel(left)
            for future in futures:
                if future.done() and not future.cancelled():
                    future.exception()  # read: the first one is told, the others are the same
        for answer in answers:
            watch.read(answer.began_s, answer.ended_s, answer.batch)
        return [answer.arrays for answer in answers]


def prompt_tokens(answers: Sequence[Asked]) -> int:
    """Tokens of the prompts; the `n` answers to one prompt share it."""
    return sum({id(asked.prompt_ids): len(asked.prompt_ids) for asked in answers}.values())


def as_list(texts: Any) -> list[Prompt]:
    """One text, one list of ids, or several of either: always a list of prompts."""
    single = isinstance(texts, str) or isinstance(texts[0], int)
    return [texts] if single else texts


def _token(token: list[Any] | None) -> Token | None:
    return None if token is None else Token(token[0], token[1], tuple((i, value) for i, value in token[2]))


def _put(queue: "asyncio.Queue[tuple[int, Answer]]", number: int) -> "Callable[[Answer], None]":
    return lambda answer: queue.put_nowait((number, answer))


def _settle(future: "asyncio.Future[Read]") -> "Callable[[Answer], None]":
    def settle(answer: Answer) -> None:
        if future.done():  # the client went away
            return
        if isinstance(answer, ThroughlineError):
            future.set_exception(answer)
        else:
            assert isinstance(answer, Read)
            future.set_result(answer)

    return settle


def served_models(
    specs: Sequence[str], limits: Limits, options: BackendOptions, telemetry: Telemetry
) -> list[ServedModel]:
    """Models by `PATH` or `NAME=PATH`; a path's name is its last part. Raises WrongUse for a name given
    twice and for a path that does not exist.
    """
    models: dict[str, ServedModel] = {}
    for spec in specs:
        name, equals, path = spec.partition("=")
        if not equals or Path(spec).exists():
            path, name = spec, Path(spec).resolve().name
        if not (name and path):
            raise WrongUse("a model needs a name and a path", where=spec, fix="give NAME=PATH, or PATH alone")
        if name in models:
            raise WrongUse(f"two models are called {name!r}", where=path, fix="give names: NAME=PATH")
        if not Path(path).exists():
            raise no_model(Path(path))
        remote = Remote(name, path, options, slots=limits.slots, queue=limits.queue)
        models[name] = ServedModel(name, remote, limits, telemetry)
    return list(models.values())
