"""Jobs of making text, as they come from an HTTP body, a file or a task, and each on its way: the tokens and the text
that it has made, what may come next, and guesses at it. The batch in which they take turns is `slots`.

A guess is kept where the model itself chooses that token, drawn or most probable: the rule of Leviathan et al. (2023,
section 2.3) for a proposal that is certain. So guesses change no answer, nor what a seed gives.
"""

import json
import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ...core.backend import CausalBackend, Span
from ...core.errors import WrongUse, extra
from ...data.text_stream import TextStream
from ...data.tokenizer import Tokenizer
from ..runtimes.sampling import GREEDY, SEEDS, Chooser, Sampling

NO_IDS = np.zeros(0, np.int64)  # of a job whose prompt is to come
ENDS = (4, 3, 2)  # tokens that must have come before for a guess by what followed
GRAMMARS = 32  # that are remembered


class Job(msgspec.Struct, frozen=True, eq=False, tag="generate"):
    """Answers to make to one prompt: all that anybody says of them, from the HTTP body to the slots."""

    prompt_ids: np.ndarray  # (S,), at least one token
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    # Also the k most probable tokens of every step; None = no probabilities at all.
    logprobs: int | None = None
    # The same of the prompt, which is then read anew (no prefix is reused); with it `max_tokens` may be 0.
    prompt_logprobs: int | None = None
    constraint: str | None = None  # JSON: {"json": schema} or {"regex": expression}
    n: int = 1  # answers, whose seeds are one apart
    whole: bool = False  # nobody looks at an answer before it is complete
    min_tokens: int = 0  # before them no token and no stop string ends an answer
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()  # tokens that end an answer besides the model's end tokens
    skip_special_tokens: bool = True  # they are no part of the text

    def each(self) -> list["Job"]:
        seed = self.sampling.seed
        seeds = [None if seed is None else (seed + copy) % SEEDS for copy in range(self.n)]
        return [replace(self, n=1, sampling=replace(self.sampling, seed=seed)) for seed in seeds]

    @property
    def cost(self) -> int:
        """Tokens that an answer reads and makes at most."""
        return len(self.prompt_ids) + self.max_tokens

    @property
    def places(self) -> float:
        """Places of the queue that each of its answers takes."""
        return 1.0

    @property
    def plain(self) -> bool:
        """Whether the choice of a token depends on those before it only through the model."""
        return not self.sampling.counts_tokens and self.logprobs is None and self.constraint is None

    def check(self, context: int) -> None:
        """Refuse a job that is empty or longer than the model's context."""
        prompt, room = len(self.prompt_ids), context - len(self.prompt_ids)
        if prompt == 0:
            raise WrongUse("the prompt is empty", where="prompt", fix="give at least one token of text")
        if self.max_tokens < (self.prompt_logprobs is None):
            fix = "ask for a token, or for echo with logprobs"
            raise WrongUse(f"max_tokens is {self.max_tokens}", where="max_tokens", fix=fix)
        if self.max_tokens > room:
            fix = f"ask for at most {room} tokens or shorten the prompt" if room > 0 else "shorten the prompt"
            why = f"{prompt} prompt tokens + {self.max_tokens} new ones > {context}"
            what = "the request is longer than the model's context"
            raise WrongUse(what, where="max_tokens", why=why, fix=fix)


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A token; probabilities are those of the model, before temperature and filters."""

    id: int
    logprob: float | None = None  # None where nobody asked, and for the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()


class TextDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to an answer: the token and the text that became certain (both may be missing)."""

    text: str
    token: Token | None
    finish: str | None = None  # "stop" (end token or stop string) or "length"; None = more to come
    prompt: tuple[Token, ...] | None = None  # in the first delta, when `prompt_logprobs` was asked for
    cached_tokens: int | None = None  # in the first delta: tokens of the prompt that were reused
    at_s: float = msgspec.field(default_factory=time.monotonic)


