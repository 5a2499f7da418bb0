"""A model that runs, with what belongs to it."""

from dataclasses import dataclass
from pathlib import Path

from ...core.artifact import Input
from ...core.backend import CausalBackend, EncoderBackend
from ...models.config import ModelConfig


@dataclass(frozen=True)
class Loaded:
    """A backend with what belongs to it. `causal` or `encoder` is set, as the family says."""

    family: str  # "gpt" or "bert"
    config: ModelConfig
    tokenizer: Path | None
    input: Input
    causal: CausalBackend | None = None
    encoder: EncoderBackend | None = None
    classes: tuple[str, ...] = ()  # of a BERT fine-tuned to classify texts: the names of its `logits`

    @property
    def backend(self) -> CausalBackend | EncoderBackend:
        """The one that is set."""
        backend = self.causal or self.encoder
        assert backend is not None
        return backend
