"""What stands before every endpoint: request ids, API keys, limits of a body, errors as JSON, the access log.

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`: 400 for what a request gets
wrong, 401 for a missing or wrong key, 404 for an unknown model, 408 for a body that does not come, 413 for one
that is too large, 429 with Retry-After for a full queue, 503 while a model is not there, 504 for an answer
that takes too long.
"""

import asyncio
import hashlib
import hmac
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.console import warn
from ...core.errors import ThroughlineError, WrongUse
from .calls import Server, json_response
from .remote import Busy
from .telemetry import Watch

OPEN = ("/", "/health", "/ready")  # without a key: the page holds no secret, probes have no key
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Guard:
    """The ASGI layer around the endpoints."""

    def __init__(self, app: ASGIApp, server: Server, keys: Sequence[str]) -> None:
        self.app, self.server = app, server
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self.server)
        status = 499  # for the record, when the client left
        try:
            if refused := self._refuse(scope, exchange):
                await refused(scope, receive, exchange.send)
            else:
                await self.app(scope, exchange.receive, exchange.send)
            status = exchange.status or status
        except Exception as error:
            status = exchange.status or 500
            exchange.watch.fault = type(error).__name__
            warn(f"request {exchange.id}: {type(error).__name__}")
            if exchange.status is None:
                message = f"a fault of the server; its log has the request id {exchange.id}"
                await error_response(message, "server_error", 500)(scope, receive, exchange.send)
        finally:
            path = getattr(scope.get("route"), "path", None)
            client = (scope.get("client") or [None])[0]
            said = {"client": client, "method": scope["method"], "path": path or scope["path"][:200]}
            self.server.telemetry.answered(exchange.watch, path or "other", status, id=exchange.id, **said)

    def _refuse(self, scope: Scope, exchange: "Exchange") -> Response | None:
        if self._keys and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            kind, _, key = exchange.headers.get(b"authorization", b"").decode("latin-1").partition(" ")
            given = hashlib.sha256(key.strip().encode()).digest()
            # All are compared, in constant time: the time of an answer tells nothing of how much was right.
            fits = [hmac.compare_digest(given, known) for known in self._keys]
            if kind.lower() != "bearer" or not any(fits):
                message = "a valid API key is needed: Authorization: Bearer KEY"
                asked = {"WWW-Authenticate": "Bearer"}
                return error_response(message, "authentication_error", 401, None, "invalid_api_key", asked)
        length = exchange.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.server.limits.body_bytes:
            return error_response(exchange.too_large, "invalid_request_error", 413)
        return None


class Exchange:
    """One request and its answer, as the guard sees them pass."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, server: Server) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        self.watch = scope.setdefault("state", {})["watch"] = Watch(server.telemetry)
        self.status: int | None = None
        self.too_large = f"the request body is larger than {server.limits.body_bytes:,} bytes"
        self._receive, self._send, self._server = receive, send, server
        self._read, self._complete = 0, False
        self._until_s = asyncio.get_running_loop().time() + server.limits.body_s

    async def receive(self) -> Message:
        """A part of the body, counted and timed; then what comes after it."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until_s):
                message = await self._receive()
        except TimeoutError:
            why = f"the body did not come within {self._server.limits.body_s:g} s"
            raise HTTPException(408, why) from None
        self._read += len(message.get("body", b""))
        if self._read > self._server.limits.body_bytes:
            raise HTTPException(413, self.too_large)
        self._complete = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Adds the headers of every answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            more = [(b"x-request-id", self.id.encode("latin-1")), (b"x-content-type-options", b"nosniff")]
            # A body that is not read to its end would be taken for the next request.
            if self._server.draining.is_set() or self.status in (408, 413):
                more.append((b"connection", b"close"))
            message["headers"] = [*message.get("headers", []), *more]
        await self._send(message)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    message: str,
    kind: str,
    status: int,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error as an answer."""
    return json_response(error_body(message, kind, param, code), status, headers)


def told(error: ThroughlineError) -> Response:
    """One of our errors as an answer; what the user did not cause says nothing of paths."""
    if isinstance(error, Busy):
        kind, status = ("server_error", 503) if error.absent else ("rate_limit_error", 429)
        later = {"Retry-After": str(error.retry_after_s)}
        return error_response(f"{error.what}; {error.fix}", kind, status, headers=later)
    message = "; ".join(part for part in (error.what, error.why, error.fix) if part)
    if isinstance(error, WrongUse):
        return error_response(message, "invalid_request_error", 400, error.where or None)
    return error_response(message, "server_error", 500)


async def _invalid(request: Request, error: Any) -> Response:
    problems: dict[str, list[str]] = {}  # a field of several possible types has a message for each
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        field = item["loc"][0] if item["loc"] else "body"
        problems.setdefault(field if isinstance(field, str) else "body", []).append(item["msg"])
    said = [f"{field}: {' or '.join(dict.fromkeys(texts))}" for field, texts in problems.items()]
    return error_response("; ".join(said), "invalid_request_error", 400, next(iter(problems)))


async def _http(request: Request, error: Any) -> Response:
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return error_response(str(error.detail), kind, error.status_code, headers=error.headers)


async def _ours(request: Request, error: Any) -> Response:
    response = told(error)
    if response.status_code == 500:
        request.state.watch.fault = type(error).__name__
    return response


# Everything that can go wrong below the guard, as JSON.
ON_ERROR: dict[Any, Any] = {ValidationError: _invalid, HTTPException: _http, ThroughlineError: _ours}
