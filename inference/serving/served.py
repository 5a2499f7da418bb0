"""A model as the HTTP process sees it: its tokenizer, what each endpoint asks of it, its processes.
Everything that a request gets wrong raises WrongUse before anything is queued.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from ...core.errors import Refused, ThroughlineError, WrongUse
from ...data.chat import ChatTemplate
from ...data.tokenizer import Tokenizer
from ...models.sentence import Sentence
from .accounts import ServerLimits, Watch
from .api_types import CompletionBody, Generation
from .channel import Made, Read, Work
from .encoding import TOKEN_CHARACTERS, Encoding, Outputs, Reader, check_ids, check_known
from .generation import Job, TextDelta, prompt_ids
from .remote import Answer, Remote

Prompt = str | list[int]
ANSWER_VALUES = 1 << 18  # log-probabilities of one answer, each some 100 bytes until it is sent
HEARTBEAT_S = 15.0  # below the patience of common proxies
CHATTING, TOKENISING = ["/v1/chat/completions", "/v1/responses"], ["/tokenize", "/detokenize"]
TOKEN_TEXTS = 1 << 16  # tokens whose text is remembered, some 4 MB

# Of several answers, each with its number; None: nothing has come for HEARTBEAT_S.
Deltas = AsyncGenerator[tuple[int, TextDelta | None], None]


class ServedModel:
    """One model."""

    def __init__(self, name: str, remotes: Sequence[Remote], limits: ServerLimits) -> None:
        self.name, self.remotes, self.limits = name, remotes, limits
        self.facts: dict[str, Any] = {}  # none while it loads for the first time
        self.failure: ThroughlineError | None = None  # why it could not be opened
        self.checkpoint: Path | None = None  # of a run that is watched
        self.users = 0  # requests that have picked it and may ask it something yet
        self.chat: ChatTemplate | None = None
        self.token_text = lru_cache(TOKEN_TEXTS)(lambda token_id: self.tokenizer.decode([token_id]))

    async def start(self, place: Path | None = None) -> None:
        """Start the processes, on what is at this place if one is given. Raises what opening the model raised."""
        for remote in self.remotes:
            remote.path = str(place or remote.path)
        facts, *others = await asyncio.gather(*(remote.open() for remote in self.remotes))
        facts["device"] = ", ".join([facts["device"], *(one["device"] for one in others)])
        path = Path(facts["tokenizer"])
        self.tokenizer = await asyncio.to_thread(Tokenizer.load, path)
        self.reader = Reader(self.tokenizer, facts["context"], facts["vocab_size"])
        self.facts, self.sentence = facts, Sentence(**facts["sentence"])
        try:
            self.chat = ChatTemplate.find(path.parent, self.tokenizer) if self.causal else None
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            raise Refused("the chat template cannot be read", where=path.parent, why=why) from error
        for remote in self.remotes:
            remote.watch()

    async def finished(self) -> None:
        while self.users or any(remote.waiting for remote in self.remotes):
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        await asyncio.gather(*(remote.close() for remote in self.remotes))

    @property
    def ready(self) -> bool:
        """Whether one of its processes takes work and has sent a heartbeat lately."""
        return any(remote.responsive for remote in self.remotes)

    def count(self, what: str) -> int:
        """`accepted`, `queued` or `active` of all processes."""
        return sum(getattr(remote, what) for remote in self.remotes)

    @property
    def cache_usage(self) -> float:
        """Share of the key-value caches that holds tokens."""
        return sum(remote.cache_usage for remote in self.remotes) / len(self.remotes)

    def free(self, answers: int) -> Remote:
        """The process with the least to do that takes so many answers more. Raises HTTPException 503 or 429."""
        if self.failure is not None:
            why = "; ".join(part for part in (self.failure.what, self.failure.why) if part)
            raise HTTPException(503, f"the model {self.name} could not be opened: {why}")
        refused = {remote: remote.refusal(answers) for remote in self.remotes}

        def burden(remote: Remote) -> tuple[bool, bool, int]:
            return refused[remote] is not None, not remote.responsive, remote.cost

        best = min(self.remotes, key=burden)
        if (refusal := refused[best]) is not None:
            raise refusal
        return best

    @property
    def causal(self) -> bool:
        return bool(self.facts) and not self.facts["outputs"]

    @property
    def endpoints(self) -> list[str]:
        if not self.facts:
            return []
        if self.causal:
            return ["/v1/completions", *(CHATTING if self.chat else []), *TOKENISING]
        found = ["/v1/embeddings", "/embed", "/v1/score", *TOKENISING]
        if self.tokenizer.mask_id is not None and "mlm_logits" in self.facts["outputs"]:
            found.append("/v1/fill-mask")
        if self.facts.get("classes"):
            found += ["/v1/classify", "/v1/rerank", "/rerank"]
        return found

    def describe(self) -> dict[str, Any]:
        mask = self.tokenizer.mask_id if self.facts else None
        described = {"id": self.name, "object": "model", "owned_by": "throughline", "created": 0}
        shown = (
            "family",
            "backend",
            "device",
            "dtype",
            "context",
            "vocab_size",
            "hash",
            "classes",
            "problem_type",
        )
        described |= {name: self.facts[name] for name in shown if self.facts.get(name)}
        return described | {
            "max_model_len": self.facts.get("context"),
            "endpoints": self.endpoints,
            "mask_token": None if mask is None else self.token_text(mask),
            "ready": self.ready,
            "status": self._status(),
            **({"checkpoint": self.checkpoint.name} if self.checkpoint else {}),
        }

    def _status(self) -> dict[str, str]:
        if self.failure is not None:
            return {"value": "failed", "error": self.failure.what}
        return {"value": "loaded" if self.facts else "loading"}

    # --- generating ---

    def job(self, body: Generation, ids: np.ndarray, max_tokens: int, logprobs: int | None) -> Job:
        """The `n` answers that a body wants for one prompt. Raises WrongUse."""
        echo = isinstance(body, CompletionBody) and body.echo
        limits = {"n": (body.n, self.limits.max_n), "max_tokens": (max_tokens, self.limits.max_tokens)}
        for name, (asked_for, most) in (limits | {"min_tokens": (body.min_tokens, max_tokens)}).items():
            if most is not None and asked_for > most:
                raise WrongUse(f"{name} is above its limit", where=name, why=f"{asked_for} > {most}")
        check_known([*map(int, body.logit_bias)], self.facts["vocab_size"], "logit_bias")
        check_known(body.stop_token_ids, self.facts["vocab_size"], "stop_token_ids")
        if (last := body.truncate_prompt_tokens) is not None:
            last = last if last >= 0 else max(0, self.facts["context"] - max_tokens)
            ids = ids[max(0, len(ids) - last) :]
        asked = (logprobs, logprobs if echo else None, body.constraint(), body.n, not body.stream)
        ends = (body.min_tokens, body.ignore_eos, tuple(body.stop_token_ids))
        job = Job(ids, max_tokens, body.sampling(), body.stops(), *asked, *ends)
        job.check(self.facts["context"])
        return job

    def completion(self, body: CompletionBody) -> list[Job]:
        self.limits.check_texts(len(body.prompt) * body.n, "prompt")
        ids = [self._prompt_ids(one, body.truncate_prompt_tokens is not None) for one in body.prompt]
        return [self.job(body, one, body.max_tokens, body.logprobs) for one in ids]

    def room(self, prompt_tokens: int) -> int:
        """New tokens that fit behind a prompt."""
        room = max(self.facts["context"] - prompt_tokens, 1)
        return room if self.limits.max_tokens is None else min(room, self.limits.max_tokens)

    def _prompt_ids(self, prompt: Prompt, cut: bool) -> np.ndarray:
        is_text = isinstance(prompt, str)
        if cut:
            prompt = prompt[-self.reader.context * (TOKEN_CHARACTERS if is_text else 1) :]
        given = self.reader.encode(prompt, "prompt", cut)
        if is_text:
            return np.asarray(given) if len(given) else prompt_ids(self.tokenizer, "")
        check_ids(given, self.facts["vocab_size"], "prompt")
        return np.array(given, np.int64)

    async def generate(self, jobs: Sequence[Job], watch: Watch) -> Deltas:
        """All answers as they come; leaving early gives the slots back. Raises WrongUse for too many logprobs."""
        values = 0
        for job in jobs if jobs[0].logprobs is not None else ():
            told = len(job.prompt_ids) * (job.prompt_logprobs is not None) + job.max_tokens * job.whole
            values += job.n * told * (2 + (job.logprobs or 0))
        if values > ANSWER_VALUES:
            what, why = "the answer would be too large", f"{values:,} numbers > {ANSWER_VALUES:,}"
            fix = "stream it, or ask for fewer answers or logprobs"
            raise WrongUse(what, where="logprobs", why=why, fix=fix)
        async with aclosing(self._answers(jobs, watch, sum(len(job.prompt_ids) for job in jobs))) as answers:
            async for number, made in answers:
                if made is None:
                    yield number, None
                    continue
                assert isinstance(made, Made)
                for delta in made.deltas:
                    watch.token(number, delta.at_s, made.began_s, made.batch, delta.token is not None)
                    if number % jobs[0].n == 0:  # copies of an answer find its prompt read
                        watch.cached += delta.cached_tokens or 0
                    yield number, delta
        watch.finished()

    # --- reading ---

    def frames(
        self, texts: Sequence[Prompt], want: str, truncate: bool = False, prompt: str | None = None
    ) -> list[Encoding]:
        """Texts with special tokens, of which this output is wanted. Raises WrongUse."""
        framed = self.sentence.prompted(prompt, named=True).text if want.endswith("_embedding") else str
        texts = [framed(text) if isinstance(text, str) else text for text in texts]
        return [self.reader.frame({"input": text}, truncate, want=(want,)) for text in texts]

    async def read(self, texts: Sequence[Encoding], watch: Watch) -> list[Outputs]:
        """What the encoder says of each text: the named outputs, or for masks the best tokens."""
        found: dict[int, Outputs] = {}
        async with aclosing(self._answers(texts, watch, sum(len(text.ids) for text in texts))) as answers:
            async for number, read in answers:
                if read is None:
                    continue
                assert isinstance(read, Read)
                watch.began(read.began_s, read.batch)
                watch.of(watch.telemetry.compute).observe(read.ended_s - read.began_s)
                found[number] = read.arrays
        return [found[number] for number in range(len(texts))]

    async def _answers(
        self, work: Sequence[Work], watch: Watch, tokens: int
    ) -> AsyncGenerator[tuple[int, Answer | None], None]:
        """What the process says of each answer, until all are there; closing this gives the others up."""
        come = asyncio.Queue[tuple[int, Answer]]()
        remote = self.free(answers := sum(one.n for one in work))
        watch.key.take(answers)
        numbers = range(0)
        left = answers
        try:
            tenant = "" if self.limits.share_prefixes else watch.key.digest.hex()
            numbers = remote.submit(work, come.put_nowait, watch.key.priority, tenant)
            watch.prompt_tokens = (watch.prompt_tokens or 0) + tokens
            watch.of(watch.telemetry.prompt_tokens).inc(tokens)
            while left:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        number, answer = await come.get()
                except TimeoutError:
                    yield 0, None
                    continue
                if isinstance(answer, ThroughlineError):
                    raise answer
                left -= isinstance(answer, Read) or answer.deltas[-1].finish is not None
                yield number, answer
        finally:
            watch.key.held -= answers
            if left:
                watch.of(watch.telemetry.gone).inc(left)
                remote.cancel(numbers)
