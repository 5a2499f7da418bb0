"""What the server accepts: request bodies in OpenAI's shape, with the samplers that its clients pass as extra
fields.

- A field that is null counts as left out.
- A field of OpenAI's that is missing here is accepted at the value that changes nothing and otherwise refused
  by name; an unknown one is refused with the nearest known one. Nothing is ignored in silence: a misspelt
  `temprature` would otherwise go unnoticed.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...core.errors import WrongUse, did_you_mean
from ..runtimes.sampling import Sampling

Text = Annotated[str, Field(max_length=1_000_000)]
Ids = Annotated[list[int], Field(min_length=1)]
Texts = Text | Annotated[list[Text], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]


class Strict(BaseModel):
    """Strict types, null as left out, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", strict=True)
    # Known to OpenAI's clients and missing here: the values that change nothing.
    missing: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = [field.alias or name for name, field in cls.model_fields.items()]
        kept = {}
        for name, value in given.items():
            if name in known or not isinstance(name, str):
                if value is not None:
                    kept[name] = value
            elif name in cls.missing:
                if value is not None and value not in cls.missing[name]:
                    neutral = " or ".join(map(repr, cls.missing[name]))
                    fix = f"leave it out{f' or give {neutral}' if neutral else ''}"
                    raise WrongUse(f"{name} is not supported by this server", where=name, fix=fix)
            else:
                fix = did_you_mean(name, [*known, *cls.missing], f"known: {', '.join(known)}")
                raise WrongUse(f"unknown field {name[:100]!r}", where=name[:100], fix=fix)
        return kept


class Body(Strict):
    """What every request body may say."""

    model: str | None = Field(None, description="From /v1/models; may be left out when only one model fits.")
    user: str | None = Field(None, description="Accepted for OpenAI's clients, not used.")
    metadata: dict[str, str] | None = Field(None, description="Accepted for OpenAI's clients, not used.")


class StreamOptions(Strict):
    """OpenAI's options of a streamed answer."""

    missing = {"include_obfuscation": (False,)}

    include_usage: bool = False


class JsonSchema(Strict):
    """The schema of a `response_format` of type json_schema."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Strict):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Generation(Body):
    """What completions and chat completions share."""

    missing = {"store": (False,), "service_tier": ("auto", "default")}

    temperature: float = Field(1.0, ge=0, le=100, description="0 = greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 = all.")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[
        Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]
    ] = Field(default_factory=dict, max_length=1024, description="By token id, added to the logit.")
    seed: int | None = Field(None, ge=0, lt=2**63)
    n: int = Field(1, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="JSON, or JSON that fits a schema.")
    guided_regex: Annotated[str, Field(max_length=10_000)] | None = Field(
        None, description="The answer matches this regular expression."
    )

    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> Sampling:
        """How its answers choose tokens."""
        fields = set(Sampling.__struct_fields__) - {"logit_bias"}
        bias = tuple((int(i), value) for i, value in self.logit_bias.items())
        return Sampling(**self.model_dump(include=fields), logit_bias=bias)

    def constraint(self) -> dict[str, Any] | None:
        """What the answer must match: {"json": schema} or {"regex": ...}. Raises WrongUse for both."""
        expression = {"regex": self.guided_regex} if self.guided_regex else None
        shape = self.response_format
        if shape is None or shape.type == "text":
            return expression
        if expression:
            fix = "give response_format or guided_regex"
            raise WrongUse("an answer cannot have two shapes", where="guided_regex", fix=fix)
        if shape.type == "json_object":
            return {"json": {"type": "object"}}
        if shape.json_schema is None:
            fix = "give json_schema.schema"
            raise WrongUse("the schema is missing", where="response_format", fix=fix)
        return {"json": shape.json_schema.schema_}


class CompletionBody(Generation):
    """POST /v1/completions."""

    missing = Generation.missing | {"best_of": (1,), "suffix": ("",)}

    prompt: Texts
    max_tokens: int = Field(16, ge=0, description="0 only with echo: nothing is generated.")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = Field(False, description="The prompt comes first, with logprobs its tokens too.")


class ContentPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class ChatMessage(Strict):
    """One message of a conversation."""

    missing = {"refusal": (), "tool_calls": ([],), "function_call": (), "audio": (), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] = ""
    name: str | None = None

    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Generation):
    """POST /v1/chat/completions."""

    missing = Generation.missing | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    max_tokens: int | None = Field(None, ge=1, description="Default: as many as fit the context.")
    max_completion_tokens: int | None = Field(None, ge=1, description="Another name of max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    missing = {"dimensions": ()}

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "cls"] | None = Field(
        None, description="Of the last hidden states (default: as the model's directory says, else the mean)."
    )
    normalize: bool = Field(True, description="Scale each vector to length 1.")


class FillMaskBody(Body):
    """POST /v1/fill-mask: `input` holds the model's mask token one or more times."""

    input: Text
    top_k: int = Field(5, ge=1, le=100)


class ClassifyBody(Body):
    """POST /v1/classify: the probability of every class for each text, with a fine-tuned BERT."""

    input: Texts


class RerankBody(Body):
    """POST /v1/rerank: documents in the order of their score beside a query, with a fine-tuned BERT."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1)]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False


class TokenizeBody(Body):
    """POST /tokenize."""

    prompt: Text
    add_special_tokens: bool = Field(False, description="With [CLS] and [SEP] for a BERT.")


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[int], Field(max_length=1_000_000)]
