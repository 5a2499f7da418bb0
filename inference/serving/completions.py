"""The endpoints that write: /v1/completions, /v1/chat/completions and /v1/responses, streamed or whole, in OpenAI's
shapes. Added to them: `token_ids` in every choice of a completion, for the web page and for reproducible tests.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from ...core.errors import Failed
from .api_types import ChatBody, CompletionBody, Generation, Item, Message, ResponsesBody
from .calls import INLINE, Call, error_body, told
from .generation import Job, TextDelta, Token
from .served import Deltas, ServedModel

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold it back
First = tuple[int, TextDelta | None]
Events = AsyncGenerator[dict[str, Any] | None, None]
ITEM = {"output_index": 0, "content_index": 0}  # of /v1/responses: there is one, with one part


async def completions(call: Call, body: CompletionBody) -> Response | dict[str, Any]:
    """Continue a text with a GPT; `stream` sends server-sent events."""
    model, size = call.model, sum(map(len, body.prompt))
    answers = await call.beside(size, lambda: Answers(model, body, model.completion(body)))
    return await generated(call, body, answers)


async def chat(call: Call, body: ChatBody) -> Response | dict[str, Any]:
    """Answer a conversation with a GPT that has a chat template."""
    most = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    jobs = await conversed(call, body, body.messages, most, logprobs)
    return await generated(call, body, ChatAnswers(call.model, body, jobs))


async def responses(call: Call, body: ResponsesBody) -> Response | dict[str, Any]:
    """Answer a text or a conversation with a GPT that has a chat template; `stream` sends server-sent events."""
    messages = [Item(role="system", content=body.instructions)] if body.instructions else []
    messages += [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    jobs = await conversed(call, body, messages, body.max_output_tokens)
    return await generated(call, body, ResponseAnswers(call.model, body, jobs))


async def conversed(
    call: Call, body: Generation, messages: Sequence[Message], most: int | None, logprobs: int | None = None
) -> list[Job]:
    """The job of answering a conversation with at most so many tokens (None: what fits)."""
    model, template = call.model, call.model.chat
    assert template is not None
    ids = await call.beside(INLINE + 1, lambda: template.ids(messages))
    body.stop = [*body.stops(), *template.ends]
    return [model.job(body, ids, most or model.room(len(ids)), logprobs)]


async def generated(call: Call, body: Generation, answers: "Answers") -> Response | dict[str, Any]:
    """The answers as the body wants them."""
    deltas = call.model.generate(answers.jobs, call.watch)
    if not body.stream:
        await call.unless_gone(answers.take(deltas))
        call.watch.finished()
        return await call.beside(answers.size, answers.whole)
    # The first delta is awaited here, for a while: a full queue is a 429, not an error inside a 200.
    try:
        first = await call.unless_gone(anext(deltas))
    except BaseException:
        await deltas.aclose()
        raise
    events = _events(call, answers.events(first, deltas))
    return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)


async def _events(call: Call, answers: Events) -> AsyncIterator[bytes]:
    """Server-sent events; an error in the middle is told as an event."""
    async with aclosing(answers):
        try:
            while True:
                async with asyncio.timeout_at(call.deadline_s):
                    answer = await anext(answers)
                yield _event(answer) if answer else b": the answer goes on\n\n"
        except StopAsyncIteration:
            call.watch.finished()
        except TimeoutError:
            yield _event(error_body(504, "the answer took too long"))
        except Failed as error:
            call.watch.fault = type(error).__name__
            yield _event(msgspec.Raw(told(error).body))
    yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    """One server-sent event, with its name where it has one."""
    named = isinstance(value, dict) and "type" in value
    name = b"event: %b\n" % value["type"].encode() if named else b""
    return b"%bdata: %b\n\n" % (name, msgspec.json.encode(value))


@dataclass
class Piece:
    """Some of a choice: its text, its tokens with the offset of each in the whole text, and why it ended."""

    number: int
    text: str = ""
    tokens: list[tuple[Token, int]] = field(default_factory=list)
    finish: str | None = None


class Answers:
    """All choices of one request as they grow."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, model: ServedModel, body: Generation, jobs: list[Job]) -> None:
        self._model, self._body, self.jobs = model, body, jobs
        self._head: dict[str, Any] = {"id": f"{self.prefix}{uuid.uuid4().hex}"}
        self._head |= {"created": int(time.time()), "model": model.name}
        self._echo = [""] * sum(job.n for job in jobs)
        if isinstance(body, CompletionBody) and body.echo:
            decode = model.tokenizer.decode
            texts = [one if isinstance(one, str) else decode(one) for one in body.prompt]
            self._echo = [text for text in texts for _ in range(body.n)]
        self._choices = [Piece(number, text) for number, text in enumerate(self._echo)]
        self._made = self._cached = 0
        self.size = sum(len(prompt) for prompt in self._echo)  # characters and numbers of a whole answer

    def add(self, number: int, delta: TextDelta) -> Piece:
        """Take a delta of one answer in. The prompt's tokens come before its own; of parts of one character each
        stands at its beginning, up to the rounding of characters that cannot be decoded alone.
        """
        choice, tokens, offset = self._choices[number], [], 0
        for token in delta.prompt or ():
            tokens.append((token, offset))
            offset += len(self._model.token_text(token.id))
        if delta.token is not None:
            tokens.append((delta.token, len(choice.text)))
            self._made += 1
        choice.text += delta.text
        choice.finish = delta.finish
        if number % self._body.n == 0:  # copies of an answer find its prompt read
            self._cached += delta.cached_tokens or 0
        if not self._body.stream:
            choice.tokens += tokens
            self.size += sum(2 + len(token.top) for token, _ in tokens)
        return Piece(number, delta.text, tokens, delta.finish)

    async def take(self, deltas: Deltas) -> None:
        """Take all deltas in."""
        async with aclosing(deltas):
            async for number, delta in deltas:
                if delta is not None:
                    self.add(number, delta)

    def whole(self) -> dict[str, Any]:
        """The answer to a request that is not streamed, when all deltas are there."""
        choices = [msgspec.Raw(msgspec.json.encode(self._choice(choice))) for choice in self._choices]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    async def events(self, first: First, deltas: Deltas) -> Events:
        """A body per delta (None: nothing has come for a while), then the usage if asked; closes the deltas."""
        head = {**self._head, "object": self.chunk_kind}
        async with aclosing(deltas):
            for choice in self._openings():
                yield {**head, "choices": [choice]}
            async for number, delta in after(first, deltas):
                yield {**head, "choices": [self._chunk(self.add(number, delta))]} if delta else None
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": self.usage()}

    def _openings(self) -> list[dict[str, Any]]:
        """What a stream says before the first token of each choice."""
        return [self._choice(Piece(number, text)) for number, text in enumerate(self._echo) if text]

    def _choice(self, piece: Piece) -> dict[str, Any]:
        assert isinstance(self._body, CompletionBody)
        return {
            "index": piece.number,
            "text": piece.text,
            "logprobs": None if self._body.logprobs is None else self._logprobs(piece.tokens),
            "finish_reason": piece.finish,
            "token_ids": [token.id for token, _ in piece.tokens],
        }

    _chunk = _choice

    def _logprobs(self, tokens: list[tuple[Token, int]]) -> dict[str, Any]:
        name = self._model.token_text
        return {
            "tokens": [name(token.id) for token, _ in tokens],
            "token_logprobs": [token.logprob for token, _ in tokens],
            "top_logprobs": [self._by_text(token) for token, _ in tokens],
            "text_offset": [offset for _, offset in tokens],
        }

    def _by_text(self, token: Token) -> dict[str, float] | None:
        """The most probable tokens by text, the best of those that look alike; None where nothing predicts."""
        if token.logprob is None:
            return None
        values: dict[str, float] = {}
        for i, value in token.top:
            values.setdefault(self._model.token_text(i), value)
        return values

    def usage(self) -> dict[str, Any]:
        """What the request took, in tokens."""
        read, made = sum(len(job.prompt_ids) for job in self.jobs), self._made
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        return usage | {"prompt_tokens_details": {"cached_tokens": self._cached}}