@dataclass(eq=False)
class Sequence:
    """A job of one answer on its way: its tokens so far and its row in the cache."""

    job: Job
    stream: TextStream
    guide: "Guide | None" = None
    making: "Future[Guide] | None" = None  # what its guide is copied from when it gets its row
    ends: frozenset[int] = frozenset()  # tokens that end it
    chooser: Chooser | None = None  # made with its row: penalties take memory of the vocabulary's size
    due_s: float = 0.0  # who is due earlier gets a row earlier
    tenant: str = ""  # whose prompts it may begin with
    owner: Any = None  # whoever submitted it may note something here
    untold: list[TextDelta] = field(default_factory=list)  # and keep what he sends later here
    past: int = 0  # tokens in the cache
    reused: int = 0  # of them, those that were copied
    made: list[int] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)  # with probabilities, when they are asked for
    began_s: float = 0.0  # time.monotonic() when it got its row
    reach: int = 0  # tokens that are guessed ahead at most: more after a good guess, none if it is not plain
    guesses: list[int] = field(default_factory=list)  # of this step, behind its newest token
    drafted: int = 0  # tokens in the cache of a draft model

    @property
    def ready(self) -> bool:
        """Whether it may begin."""
        return self.making is None or self.making.done()

    @property
    def filling(self) -> bool:
        """Whether some of its prompt is still to be read."""
        return self.past < len(self.job.prompt_ids)

    def known(self) -> np.ndarray:
        """Its ids so far, of the prompt and the answer."""
        return np.concatenate((self.job.prompt_ids, np.array(self.made, np.int64)))

    def held(self) -> np.ndarray:
        """Those of them that its cache row holds."""
        return self.known()[: self.past]

    def accept(self, token: Token) -> TextDelta:
        """Add a token and say what it means for the answer; with the first one also what is known of the prompt."""
        if self.made:
            return self._add(token)
        delta = TextDelta("", None, "length") if self.job.max_tokens == 0 else self._add(token)
        prompt, self.prompt = tuple(self.prompt), []
        told = None if self.job.prompt_logprobs is None else prompt
        return TextDelta(delta.text, delta.token, delta.finish, told, self.reused)

    def _add(self, token: Token) -> TextDelta:
        assert self.chooser is not None
        if token.id in self.ends:
            return TextDelta(self.stream.finish(), token, "stop")
        self.made.append(token.id)
        self.chooser.accept(token.id)
        complete = self.guide is not None and self.guide.accept(token.id)
        # The token that completes a stop string is no part of the answer, as one that ends it is none.
        text = self.stream.push(token.id, len(self.made) > self.job.min_tokens)
        if not self.stream.stopped and (complete or len(self.made) == self.job.max_tokens):
            text += self.stream.finish()
            return TextDelta(text, token, "stop" if complete or self.stream.stopped else "length")
        return TextDelta(text, token, "stop" if self.stream.stopped else None)

    def allow(self, vocab_size: int) -> None:
        """Tell its chooser which tokens may come next, when not all may."""
        assert self.chooser is not None
        allowed_V = None if self.guide is None else self.guide.allowed()
        if len(self.made) < self.job.min_tokens:
            others_V = np.ones(vocab_size, bool) if allowed_V is None else allowed_V.copy()
            others_V[[i for i in self.ends if i < vocab_size]] = False
            allowed_V = others_V if others_V.any() else allowed_V
        self.chooser.allowed_V = allowed_V

    @property
    def room(self) -> int:
        """Tokens that may be guessed behind its newest one."""
        if len(self.made) < max(self.job.min_tokens, 1):
            return 0
        return min(self.reach, self.job.max_tokens - len(self.made) - 1)


def look_up(ids_S: np.ndarray, most: int) -> list[int]:
    """What followed when a sequence last had its longest known end, again and again where it is short."""
    for size in ENDS:
        if most > 0 and len(ids_S) > size:
            windows = np.lib.stride_tricks.sliding_window_view(ids_S[:-1], size)
            if len(found := np.flatnonzero((windows == ids_S[-size:]).all(1))):
                return np.resize(ids_S[int(found[-1]) + size :], most).tolist()
    return []


