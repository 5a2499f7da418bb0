"""What the server accepts: request bodies in OpenAI's shape, with the samplers that its clients pass as extra fields.

- A field that is null counts as left out.
- A field of another server that is not implemented (`unsupported`) is accepted at the values that change nothing and
  otherwise refused with the reason; an unknown field is refused with the nearest known one.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, field

from ...core.errors import WrongUse
from ..runtimes.sampling import SEEDS, Sampling
from .constraint_size import check_expressions, check_schema
from .messages import Message, Strict, Text
from .unsupported import GENERATION, READING, Unsupported

Ids = Annotated[list[int], Meta(min_length=1)]
SHAPES = "A text, a list of texts, a list of token ids, or a list of such lists."
# Once read, always several.
Texts = Annotated[list[Any], Meta(description=SHAPES, extra_json_schema={"type": ["string", "array"]})]
OWN = "Of the last hidden states (default: as the model's directory says, else the mean)."
Pooling = Annotated[Literal["mean", "cls"], Meta(description=OWN)]
Count = Annotated[int, Meta(ge=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=200)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[str, Meta(pattern=r"^[0-9]{1,9}$")]
Pattern = Annotated[str, Meta(max_length=10_000, description="The answer matches this expression.")]
Choices = Annotated[list[Stop], Meta(min_length=1, max_length=256, description="The answer is one of these.")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Biases = Annotated[dict[TokenId, Bias], Meta(max_length=1024, description="By token id, added to the logit.")]
Last = Annotated[int, Meta(ge=-1, description="Keep so many at the end; -1 = what the context takes.")]
First = Annotated[int, Meta(ge=1, description="The first ones of each vector (Matryoshka).")]
NAMED = "Which of the model's prompts stands before each text."
Prompt = Annotated[str, Meta(max_length=100, description=NAMED)]
Fits = Annotated[int, Meta(ge=1, description="Default: as many as fit the context.")]
Cut = Annotated[bool, Meta(description="Read the beginning of what is too long.")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
SAME_AS_MAX = "Another name of max_tokens."
FRAMED = "Put the tokens around a text prompt that its tokenizer's file puts (Llama's BOS, BERT's [CLS])."
AGAIN = "The same around a conversation, where its template has not put them already."
VARIABLES = "What the chat template may read besides the messages, for example enable_thinking."
LOGPROBS = "message.output_text.logprobs"  # of `include`
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it
LEAST_TOP_P = 1e-6


class Body(Strict):
    """What every request body may say."""

    unsupported: ClassVar[dict[str, Unsupported]] = READING

    model: Annotated[str, Meta(description="From /v1/models; needed when several fit.")] | None = None
    user: Annotated[str, Meta(description="Accepted for OpenAI's clients, not used.")] | None = None
    safety_identifier: Annotated[str, Meta(description="Accepted, not used.")] | None = None
    metadata: Annotated[dict[str, str], Meta(description="Accepted, not used.")] | None = None


class ModelBody(Body, kw_only=True):
    """POST /models/unload."""

    model: Annotated[str, Meta(min_length=1, description="A name from /v1/models.")]


class LoadBody(Body, kw_only=True):
    """POST /models/load."""

    model: Annotated[str, Meta(min_length=1, description="A name from /v1/models.")] | None = None
    name: (
        Annotated[str, Meta(min_length=1, description="The same, where `path` says what it means.")] | None
    ) = None
    path: Annotated[str, Meta(min_length=1, description="What to serve by this name from now on.")] | None = (
        None
    )

    @property
    def served_name(self) -> str:
        """The name. Raises WrongUse without one, or with two."""
        if (self.name is None) == (self.model is None):
            raise WrongUse(
                "which model?", where="name", fix='give {"model": NAME}, or {"name": NAME, "path": PATH}'
            )
        return self.name or self.model or ""


class StreamOptions(Strict):
    """OpenAI's options of a streamed answer."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = False
    continuous_usage_stats: bool | None = False

    def __post_init__(self) -> None:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation is not supported by this server; leave it out")


