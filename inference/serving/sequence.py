"""A job on its way: its tokens so far, its row in the cache, and guesses at the tokens to come."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..runtimes.sampler import Chooser
from .constrain import Guide
from .generation import Job, TextDelta, TextStream, Token

ENDS = (4, 3, 2)  # tokens that must have come before for a guess


@dataclass(eq=False)
class Sequence:
    """A job on its way: its tokens so far and its row in the cache."""

    job: Job
    stream: TextStream
    guide: Guide | None
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
    reach: int = 0  # tokens that are guessed ahead at most: more after a good guess
    guesses: list[int] = field(default_factory=list)  # of this step, behind its newest token

    @property
    def filling(self) -> bool:
        """Whether some of its prompt is still to be read."""
        return self.past < len(self.job.prompt_ids)

    def held(self) -> np.ndarray:
        """The ids that its cache row holds."""
        answer = self.made[: max(0, self.past - len(self.job.prompt_ids))]
        return np.concatenate((self.job.prompt_ids[: self.past], np.array(answer, np.int64)))

    def ends(self, eos_id: int | None) -> set[int]:
        """The tokens that end it."""
        return {*self.job.stop_ids} | (set() if self.job.ignore_eos or eos_id is None else {eos_id})

    def accept(self, token: Token, eos_id: int | None) -> TextDelta:
        """Add a token and say what it means for the answer."""
        assert self.chooser is not None
        if token.id in self.ends(eos_id):
            return TextDelta(self.stream.finish(), token, "stop")
        self.made.append(token.id)
        self.chooser.accept(token.id)
        complete = self.guide is not None and self.guide.accept(token.id)
        text = self.stream.push(token.id)
        if self.stream.stopped:
            return TextDelta(text, token, "stop")
        if complete or len(self.made) == self.job.max_tokens:
            text += self.stream.finish()
            return TextDelta(text, token, "stop" if complete or self.stream.stopped else "length")
        return TextDelta(text, token)

    def guess(self) -> list[int]:
        """Guess the next tokens of a greedy answer by what followed when the text so far last went as it goes now, as
        `guesses`. An answer of which more is asked than its most probable tokens has none.
        """
        chooser, job = self.chooser, self.job
        assert chooser is not None
        plain = chooser.counts_V is None and chooser.bias_V is None and job.sampling.temperature == 0
        plain = plain and self.guide is None and job.logprobs is None and len(self.made) >= job.min_tokens
        most = min(self.reach, job.max_tokens - len(self.made) - 1) if plain else 0
        if most > 0:
            ids = np.concatenate((job.prompt_ids, np.array(self.made, np.int64)))
            self.guesses = look_up(ids, most).tolist()
        return self.guesses


def look_up(ids_S: np.ndarray, most: int) -> np.ndarray:
    """What followed the last time that a sequence went as its longest end that it had before, of `ENDS` tokens, and
    that again where it is short; none where it had no such end.
    """
    for size in ENDS:
        if len(ids_S) > size:
            windows = np.lib.stride_tricks.sliding_window_view(ids_S[:-1], size)
            if len(found := np.flatnonzero((windows == ids_S[-size:]).all(1))):
                return np.resize(ids_S[int(found[-1]) + size :], most)
    return ids_S[:0]
