"""The endpoints that write: /v1/completions, /v1/chat/completions and /v1/responses, streamed or whole, in OpenAI's
shapes. Added to them: `token_ids` in every choice of a completion, for the web page and for reproducible tests.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from ...core.errors import ThroughlineError
from .api_types import ChatBody, CompletionBody, Generation, Message, ResponsesBody
from .calls import INLINE, Call, error_body, told
from .generation import Job, TextDelta, Token
from .served import Deltas

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold it back


async def completions(call: Call, body: CompletionBody) -> Response | dict[str, Any]:
    """Continue a text with a GPT; `stream` sends server-sent events."""
    size = sum(map(len, body.prompt))
    answers = await call.beside(size, lambda: Answers(call, body, call.model.completion(body)))
    return await generated(call, answers)


async def chat(call: Call, body: ChatBody) -> Response | dict[str, Any]:
    """Answer a conversation with a GPT that has a chat template."""
    most = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    jobs = await conversed(call, body, body.messages, most, logprobs)
    return await generated(call, ChatAnswers(call, body, jobs))


async def responses(call: Call, body: ResponsesBody) -> Response | dict[str, Any]:
    """Answer a text or a conversation with a GPT that has a chat template; `stream` sends server-sent events."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages += [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    jobs = await conversed(call, body, messages, body.max_output_tokens)
    return await generated(call, ResponseAnswers(call, body, jobs))


async def conversed(
    call: Call, body: Generation, messages: Sequence[Message], most: int | None, logprobs: int | None = None
) -> list[Job]:
    """The job of answering a conversation with at most so many tokens (None: what fits)."""
    model, template = call.model, call.model.chat
    assert template is not None
    turns = [message.turn() for message in messages]
    model.reader.check_characters(sum(len(text) for turn in turns for text in turn.values()), "messages")
    ids = await call.beside(INLINE + 1, lambda: template.ids(turns))
    if not body.ignore_eos:
        body.stop_token_ids = [*body.stop_token_ids, *template.end_ids]
    return [model.job(body, ids, most or model.room(len(ids)), logprobs)]


async def generated(call: Call, answers: "Answers") -> Response | dict[str, Any]:
    """The answers as their body wants them."""
    deltas = call.model.generate(answers.jobs, call.watch)
    if not answers.body.stream:
        await call.unless_gone(answers.take(deltas))
        return await call.beside(answers.size, answers.whole)
    # The first delta is awaited here, for a while: a full queue is a 429, not an error inside a 200.
    try:
        first = await call.unless_gone(anext(deltas))
    except BaseException:
        await deltas.aclose()
        raise
    events = _events(call, answers, first, deltas)
    return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)