class JsonSchema(Strict):
    """The schema of a `response_format` of type json_schema."""

    schema: dict[str, Any]
    name: str | None = ""
    description: str | None = ""
    strict: bool | None = True


class ResponseFormat(Strict):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """What an answer must look like, by vLLM's names: one of them."""

    json: dict[str, Any] | None = None
    regex: Pattern | None = None
    choice: Choices | None = None


class Generation(Body, kw_only=True):
    """What completions and chat completions share."""

    unsupported = GENERATION

    # None: the model's default, else `Sampling`'s
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 = greedy.")] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1, description="0 = the most probable alone.")] | None = None
    top_k: Annotated[int, Meta(ge=-1, description="0 or -1 = all.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Biases = {}
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="-1 = a new one.")] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    min_tokens: Annotated[int, Meta(ge=0, description="Before them nothing ends an answer.")] = 0
    ignore_eos: Annotated[bool, Meta(description="The end-of-text token ends nothing.")] = False
    stop_token_ids: Annotated[list[int], Meta(max_length=64)] = []
    truncate_prompt_tokens: Last | None = None
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    moderation: Annotated[dict[str, Any], Meta(description="Accepted unless it would block.")] | None = None

    def __post_init__(self) -> None:
        policy = (self.moderation or {}).get("policy")
        modes = list(policy.values()) if isinstance(policy, dict) else []
        if any(isinstance(part, dict) and part.get("mode") == "block" for part in modes):
            why = "this server has no moderation model, so nothing would be blocked"
            raise WrongUse("moderation is not supported by this server", where="moderation", why=why)

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """How tokens are drawn; what the request leaves out is as the model's `defaults` say."""
        stated = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        fields = dict(defaults) | {name: value for name, value in stated.items() if value is not None}
        if fields.get("top_k") == -1:
            fields["top_k"] = 0
        if fields.get("top_p") == 0:
            fields["top_p"] = LEAST_TOP_P
        seed = fields.get("seed")
        fields["seed"] = None if seed in (None, -1) else seed % SEEDS
        fields["logit_bias"] = tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items())
        return Sampling(**fields)

    def constraint(self) -> str | None:
        """What the answer must match, as JSON: {"json": schema} or {"regex": ...}. Raises WrongUse for two of them."""
        shape, named = self.response_format, self.structured_outputs or StructuredOutputs()
        schema: Any = {"type": "object"} if shape and shape.type == "json_object" else None
        if shape and shape.type == "json_schema":
            if shape.json_schema is None:
                raise WrongUse("the schema is missing", where="response_format", fix="give json_schema")
            schema = shape.json_schema.schema
        choices = ["|".join(map(re.escape, one)) for one in (named.choice, self.guided_choice) if one]
        found: list[dict[str, Any]] = []
        found += [{"json": one} for one in (schema, named.json, self.guided_json) if one is not None]
        found += [{"regex": one} for one in (named.regex, self.guided_regex, *choices) if one]
        if not found:
            return None
        if len(found) > 1:
            raise WrongUse("an answer cannot have two shapes", where="guided_regex", fix="give one of them")
        (constraint,) = found
        if "json" in constraint:
            check_schema(constraint["json"], "response_format")
        elif not choices:
            check_expressions([constraint["regex"]], "guided_regex")
        try:
            return msgspec.json.encode(constraint).decode()
        except RecursionError:
            raise WrongUse("the constraint is nested too deeply", where="response_format") from None


