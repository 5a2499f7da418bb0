"""/v1/responses: OpenAI's newer shape of a conversation, text in and text out. Nothing is stored: a client sends what
was said before.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from .api_types import ChatMessage, ResponsesBody
from .calls import Call
from .completions import Answers, after, conversed, generated
from .generation import TextDelta
from .served import Deltas

ITEM = {"output_index": 0, "content_index": 0}  # there is one, with one part


async def responses(call: Call, body: ResponsesBody) -> Response | dict[str, Any]:
    """Answer a text or a conversation with a GPT that has a chat template; `stream` sends server-sent events."""
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
    else:
        messages += [ChatMessage(role=item.role, content=item.text()) for item in body.input]
    jobs = await conversed(call, body, messages, body.max_output_tokens)
    return await generated(call, body, ResponseAnswers(call.model, body, jobs))


class ResponseAnswers(Answers):
    """The one answer as it grows."""

    prefix, kind = "resp_", "response"

    def whole(self) -> dict[str, Any]:
        return self._response(self._status, [self._message(self._status, [self._part])])

    async def events(
        self, first: tuple[int, TextDelta | None], deltas: Deltas
    ) -> AsyncGenerator[dict[str, Any] | None, None]:
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
        cut = status == "incomplete"
        return {
            "id": self._head["id"],
            "object": self.kind,
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": None if status == "in_progress" else self.usage(),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "temperature": body.temperature,
            "top_p": body.top_p,
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