async def after(first: First, deltas: Deltas) -> Deltas:
    """The deltas with the first one, which was awaited alone."""
    yield first
    async for one in deltas:
        yield one


class ChatAnswers(Answers):
    """The same for chat completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _openings(self) -> list[dict[str, Any]]:
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [{"index": number, **opening} for number in range(len(self._choices))]

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return {"index": piece.number, "delta": delta, **self._rest(piece)}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.number, "message": message, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        assert isinstance(self._body, ChatBody)
        content, most = [], self._body.top_logprobs or 0
        for token, _ in piece.tokens if self._body.logprobs else ():
            top = [self._token(*one) for one in token.top[:most]]
            content.append(self._token(token.id, token.logprob) | {"top_logprobs": top})
        logprobs = {"content": content, "refusal": None} if self._body.logprobs else None
        return {"logprobs": logprobs, "finish_reason": piece.finish}

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._model.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class ResponseAnswers(Answers):
    """The one answer as it grows."""

    prefix, kind = "resp_", "response"

    def whole(self) -> dict[str, Any]:
        return self._response(self._status, [self._message(self._status, [self._part])])

    async def events(self, first: First, deltas: Deltas) -> Events:
        """The events of OpenAI's stream, in their order and numbered; None where nothing has come for a while."""
        numbers = iter(range(1 << 62))

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

        part = ITEM | {"item_id": self._message("", [])["id"]}
        for kind in ("created", "in_progress"):
            yield event(kind, response=self._response("in_progress", []))
        yield event("output_item.added", output_index=0, item=self._message("in_progress", []))
        yield event("content_part.added", **part, part=self._part)
        async with aclosing(deltas):
            async for number, delta in after(first, deltas):
                if delta is None:
                    yield None
                elif text := self.add(number, delta).text:
                    yield event("output_text.delta", **part, delta=text, logprobs=[])
        yield event("output_text.done", **part, text=self._part["text"], logprobs=[])
        yield event("content_part.done", **part, part=self._part)
        yield event("output_item.done", output_index=0, item=self._message(self._status, [self._part]))
        yield event(self._status, response=self.whole())

    @property
    def _status(self) -> str:
        return "incomplete" if self._choices[0].finish == "length" else "completed"

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._choices[0].text, "annotations": [], "logprobs": []}

    def _message(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        own = {"id": self._head["id"].replace(self.prefix, "msg_"), "type": "message", "role": "assistant"}
        return own | {"status": status, "content": parts}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        assert isinstance(body, ResponsesBody)
        said = ("instructions", "max_output_tokens", "temperature", "top_p")
        return {
            "id": self._head["id"],
            "object": self.kind,
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if status == "in_progress" else self.usage(),
            **{name: getattr(body, name) for name in said},
            "metadata": body.metadata or {},
            "text": body.text or {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "store": False,
        }

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