class CompletionBody(Generation, kw_only=True):
    """POST /v1/completions."""

    prompt: Texts
    max_tokens: Annotated[int, Meta(ge=0, description="0 only with echo: nothing is generated.")] | None = (
        None
    )
    max_completion_tokens: Annotated[int, Meta(ge=1, description=SAME_AS_MAX)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: Annotated[bool, Meta(description="The prompt comes first, with logprobs its tokens too.")] = False
    add_special_tokens: Annotated[bool, Meta(description=FRAMED)] = True

    def most_tokens(self) -> int:
        """New tokens at most."""
        if self.max_tokens is not None:
            return self.max_tokens
        return self.max_completion_tokens or DEFAULT_MAX_TOKENS


class Conversation(Generation, kw_only=True):
    """Fields shared by the endpoints that answer a conversation."""

    chat_template_kwargs: Annotated[dict[str, Any], Meta(description=VARIABLES)] = {}
    add_special_tokens: Annotated[bool, Meta(description=AGAIN)] = False

    def variables(self, effort: str | None, verbosity: str | None) -> dict[str, Any]:
        """What the chat template may read besides the messages; `chat_template_kwargs` win."""
        variables: dict[str, Any] = {}
        if effort == "none":
            variables["enable_thinking"] = False
        elif effort is not None:
            variables["reasoning_effort"] = effort
        if verbosity is not None:
            variables["verbosity"] = verbosity
        return variables | self.chat_template_kwargs


class ChatBody(Conversation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=1000)]
    max_tokens: Fits | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, description=SAME_AS_MAX)] | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class TextFormat(JsonSchema, kw_only=True):
    """What `text` asks an answer to look like."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None  # type: ignore[assignment]


class TextOptions(Strict):
    """`text` of /v1/responses."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class Reasoning(Strict):
    """`reasoning` of /v1/responses."""

    effort: Effort | None = None
    summary: str | None = None  # none is written
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesBody(Conversation, kw_only=True):
    """POST /v1/responses."""

    unsupported = GENERATION | {"prompt": Unsupported("there are no stored prompts here")}

    input: Text | Annotated[list[Message], Meta(min_length=1, max_length=1000)]
    instructions: Annotated[Text, Meta(description="Of the system, before the input.")] | None = None
    max_output_tokens: Fits | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[str], Meta(description="Parts of items that no answer here has.")] = []
    n: Literal[1] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if LOGPROBS in self.include:
            why = "log-probabilities are in /v1/chat/completions"
            raise WrongUse(f"include of {LOGPROBS} is not supported by this server", where="include", why=why)
        if self.text and (shape := self.text.format):
            schema = None if shape.schema is None else JsonSchema(schema=shape.schema)
            self.response_format = ResponseFormat(type=shape.type, json_schema=schema)


class EmbedBody(Body, kw_only=True):
    """POST /embed, as Text Embeddings Inference has it."""

    input: Texts = field(name="inputs")
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Pooling | None = None
    dimensions: First | None = None
    truncate: Cut = False
    prompt_name: Prompt | None = None
    normalize: Annotated[bool, Meta(description="Scale each vector to length 1.")] = True


class EmbeddingBody(EmbedBody, kw_only=True):
    """POST /v1/embeddings."""

    input: Texts = field(name="input")


class FillMaskBody(Body, kw_only=True):
    """POST /v1/fill-mask: `input` holds the model's mask token one or more times."""

    input: Text
    top_k: Annotated[int, Meta(ge=1, le=100)] = 5


class ClassifyBody(Body, kw_only=True):
    """POST /v1/classify: the probability of every class for each text, with a fine-tuned BERT."""

    input: Texts


class RerankBody(Body, kw_only=True):
    """POST /v1/rerank: documents in the order of their score beside a query, with a fine-tuned BERT."""

    query: Text
    documents: Annotated[list[Text], Meta(min_length=1)]
    top_n: Count | None = None
    return_documents: bool = False
    truncate: Cut = False


class RankBody(RerankBody, kw_only=True):
    """POST /rerank, as Text Embeddings Inference has it."""

    documents: Annotated[list[Text], Meta(min_length=1)] = field(name="texts")
    return_documents: bool = field(name="return_text", default=False)


class ScoreBody(Body, kw_only=True):
    """POST /v1/score: a text beside each of several, or as many pairs."""

    text_1: Texts
    text_2: Texts


class TokenizeBody(Body, kw_only=True):
    """POST /tokenize."""

    prompt: Text
    add_special_tokens: Annotated[bool, Meta(description=FRAMED)] = True


class DetokenizeBody(Body, kw_only=True):
    """POST /detokenize."""

    tokens: Annotated[list[int], Meta(max_length=65_536)]
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
