"""The bodies of /v1/completions answers, streamed or whole, in OpenAI's shape.

Added to it: `token_ids` in every choice, which the web page's token view and reproducible tests need.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from .api_types import CompletionBody
from .generation import Piece, Request, Token
from .served import Pieces, ServedModel


class Answers:
    """All choices of one request as they grow."""

    def __init__(
        self, model: ServedModel, body: CompletionBody, requests: list[Request], prompts: list[str]
    ) -> None:
        self._model, self._body, self._requests = model, body, requests
        self._head: dict[str, Any] = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}
        self._head |= {"created": int(time.time()), "model": model.name}
        self._echo = prompts if body.echo else [""] * len(prompts)
        self._texts = list(self._echo)
        self._tokens: list[list[tuple[Token, int]]] = [[] for _ in prompts]  # with the text offset of each
        self._finish: list[str | None] = [None] * len(prompts)

    def add(self, number: int, piece: Piece) -> None:
        """Take a piece of one answer in."""
        if piece.token is not None:
            self._tokens[number].append((piece.token, len(self._texts[number])))
        self._texts[number] += piece.text
        self._finish[number] = piece.finish

    async def collect(self, pieces: Pieces) -> None:
        """Take all pieces in."""
        async with aclosing(pieces):
            async for number, piece in pieces:
                self.add(number, piece)

    def whole(self) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [
            self._choice(i, self._texts[i], self._tokens[i], self._finish[i]) for i in range(len(self._texts))
        ]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, first: tuple[int, Piece], pieces: Pieces) -> AsyncGenerator[dict[str, Any], None]:
        """One body per piece, then one with the usage when it was asked for."""
        for number, text in enumerate(self._echo):
            if text:
                yield {**self._head, "choices": [self._choice(number, text, [], None)]}
        async with aclosing(_after(first, pieces)) as all_pieces:
            async for number, piece in all_pieces:
                self.add(number, piece)
                tokens = self._tokens[number][-1:] if piece.token is not None else []
                yield {**self._head, "choices": [self._choice(number, piece.text, tokens, piece.finish)]}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    def _choice(
        self, number: int, text: str, tokens: list[tuple[Token, int]], finish: str | None
    ) -> dict[str, Any]:
        logprobs = None if self._body.logprobs is None else self._logprobs(tokens)
        ids = [token.id for token, _ in tokens]
        return {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
            "token_ids": ids,
        }

    def _logprobs(self, tokens: list[tuple[Token, int]]) -> dict[str, Any]:
        name = self._model.token_text
        return {
            "tokens": [name(token.id) for token, _ in tokens],
            "token_logprobs": [token.logprob for token, _ in tokens],
            "top_logprobs": [self._by_text(token) for token, _ in tokens],
            "text_offset": [offset for _, offset in tokens],
        }

    def _by_text(self, token: Token) -> dict[str, float]:
        """The most probable tokens by text; parts of characters look alike, the most probable one keeps the name."""
        values: dict[str, float] = {}
        for i, value in token.top:
            values.setdefault(self._model.token_text(i), value)
        return values

    def _usage(self) -> dict[str, int]:
        prompts = sum(len(request.prompt_ids) for request in self._requests[:: self._body.n])
        made = sum(map(len, self._tokens))
        return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


async def _after(first: tuple[int, Piece], rest: Pieces) -> Pieces:
    """The first piece, which was awaited already, and the others; closing this closes them."""
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece
