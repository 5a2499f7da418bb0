"""What stands before every endpoint: request ids, API keys, limits of a body, errors as JSON, the access log.

Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`: 400 for what a request gets
wrong, 401 for a missing or wrong key, 404 for an unknown model, 408 for a body that does not come, 413 for one
that is too large, 429 with Retry-After for a full queue, 503 while a model is not there, 504 for an answer
that takes too long.
"""

import asyncio
import contextlib
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.console import warn
from ...core.errors import ThroughlineError, WrongUse
from .calls import Server, json_response
from .limits import Key, find_key
from .telemetry import Watch

OPEN = ("/", "/health", "/ready")  # without a key: the page holds no secret, probes have no key
KINDS = {401: "authentication_error", 429: "rate_limit_error"}  # of errors, by status
LINGER_S = 2.0  # for the rest of a body that nobody reads
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Guard:
    """The ASGI layer around the endpoints."""

    def __init__(self, app: ASGIApp, server: Server, keys: Sequence[Key], hosts: Collection[str]) -> None:
        self.app, self.server, self._keys = app, server, keys
        self._everybody = Key()
        self._hosts = {*hosts}  # names by which it may be called, in lower case; none: by any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
        watch = scope.setdefault("state", {})["watch"] = Watch(self.server.telemetry)
        watch.key, watch.parent = self._everybody, headers.get(b"traceparent", b"").decode("latin-1")
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        status: int | None = None

        async def answer(message: Message) -> None:
            """Adds the headers of every answer."""
            nonlocal status
            unread = has_body and not watch.body_read
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(b"x-request-id", name.encode("latin-1")), (b"x-content-type-options", b"nosniff")]
                # A body that is not read to its end would be taken for the next request.
                if self.server.draining.is_set() or unread:
                    more.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", []), *more]
            elif unread and not message.get("more_body"):
                # A connection that is closed with something unread in it is reset, and the answer lost.
                await send({**message, "more_body": True})
                await _pass_over(receive)
                message = {"type": "http.response.body"}
            await send(message)

        try:
            await (self._refuse(scope, headers, watch) or self.app)(scope, receive, answer)
        except Exception as error:
            watch.fault = type(error).__name__
            warn(f"request {name}: {watch.fault}")
            if status is None:
                message = f"a fault of the server; its log has the request id {name}"
                await error_response(500, message)(scope, receive, answer)
        finally:
            self.server.bodies.held -= watch.held
            path = getattr(scope.get("route"), "path", None)
            client = (scope.get("client") or [None])[0]
            said = {"client": client, "method": scope["method"], "path": path or scope["path"][:200]}
            # 499: the client left before there was an answer
            self.server.telemetry.answered(watch, path or "other", status or 499, id=name, **said)

    def _refuse(self, scope: Scope, headers: Mapping[bytes, bytes], watch: Watch) -> Response | None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and re.sub(r":[0-9]*$", "", host) not in self._hosts:
            return error_response(403, "this server is not called so; --allow-host NAME lets a name in")
        if not self._keys or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return None
        key = find_key(self._keys, headers.get(b"authorization", b"").decode("latin-1"))
        if key is None:
            message = "a valid API key is needed: Authorization: Bearer KEY"
            return error_response(401, message, headers={"WWW-Authenticate": "Bearer"})
        watch.key = key
        try:
            key.begin()
        except HTTPException as error:
            return error_response(error.status_code, str(error.detail), headers=error.headers)
        return None


async def _pass_over(receive: Receive) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body"):
                pass


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
    """One of our errors as an answer; what the user did not cause says nothing of our insides."""
    wrong = isinstance(error, WrongUse)
    message = "; ".join(part for part in (error.what, error.why if wrong else "", error.fix) if part)
    return error_response(400 if wrong else 500, message, (error.where or None) if wrong else None)


async def _http(request: Request, error: Any) -> Response:
    message = str(error.detail)
    if message == "Not Found":  # Starlette's own: no route
        message = f"there is no {request.url.path[:200]}; /openapi.json lists the endpoints, / is a page to try them"
    return error_response(error.status_code, message, headers=error.headers)


async def _ours(request: Request, error: Any) -> Response:
    response = told(error)
    if response.status_code == 500:
        request.state.watch.fault = type(error).__name__
    return response


# Everything that can go wrong below the guard, as JSON.
ON_ERROR: dict[Any, Any] = {HTTPException: _http, ThroughlineError: _ours}
