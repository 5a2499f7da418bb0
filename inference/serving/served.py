"""A model as the HTTP process sees it: its tokenizer, what each endpoint asks of it, its processes.
Everything that a request gets wrong raises WrongUse before anything is queued.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from ...core.console import warn
from ...core.errors import ThroughlineError, WrongUse
from ...data.chat import ChatTemplate, Turn
from ...data.model_settings import end_ids, sampling_defaults
from ...data.tokenizer import Tokenizer
from ...models.sentence import Sentence
from ..runtimes.sampling import Sampling
from .accounts import ServerLimits, Watch, check_texts
from .api_types import ChatBody, CompletionBody, Conversation, Generation
from .channel import Made, Read, Work
from .encoding import TOKEN_CHARACTERS, Encoding, Outputs, Reader, check_ids, check_known, longer, named_texts
from .generation import Job, TextDelta
from .remote import Answer, Remote

Prompt = str | list[int]
ANSWER_VALUES = 1 << 18  # log-probabilities of one answer, each some 100 bytes until it is sent
HEARTBEAT_S = 15.0  # below the patience of common proxies
CHATTING, TOKENISING = ["/v1/chat/completions", "/v1/responses"], ["/tokenize", "/detokenize"]

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
        self.chat_fault = ""  # why it has none, where its template cannot be used
        self.end_ids: tuple[int, ...] = ()  # of a text
        self.sampling: dict[str, Any] = {}  # what its requests need not say

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
        if self.causal:
            self._read_settings(path.parent)
        for remote in self.remotes:
            remote.watch()

    def _read_settings(self, directory: Path) -> None:
        """Read what the model's directory says of its answers. A chat template that cannot be used costs the model its
        chat endpoints alone.
        """
        self.end_ids = end_ids(directory, self.tokenizer)
        self.chat, fault = ChatTemplate.find_usable(directory, self.tokenizer)
        self.chat_fault = "; ".join(line.strip() for line in fault.splitlines())
        if self.chat_fault:
            warn(f"{self.name} is served without chats: {self.chat_fault}")
        if not self.limits.generation_config:
            return
        try:
            defaults: dict[str, Any] = dict(sampling_defaults(directory))
            if "top_k" in defaults:
                defaults["top_k"] = max(0, int(defaults["top_k"]))
            Sampling(**defaults)  # refuses values that are out of range
            self.sampling = defaults
        except ThroughlineError as error:
            warn(
                f"{self.name} is served without the sampling defaults of its generation_config.json: {error}"
            )

    def ends_of(self, job: Job) -> frozenset[int]:
        """The ids that end an answer and are no part of its text."""
        ends = frozenset(job.stop_ids)
        return ends if job.ignore_eos else ends | frozenset(self.end_ids)

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

    def free(self, places: float) -> Remote:
        """The process with the least to do that has so many places left. Raises HTTPException 503 or 429."""
        if self.failure is not None:
            why = "; ".join(part for part in (self.failure.what, self.failure.why) if part)
            raise HTTPException(503, f"the model {self.name} could not be opened: {why}")
        refused = {remote: remote.refusal(places) for remote in self.remotes}

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
            "mask_token": None if mask is None else self.tokenizer.decode([mask]),
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
        asked = (logprobs, logprobs if echo else None, body.constraint(), body.n, not body.stream)
        ends = (body.min_tokens, body.ignore_eos, tuple(body.stop_token_ids))
        sampling = body.sampling(self.sampling)
        job = Job(ids, max_tokens, sampling, body.stops(), *asked, *ends, body.skip_special_tokens)
        job.check(self.facts["context"])
        return job

    def completion(self, body: CompletionBody) -> list[Job]:
        check_texts(len(body.prompt) * body.n, "prompt", self.limits.queue)
        prompts = named_texts("prompt", body.prompt)
        ids = [self._prompt_ids(prompt, where, body) for where, prompt in prompts.items()]
        return [self.job(body, one, body.most_tokens(), body.logprobs) for one in ids]

    def conversation(
        self, body: Conversation, turns: Sequence[Turn], variables: dict[str, Any], max_tokens: int | None
    ) -> Job:
        """The job of answering a conversation with at most so many tokens (None: what fits). Raises WrongUse."""
        assert self.chat is not None
        ids = self.chat.ids(turns, **variables)
        if body.add_special_tokens:
            ids = np.array(self.tokenizer.framed(ids.tolist()), np.int64)
        if not body.ignore_eos:
            # a file may name ends that the model has no embedding for
            known = [i for i in self.chat.end_ids if i < self.facts["vocab_size"]]
            body.stop_token_ids = [*body.stop_token_ids, *known]
        if body.truncate_prompt_tokens is not None:
            ids = self._kept(ids, body.truncate_prompt_tokens, max_tokens or 1)
        logprobs = None
        if isinstance(body, ChatBody) and body.logprobs:
            logprobs = body.top_logprobs or 0
        return self.job(body, ids, max_tokens or self.room(len(ids)), logprobs)

    def room(self, prompt_tokens: int) -> int:
        """New tokens that fit behind a prompt."""
        room = max(self.facts["context"] - prompt_tokens, 1)
        return room if self.limits.max_tokens is None else min(room, self.limits.max_tokens)

    def _prompt_ids(self, prompt: Prompt, where: str, body: CompletionBody) -> np.ndarray:
        """The ids of a prompt: of a text with those that its tokenizer puts around it, of ids those alone."""
        context, last = self.facts["context"], body.truncate_prompt_tokens
        if not isinstance(prompt, str):
            check_ids(prompt, self.facts["vocab_size"], where)
            ids, first = np.array(prompt, np.int64), 0
        else:
            if last is None:
                self.reader.check_characters(len(prompt), where)
            text = prompt[-TOKEN_CHARACTERS * context :]
            ids = self.tokenizer.encode_prompt(text, body.add_special_tokens)
            first = len(self.tokenizer.framing[0]) if body.add_special_tokens else 0
        if last is not None:
            return self._kept(ids, last, body.most_tokens(), first)
        if len(ids) > context:
            raise longer(f"{len(ids)} tokens > {context}", where)
        return ids

    def _kept(self, ids: np.ndarray, last: int, max_tokens: int, first: int = 0) -> np.ndarray:
        """The last ids of a prompt (-1: what the context leaves) behind those that begin every prompt."""
        if last < 0:
            last = max(0, self.facts["context"] - max_tokens)
        if len(ids) <= last:
            return ids
        first = min(first, last)
        return np.concatenate((ids[:first], ids[len(ids) - last + first :]))

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
        self,
        texts: Mapping[str, Prompt],
        want: str,
        truncate: bool = False,
        prompt: str | None = None,
    ) -> list[Encoding]:
        """Texts, by the names that errors give them, with special tokens; this output is wanted. Raises WrongUse."""
        sentence = self.sentence.prompted(prompt, named=True)
        framed = []
        for where, text in texts.items():
            if isinstance(text, str) and want.endswith("_embedding"):
                text = sentence.text(text)
            framed.append(self.reader.frame({where: text}, truncate, want=(want,)))
        return framed

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
        places = math.ceil(sum(one.places * one.n for one in work))
        remote = self.free(places)
        watch.key.take(places)
        numbers = range(0)
        left = sum(one.n for one in work)
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
            watch.key.held -= places
            if left:
                watch.of(watch.telemetry.gone).inc(left)
                remote.cancel(numbers)
