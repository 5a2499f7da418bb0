"""Jobs of making text, as they come from an HTTP body, a file or a task, and what each has said so far.

`TextStream` gives out text as it becomes certain: never half a character, never a part of a stop string. The
whole answer is by definition the sum of its deltas. The batch in which jobs take turns is `slots`.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from ...core.errors import WrongUse
from ...data.tokenizer import Tokenizer
from ..runtimes.sampling import GREEDY, SEEDS, Sampling

NO_IDS = np.zeros(0, np.int64)  # of a job whose prompt is to come
REPLACEMENT = "\ufffd"
OPEN_TOKENS = 64  # beyond which a character that is still cut is none


class Job(msgspec.Struct, frozen=True, eq=False, tag="generate"):
    """Answers to make to one prompt: all that anybody says of them, from the HTTP body to the slots.

    `logprobs`: also the k most probable tokens of every step; None = no probabilities at all.
    `prompt_logprobs`: the same for the tokens of the prompt, which is then read anew (no prefix is reused); with
    it `max_tokens` may be 0.
    """

    prompt_ids: np.ndarray  # (S,), at least one token
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: dict[str, Any] | None = None  # {"json": schema} or {"regex": expression}
    n: int = 1  # answers, whose seeds are one apart
    whole: bool = False  # nobody looks at an answer before it is complete
    min_tokens: int = 0  # before them no token ends an answer
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()  # tokens that end an answer besides the end-of-text token

    def each(self) -> list["Job"]:
        """The answers as jobs of one."""
        seed = self.sampling.seed
        seeds = [None if seed is None else (seed + copy) % SEEDS for copy in range(self.n)]
        return [replace(self, n=1, sampling=replace(self.sampling, seed=seed)) for seed in seeds]

    @property
    def cost(self) -> int:
        """Tokens that an answer reads and makes at most."""
        return len(self.prompt_ids) + self.max_tokens

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


def prompt_ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The ids of a text to continue; of none, an end-of-text token, after which a model begins a document."""
    ids = tokenizer.encode(text)
    return np.array([tokenizer.eos_id]) if len(ids) == 0 and tokenizer.eos_id is not None else ids


class TextStream:
    """Text from token ids as they arrive. `decode` turns a list of ids into text (the tokenizer's).

    `before`: the last token of what is continued. Many decoders write a word's space only after another word.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: tuple[str, ...] = (), before: list[int] | None = None
    ) -> None:
        self._decode, self._stop = decode, stop
        self._ids = before or []  # the last certain token as context, and those after it
        self._given = len(decode(self._ids)) if before else 0  # characters of decode(_ids) already taken
        self._held = ""  # decoded, but it may become a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character or a stop string may still be open."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        # A cut character decodes to one replacement at the very end; the next token may complete it.
        certain = len(text) - (text.endswith(REPLACEMENT) and len(self._ids) < OPEN_TOKENS)
        self._held += text[self._given : certain]
        self._given = max(self._given, certain)
        if certain == len(text):
            self._ids = self._ids[-1:]
            self._given = len(self._decode(self._ids))
        return self._release()

    def finish(self) -> str:
        """The rest of the text when no more tokens come."""
        self._held += self._decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        text = self._release()
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self) -> str:
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            text, self._held, self.stopped = self._held[: min(found)], "", True
            return text
        keep = max((open_stop(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def open_stop(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
