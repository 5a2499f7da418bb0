"""How a request chooses its next token. Choosing itself is `sampler`."""

import msgspec
import numpy as np

from ...core.errors import WrongUse

SEEDS = 1 << 63  # how many there are
LARGEST_BIAS = 100.0  # of a logit, as OpenAI's API allows: beyond any difference that a model makes


class Sampling(msgspec.Struct, frozen=True):
    """How a request chooses tokens.

    Neutral values: temperature 1, top_k 0, top_p 1, min_p 0, repetition_penalty 1, frequency_penalty 0,
    presence_penalty 0, no bias.
    """

    temperature: float = 1.0  # 0 = greedy: always the most probable token
    top_k: int = 0  # keep the k most probable; 0 = all
    top_p: float = 1.0  # keep the most probable ones that together reach this share (Holtzman et al. 2020)
    min_p: float = 0.0  # keep those at least this share as probable as the most probable
    repetition_penalty: float = 1.0  # on logits of all tokens so far, prompt included (Keskar et al. 2019)
    seed: int | None = None  # None = a new one every time
    frequency_penalty: float = 0.0  # taken from a token's logit for each time that the answer holds it
    presence_penalty: float = 0.0  # taken once from the logit of every token that the answer holds
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature, 0.0, 100.0),
            "top_k": (self.top_k, 0, 2**31),
            "top_p": (self.top_p, 1e-6, 1.0),
            "min_p": (self.min_p, 0.0, 1.0),
            "repetition_penalty": (self.repetition_penalty, 0.01, 100.0),
            "seed": (self.seed or 0, 0, SEEDS - 1),
            "frequency_penalty": (self.frequency_penalty, -2.0, 2.0),
            "presence_penalty": (self.presence_penalty, -2.0, 2.0),
        }
        for token_id, bias in self.logit_bias:
            ranges[f"logit_bias[{token_id}]"] = (bias, -LARGEST_BIAS, LARGEST_BIAS)
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:  # also refuses NaN
                why = f"{value} is not between {low:g} and {high:g}"
                raise WrongUse(f"{name} is out of range", where=name, why=why)

    @property
    def counts_tokens(self) -> bool:
        """Whether a choice depends on the tokens before it other than through the model."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def generator(self) -> np.random.Generator:
        """The source of this request's draws, one number a token."""
        return np.random.Generator(np.random.Philox(self.seed))


GREEDY = Sampling(temperature=0.0)
