"""Messages of a conversation as clients send them, with those fields of earlier answers that clients send back."""

from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Text = Annotated[str, Meta(max_length=1_000_000)]


class Strict(Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a body, in which unknown fields are refused."""


class Part(Strict):
    """A part of a message: of a chat's, or of one to or from /v1/responses. What says nothing of its text is read and
    not used: clients send back the parts of earlier answers.
    """

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.said is None:
            raise ValueError(f"a part of type {self.type} needs its text")

    @property
    def said(self) -> str | None:
        return self.refusal if self.type == "refusal" else self.text


class Function(Strict):
    """A tool call of an earlier answer: the function name, and its arguments as JSON."""

    name: str
    arguments: Text = "{}"


class ToolCall(Strict):
    """A call in an earlier answer. Chat templates read it; this server makes none."""

    function: Function
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None

    @property
    def characters(self) -> int:
        return len(self.id) + len(self.function.name) + len(self.function.arguments)

    def described(self) -> dict[str, Any]:
        """As chat templates expect it: with the arguments as an object, where they are one."""
        arguments: Any = self.function.arguments or "{}"  # of a function without parameters
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": arguments},
        }


class Message(Strict):
    """A message of a conversation, with those fields of earlier answers, which clients send back, that say nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[Part] | None = ""
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # another name of it
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    refusal: Text | None = None
    function_call: None = None
    audio: None = None
    tool_calls: list[ToolCall] | None = None
    annotations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    provider_specific_fields: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        parts = self.content or self.refusal or ""
        return parts if isinstance(parts, str) else "".join(part.said or "" for part in parts)

    @property
    def characters(self) -> int:
        """Those of everything that the chat template gets."""
        own = (self.text, self.name, self.tool_call_id, self.reasoning_content or self.reasoning)
        return sum(len(text) for text in own if text) + sum(call.characters for call in self.tool_calls or ())

    def turn(self) -> dict[str, Any]:
        """As a chat template takes it."""
        turn: dict[str, Any] = {"role": self.role, "content": self.text}
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        named["reasoning_content"] = self.reasoning_content or self.reasoning
        turn |= {name: value for name, value in named.items() if value}
        if self.tool_calls:
            turn["tool_calls"] = [call.described() for call in self.tool_calls]
        return turn