class Draft:
    """A smaller model with a cache row for each of the batch's; `vocab_size` as for the batch."""

    def __init__(self, backend: CausalBackend, rows: int, vocab_size: int) -> None:
        self._backend, self._cache, self._vocab_size = backend, backend.new_cache(rows), vocab_size

    def guess(self, live: list[Sequence], budget: int) -> None:
        """Guess for those whose text it knows to the end; of the others it reads on, so many tokens in all."""
        spans = []
        for row, one in enumerate(live):
            ids, most = one.known(), one.room
            one.drafted = min(one.drafted, len(ids) - (most > 0))  # behind it stands what was guessed wrong
            new = ids[one.drafted : one.drafted + budget]
            if one.reach and len(new) and len(ids) + most <= self._backend.context:
                whole = one.drafted + len(new) == len(ids)
                spans.append(Span(row, one.drafted, new, int(whole and most > 0)))
                budget -= len(new)
        while spans:
            best = self._backend.step(spans, self._cache)[:, : self._vocab_size].argmax(1).tolist()
            for span in spans:
                live[span.row].drafted = span.past + len(span.ids)
            further = []
            for token_id, span in zip(best, [span for span in spans if span.asked]):
                one = live[span.row]
                one.guesses.append(token_id)
                if len(one.guesses) < one.room:
                    further.append(Span(span.row, one.drafted, np.array([token_id], np.int64)))
            spans = further

    def leave(self, row: int, last: int, tokens: int) -> None:
        """A sequence has left; the last row, which holds so many tokens, moves into its place."""
        if row != last:
            self._backend.copy_row(self._cache, last, row, tokens)
        self._backend.free_row(self._cache, last)


class Grammars:
    """Grammars over one tokenizer's vocabulary, by the compiler llguidance; any of `end_ids` may end an answer that is
    complete. Raises MissingExtra and WrongUse.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Collection[int]) -> None:
        self._library = extra("llguidance", "constrained output", "constrained")
        self._vocab_size = tokenizer.vocab_size
        ends = [token_id for token_id in sorted(end_ids) if token_id < tokenizer.vocab_size]
        try:
            self._tokens = self._library.LLTokenizer(
                tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=ends or None
            )
        except ValueError as error:
            what, why = "this model's tokenizer cannot be constrained", str(error).splitlines()[0]
            raise WrongUse(what, where="response_format", why=why) from error
        self.guide = lru_cache(GRAMMARS)(self._guide)

    def _guide(self, text: str) -> "Guide":
        """What keeps answers to the `constraint` of a `Job`; each gets a `copy`."""
        constraint, matcher = json.loads(text), self._library.LLMatcher
        # White space is left to the writer of the schema: a model may otherwise go on with it for ever.
        compact: Any = {"whitespace_flexible": False}
        try:
            if "regex" in constraint:
                grammar = matcher.grammar_from_regex(constraint["regex"])
            else:
                grammar = matcher.grammar_from_json_schema(json.dumps(constraint["json"]), overrides=compact)
            guide = matcher(self._tokens, grammar)
            if not guide.is_error():
                guide.compute_bitmask()  # of the first token: the thread of the model must not wait for it
            why = guide.get_error().splitlines()[0] if guide.is_error() else ""
        except (ValueError, RecursionError) as error:
            why = str(error) or "it is nested too deeply"
        where = "guided_regex" if "regex" in constraint else "response_format"
        if why:
            raise WrongUse("the constraint cannot be compiled", where=where, why=why)
        return Guide(guide, self._vocab_size, where)


class Guide:
    """One answer on its way through a grammar; called on the thread that runs the model."""

    def __init__(self, matcher: Any, vocab_size: int, where: str = "response_format") -> None:
        self._matcher, self._vocab_size, self._where = matcher, vocab_size, where

    def copy(self) -> "Guide":
        """The same for another answer."""
        return Guide(self._matcher.deep_copy(), self._vocab_size, self._where)

    def allowed(self) -> np.ndarray:
        """Which tokens may come next: bool (V,) of the tokenizer's vocabulary."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)

    def accept(self, token_id: int) -> bool:
        """Take a token in; True when nothing may follow it."""
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():  # of its limits: what comes would be cut, and look complete
            why = self._matcher.get_error().splitlines()[0]
            raise WrongUse("the constraint is too large to follow", where=self._where, why=why)
        return bool(self._matcher.is_stopped())
