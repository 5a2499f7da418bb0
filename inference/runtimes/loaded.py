"""A model that runs, with what belongs to it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.artifact import Input
from ...core.backend import CausalBackend, EncoderBackend
from ...models.config import ModelConfig, family_of
from ...models.sentence import MEAN, Sentence


@dataclass(frozen=True)
class Loaded:
    """A backend with what belongs to it."""

    config: ModelConfig
    tokenizer: Path | None
    input: Input
    backend: Any  # a `CausalBackend` or an `EncoderBackend`, as the family says
    classes: tuple[str, ...] = ()  # of a BERT fine-tuned to classify texts: the names of its `logits`
    sentence: Sentence = MEAN  # how a BERT's outputs become the vector of a text

    @property
    def family(self) -> str:
        """One of "gpt" and "bert"."""
        return family_of(self.config)

    @property
    def causal(self) -> CausalBackend | None:
        """The backend of a GPT."""
        return self.backend if self.family == "gpt" else None

    @property
    def encoder(self) -> EncoderBackend | None:
        """The backend of a BERT."""
        return self.backend if self.family == "bert" else None
