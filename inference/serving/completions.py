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
from .api_types import ChatBody, CompletionBody, Conversation, ResponsesBody
from .calls import INLINE, Call, error_body, size_of, told
from .generation import Job, TextDelta
from .messages import Message
from .served import Deltas
from .spelling import Spelled, Speller, spelled_bytes, spelled_prompt

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold it back


async def completions(call: Call, body: CompletionBody) -> Response | dict[str, Any]:
    """Continue a text with a GPT; `stream` sends server-sent events."""
    answers = await call.beside(
        size_of(body.prompt), lambda: Answers(call, body, call.model.completion(body))
    )
    return await generated(call, answers)


async def chat(call: Call, body: ChatBody) -> Response | dict[str, Any]:
    """Answer a conversation with a GPT that has a chat template."""
    most = body.max_completion_tokens or body.max_tokens
    variables = body.variables(body.reasoning_effort, body.verbosity)
    jobs = await conversed(call, body, body.messages, variables, most)
    return await generated(call, ChatAnswers(call, body, jobs))


async def responses(call: Call, body: ResponsesBody) -> Response | dict[str, Any]:
    """Answer a text or a conversation with a GPT that has a chat template; `stream` sends server-sent events."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages += [Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    effort = body.reasoning.effort if body.reasoning else None
    variables = body.variables(effort, body.text.verbosity if body.text else None)
    jobs = await conversed(call, body, messages, variables, body.max_output_tokens)
    return await generated(call, ResponseAnswers(call, body, jobs))


async def conversed(
    call: Call,
    body: Conversation,
    messages: Sequence[Message],
    variables: dict[str, Any],
    max_tokens: int | None,
) -> list[Job]:
    """The job of answering a conversation with at most so many tokens (None: what fits)."""
    turns = [message.turn() for message in messages]
    characters = sum(message.characters for message in messages)
    call.model.reader.check_characters(characters, "messages")
    job = await call.beside(INLINE + 1, lambda: call.model.conversation(body, turns, variables, max_tokens))
    return [job]


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
    """Some of a choice: its text, its token ids, the tokens whose probabilities are told, and why it ended."""

    number: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Spelled] = field(default_factory=list)
    finish: str | None = None


class Answers:
    """All choices of one request as they grow."""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    counted = "prompt", "completion"  # names of what was read and made

    def __init__(self, call: Call, body: Any, jobs: list[Job]) -> None:
        self.body, self.jobs, self._watch, self._model = body, jobs, call.watch, call.model
        self._head: dict[str, Any] = {"id": f"{self.prefix}{uuid.uuid4().hex}"}
        self._head |= {"created": int(time.time()), "model": call.model.name}
        self._choices: list[Piece] = []
        self._spellers: list[Speller | None] = []  # of each choice, where probabilities are told
        self.size = 0  # characters and numbers of a whole answer
        echo = isinstance(body, CompletionBody) and body.echo
        for place, job in enumerate(jobs):
            text = self._echo(body.prompt[place], job) if echo else ""
            for _ in range(job.n):
                speller = None
                if job.logprobs is not None:
                    speller = Speller(self._model.tokenizer, job, self._model.ends_of(job), len(text))
                self._spellers.append(speller)
                self._choices.append(Piece(len(self._choices), text))
                self.size += len(text)

    def _echo(self, prompt: str | list[int], job: Job) -> str:
        """The text of a prompt: as it was sent, or that of the ids which are read."""
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return prompt
        return self._model.tokenizer.decode(job.prompt_ids, job.skip_special_tokens)

    def add(self, number: int, delta: TextDelta) -> Piece:
        """Take a delta of one answer in."""
        choice, speller = self._choices[number], self._spellers[number]
        tokens: list[Spelled] = []
        token_ids = [] if delta.token is None else [delta.token.id]
        if speller is not None:
            if delta.prompt:
                tokens += spelled_prompt(self._model.tokenizer, delta.prompt, choice.text)
            if delta.token is not None:
                tokens += speller.push(delta.token)
            if delta.finish:
                tokens += speller.finish()
            token_ids = [spelled.token.id for spelled in tokens]
        choice.text += delta.text
        choice.finish = delta.finish
        if not self.body.stream:
            choice.tokens += tokens
            choice.token_ids += token_ids
            self.size += len(token_ids) + sum(2 + len(spelled.token.top) for spelled in tokens)
        return Piece(number, delta.text, token_ids, tokens, delta.finish)

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
        options = self.body.stream_options
        told = {"usage": self.usage()} if options is not None and options.continuous_usage_stats else {}
        return self._body_of(self._chunk(piece)) | told

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
            "token_ids": piece.token_ids,
        }

    _chunk = _choice

    def _logprobs(self, tokens: list[Spelled]) -> dict[str, Any]:
        return {
            "tokens": [spelled.text for spelled in tokens],
            "token_logprobs": [spelled.token.logprob for spelled in tokens],
            "top_logprobs": [self._by_text(spelled) for spelled in tokens],
            "text_offset": [spelled.offset for spelled in tokens],
        }

    def _by_text(self, spelled: Spelled) -> dict[str, float] | None:
        """The most probable tokens by text, the best of those that look alike; None where nothing predicts."""
        if spelled.token.logprob is None:
            return None
        values: dict[str, float] = {}
        for token_id, value in spelled.token.top:
            values.setdefault(self._text_of(token_id, spelled), value)
        return values

    def _text_of(self, token_id: int, spelled: Spelled) -> str:
        """The text of a token that may stand in the place of this one; its own text for itself."""
        return spelled.text if token_id == spelled.token.id else self._model.tokenizer.token_text(token_id)

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
        for spelled in piece.tokens:
            top = [self._token(token_id, value, spelled) for token_id, value in spelled.token.top[:most]]
            own = self._token(spelled.token.id, spelled.token.logprob, spelled)
            content.append(own | {"top_logprobs": top})
        logprobs = {"content": content, "refusal": None} if self.body.logprobs else None
        return {"logprobs": logprobs, "finish_reason": piece.finish}

    def _token(self, token_id: int, logprob: float | None, spelled: Spelled) -> dict[str, Any]:
        text = self._text_of(token_id, spelled)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": spelled_bytes(self._model.tokenizer, token_id, text),
        }


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
        sampling = self.jobs[0].sampling
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
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "metadata": body.metadata or {},
            "text": body.text or {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "store": False,
        }

    def usage(self) -> dict[str, Any]:
        return super().usage() | {"output_tokens_details": {"reasoning_tokens": 0}}