async def _events(
    call: Call, answers: "Answers", come: tuple[int, TextDelta | None], deltas: Deltas
) -> AsyncIterator[bytes]:
    """Server-sent events; an error in the middle is told as an event."""
    async with aclosing(deltas):
        try:
            for event in answers.opening():
                yield _event(event)
            while True:
                number, delta = come
                if delta is None:
                    yield b": the answer goes on\n\n"
                elif (said := answers.step(answers.add(number, delta))) is not None:
                    yield _event(said)
                async with asyncio.timeout_at(call.deadline_s):
                    come = await anext(deltas)
        except StopAsyncIteration:
            for event in answers.ending():
                yield _event(event)
        except TimeoutError:
            yield _event(error_body(504, "the answer took too long"))
        except ThroughlineError as error:
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
    counted = "prompt", "completion"  # names of what was read and made

    def __init__(self, call: Call, body: Any, jobs: list[Job]) -> None:
        self.body, self.jobs, self._watch, self._model = body, jobs, call.watch, call.model
        self._head: dict[str, Any] = {"id": f"{self.prefix}{uuid.uuid4().hex}"}
        self._head |= {"created": int(time.time()), "model": call.model.name}
        echo = [""] * sum(job.n for job in jobs)
        if isinstance(body, CompletionBody) and body.echo:
            decode = call.model.tokenizer.decode
            texts = [one if isinstance(one, str) else decode(one) for one in body.prompt]
            echo = [text for text in texts for _ in range(body.n)]
        self._choices = [Piece(number, text) for number, text in enumerate(echo)]
        self.size = sum(map(len, echo))  # characters and numbers of a whole answer

    def add(self, number: int, delta: TextDelta) -> Piece:
        """Take a delta of one answer in; tokens that are parts of one character stand at about its beginning."""
        choice, tokens, offset = self._choices[number], [], 0
        for token in delta.prompt or ():
            tokens.append((token, offset))
            offset += len(self._model.token_text(token.id))
        if delta.token is not None:
            tokens.append((delta.token, len(choice.text)))
        choice.text += delta.text
        choice.finish = delta.finish
        if not self.body.stream:
            choice.tokens += tokens
            self.size += sum(2 + len(token.top) for token, _ in tokens)
        return Piece(number, delta.text, tokens, delta.finish)

    async def take(self, deltas: Deltas) -> None:
        async with aclosing(deltas):
            async for number, delta in deltas:
                if delta is not None:
                    self.add(number, delta)

    def whole(self) -> dict[str, Any]:
        """The answer to a request that is not streamed, when all deltas are there."""
        choices = [msgspec.Raw(msgspec.json.encode(self._choice(choice))) for choice in self._choices]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        """What a stream says before the first token: of each choice its prompt, if that is wanted."""
        return [self._body_of(self._choice(choice)) for choice in self._choices if choice.text]

    def step(self, piece: Piece) -> dict[str, Any] | None:
        return self._body_of(self._chunk(piece))

    def ending(self) -> list[dict[str, Any]]:
        options = self.body.stream_options
        wanted = options is not None and options.include_usage
        return [self._body_of() | {"usage": self.usage()}] if wanted else []

    def _body_of(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.number,
            "text": piece.text,
            "logprobs": None if self.body.logprobs is None else self._logprobs(piece.tokens),
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
        watch = self._watch
        (given, answer), read, made = self.counted, watch.prompt_tokens or 0, watch.made or 0
        usage = {f"{given}_tokens": read, f"{answer}_tokens": made, "total_tokens": read + made}
        return usage | {f"{given}_tokens_details": {"cached_tokens": watch.cached}}


class ChatAnswers(Answers):
    """The same for chat completions."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._body_of({"index": choice.number, **said}) for choice in self._choices]

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return {"index": piece.number, "delta": delta, **self._rest(piece)}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.number, "message": message, **self._rest(piece)}

    def _rest(self, piece: Piece) -> dict[str, Any]:
        content, most = [], self.body.top_logprobs or 0
        for token, _ in piece.tokens if self.body.logprobs else ():
            top = [self._token(*one) for one in token.top[:most]]
            content.append(self._token(token.id, token.logprob) | {"top_logprobs": top})
        logprobs = {"content": content, "refusal": None} if self.body.logprobs else None
        return {"logprobs": logprobs, "finish_reason": piece.finish}

    def _token(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._model.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class ResponseAnswers(Answers):
    """The one answer as it grows."""

    prefix, kind, counted = "resp_", "response", ("input", "output")
    _told = 0  # events

    def whole(self) -> dict[str, Any]:
        return self._response(self._status, [self._message(self._status, [self._part])])

    def opening(self) -> list[dict[str, Any]]:
        begun = self._response("in_progress", [])
        return [
            *(self._event(kind, response=begun) for kind in ("created", "in_progress")),
            self._event("output_item.added", output_index=0, item=self._message("in_progress", [])),
            self._event("content_part.added", **self._place, part=self._part),
        ]

    def step(self, piece: Piece) -> dict[str, Any] | None:
        if not piece.text:
            return None
        return self._event("output_text.delta", **self._place, delta=piece.text, logprobs=[])

    def ending(self) -> list[dict[str, Any]]:
        item = self._message(self._status, [self._part])
        return [
            self._event("output_text.done", **self._place, text=self._part["text"], logprobs=[]),
            self._event("content_part.done", **self._place, part=self._part),
            self._event("output_item.done", output_index=0, item=item),
            self._event(self._status, response=self.whole()),
        ]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._told += 1
        return {"type": f"response.{kind}", "sequence_number": self._told - 1, **fields}

    @property
    def _place(self) -> dict[str, Any]:
        """Where its one part is: in one item."""
        return {"output_index": 0, "content_index": 0, "item_id": self._message("", [])["id"]}

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
        body = self.body
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
        return super().usage() | {"output_tokens_details": {"reasoning_tokens": 0}}
