"""What stands before every endpoint: request ids, API keys, limits of a body, errors as JSON, the access log.

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`: 400 for what a request gets
wrong, 401 for a missing or wrong key, 404 for an unknown model, 408 for a body that does not come, 413 for one
that is too large, 429 with Retry-After for a full queue, 503 while a model is not there, 504 for an answer
that takes too long.
"""

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
from .telemetry import Watch

OPEN = ("/", "/health", "/ready")  # without a key: the page holds no secret, probes have no key
KINDS = {401: "authentication_error", 429: "rate_limit_error"}  # of errors, by status
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
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        watch = scope.setdefault("state", {})["watch"] = Watch(self.server.telemetry)
        status: int | None = None

        async def answer(message: Message) -> None:
            """Adds the headers of every answer."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(b"x-request-id", name.encode("latin-1")), (b"x-content-type-options", b"nosniff")]
                # A body that is not read to its end would be taken for the next request.
                if self.server.draining.is_set() or status in (408, 413):
                    more.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        try:
            await (self._refuse(scope, headers) or self.app)(scope, receive, answer)
        except Exception as error:
            watch.fault = type(error).__name__
            warn(f"request {name}: {watch.fault}")
            if status is None:
                message = f"a fault of the server; its log has the request id {name}"
                await error_response(500, message)(scope, receive, answer)
        finally:
            path = getattr(scope.get("route"), "path", None)
            client = (scope.get("client") or [None])[0]
            said = {"client": client, "method": scope["method"], "path": path or scope["path"][:200]}
            # 499: the client left before there was an answer
            self.server.telemetry.answered(watch, path or "other", status or 499, id=name, **said)

    def _refuse(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Response | None:
        if not self._keys or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return None
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        # All are compared, in constant time: the time of an answer tells nothing of how much was right.
        fits = [hmac.compare_digest(given, known) for known in self._keys]
        if kind.lower() == "bearer" and any(fits):
            return None
        message = "a valid API key is needed: Authorization: Bearer KEY"
        return error_response(401, message, headers={"WWW-Authenticate": "Bearer"})


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = "invalid_api_key" if status == 401 else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error as an answer."""
    return json_response(error_body(status, message, param), status, headers)


def told(error: ThroughlineError) -> Response:
    """One of our errors as an answer; what the user did not cause says nothing of paths."""
    message = "; ".join(part for part in (error.what, error.why, error.fix) if part)
    wrong = isinstance(error, WrongUse)
    return error_response(400 if wrong else 500, message, (error.where or None) if wrong else None)


async def _invalid(request: Request, error: Any) -> Response:
    problems: dict[str, list[str]] = {}  # a field of several possible types has a message for each
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        field = item["loc"][0] if item["loc"] else "body"
        problems.setdefault(field if isinstance(field, str) else "body", []).append(item["msg"])
    said = [f"{field}: {' or '.join(dict.fromkeys(texts))}" for field, texts in problems.items()]
    return error_response(400, "; ".join(said), next(iter(problems)))


async def _http(request: Request, error: Any) -> Response:
    return error_response(error.status_code, str(error.detail), headers=error.headers)


async def _ours(request: Request, error: Any) -> Response:
    response = told(error)
    if response.status_code == 500:
        request.state.watch.fault = type(error).__name__
    return response


# Everything that can go wrong below the guard, as JSON.
ON_ERROR: dict[Any, Any] = {ValidationError: _invalid, HTTPException: _http, ThroughlineError: _ours}
