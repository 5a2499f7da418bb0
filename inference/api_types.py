"""What the server accepts: request bodies in OpenAI's shape, with the samplers that its clients pass as extra fields.

Unknown fields and wrong types are refused, never ignored: a misspelt `temprature` would otherwise go unnoticed.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=1_000_000)]
Ids = Annotated[list[int], Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]


class Body(BaseModel):
    """Every request body: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(
        None, description="A name from /v1/models; may be left out when only one model fits."
    )
    user: str | None = Field(None, description="Accepted for OpenAI's clients, not used.")


class StreamOptions(BaseModel):
    """OpenAI's options of a streamed answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Texts
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0, le=100, description="0 = greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 = all.")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    seed: int | None = Field(None, ge=0, lt=2**63)
    n: int = Field(1, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class EmbeddingBody(Body):
    """POST /v1/embeddings: the mean over a text's tokens, scaled to length 1."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"


class FillMaskBody(Body):
    """POST /v1/fill-mask: `input` holds the model's mask token one or more times."""

    input: Text
    top_k: int = Field(5, ge=1, le=100)
