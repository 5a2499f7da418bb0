"""The HTTP server: OpenAI's completions and embeddings, fill-mask, and a page to try them.

- Errors have OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`: 400 for what a request gets wrong, 404
  for an unknown model, 413 for a body that is too large, 429 with Retry-After for a full queue, 503 while shutting down.
- SIGTERM and SIGINT drain: nothing new is accepted, accepted requests are answered, then the process ends with 0.
- No log line holds the text of a request.
"""

import asyncio
import contextlib
import errno
import json
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.console import say
from ..core.errors import Failed, ThroughlineError, WrongUse
from ..core.version import version
from .api_types import CompletionBody, EmbeddingBody, FillMaskBody
from .completions import Answers
from .scheduler import Busy
from .served import Limits, ServedModel

DRAIN_S = 60  # an answer that takes longer than this after SIGTERM is cut


def build_app(models: list[ServedModel], limits: Limits) -> FastAPI:
    """The application; engines start with it and drain when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for model in models:
            await asyncio.to_thread(model.start)
        yield
        for model in models:
            model.ready = False
            await asyncio.to_thread(model.engine.drain, DRAIN_S)

    app = FastAPI(title="Throughline", version=version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, limit=limits.body_bytes)
    _add_error_handlers(app)
    _add_status(app, models)
    _add_completions(app, models)
    _add_encoder(app, models)
    return app


def _add_status(app: FastAPI, models: list[ServedModel]) -> None:
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(
            page, headers={"Content-Security-Policy": "default-src 'self' 'unsafe-inline'; img-src data:"}
        )

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Every model answers; 503 while one warms up or the server drains."""
        waiting = [model.name for model in models if not model.ready]
        counts = {name: {m.name: getattr(m.engine, name) for m in models} for name in ("accepted", "queued")}
        return JSONResponse({"ready": not waiting, "waiting_for": waiting, **counts}, 503 if waiting else 200)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The served models and which endpoints take them."""
        return {"object": "list", "data": [model.describe() for model in models]}


def _add_completions(app: FastAPI, models: list[ServedModel]) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> JSONResponse | StreamingResponse:
        """Continue a text with a GPT; `stream` sends server-sent events."""
        model = pick(models, body.model, "/v1/completions")
        requests, prompts = await asyncio.to_thread(model.jobs, body)
        answers = Answers(model, body, requests, prompts)
        pieces = model.generate(requests, whole=not body.stream)
        if body.stream:
            # The first piece is awaited here: a full queue is a 429, not an error inside a 200.
            first = await anext(pieces)
            return StreamingResponse(_events(answers.events(first, pieces)), media_type="text/event-stream")
        await unless_gone(request, answers.collect(pieces))
        return JSONResponse(answers.whole())


def _add_encoder(app: FastAPI, models: list[ServedModel]) -> None:
    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingBody) -> JSONResponse:
        """Embed texts with a BERT: the mean of the last hidden states, scaled to length 1."""
        model = pick(models, body.model, "/v1/embeddings")
        vectors, tokens = await model.embed(body)
        data = [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})

    @app.post("/v1/fill-mask", response_model=None)
    async def fill_mask(body: FillMaskBody) -> JSONResponse:
        """The most probable tokens for every mask in a text, with a BERT."""
        model = pick(models, body.model, "/v1/fill-mask")
        filled, tokens = await model.fill_mask(body)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", **filled, "model": model.name, "usage": usage})


def pick(models: list[ServedModel], name: str | None, endpoint: str) -> ServedModel:
    """The model of that name, or the only one that the endpoint fits. Raises HTTPException 404 or WrongUse."""
    fitting = [model for model in models if endpoint in model.describe()["endpoints"]]
    if name is None:
        if len(fitting) == 1:
            return fitting[0]
        why = (
            f"{len(fitting)} models answer {endpoint}: {', '.join(model.name for model in fitting) or 'none'}"
        )
        raise WrongUse("which model?", where="model", why=why, fix="give a name from /v1/models")
    found = next((model for model in models if model.name == name), None)
    if found is None:
        raise HTTPException(404, f"there is no model {name!r}; /v1/models lists them")
    if found not in fitting:
        kind = "GPT" if found.causal else "BERT"
        fix = f"it answers {' and '.join(found.describe()['endpoints'])}"
        raise WrongUse(f"{name} is a {kind} and does not answer {endpoint}", where="model", fix=fix)
    return found


async def unless_gone(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, and give it up when the client goes away: its slots are then free for others."""
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(
        request.receive()
    )  # the body is read, so the next message says that the client left
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise HTTPException(499, "the client went away")  # for the record only: nobody reads it
        doing.result()
    finally:
        doing.cancel()
        gone.cancel()


async def _events(answers: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[str]:
    """Server-sent events; an error in the middle is told as an event."""
    async with contextlib.aclosing(answers):
        try:
            async for answer in answers:
                yield f"data: {json.dumps(answer, ensure_ascii=False)}\n\n"
        except Failed as error:
            yield f"data: {json.dumps(error_body(str(error), 'server_error'))}\n\n"
    yield "data: [DONE]\n\n"


# --- errors and limits ---


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        problems: dict[
            str, list[str]
        ] = {}  # by field: a field of several possible types has a message for each
        for item in error.errors():
            field = item["loc"][1] if len(item["loc"]) > 1 else "body"
            problems.setdefault(field if isinstance(field, str) else "body", []).append(
                item["msg"]
            )  # a number: where JSON ends
        message = "; ".join(
            f"{field}: {' or '.join(dict.fromkeys(texts))}" for field, texts in problems.items()
        )
        return JSONResponse(error_body(message, "invalid_request_error", next(iter(problems))), 400)

    @app.exception_handler(AnyHTTPException)
    async def http(request: Request, error: AnyHTTPException) -> JSONResponse:
        return JSONResponse(
            error_body(str(error.detail), "invalid_request_error"), error.status_code, headers=error.headers
        )

    @app.exception_handler(ThroughlineError)
    async def ours(request: Request, error: ThroughlineError) -> JSONResponse:
        if isinstance(error, Busy):
            status = 503 if error.shutting_down else 429
            kind = "server_error" if error.shutting_down else "rate_limit_error"
            return JSONResponse(
                error_body(str(error), kind), status, headers={"Retry-After": str(error.retry_after_s)}
            )
        if isinstance(error, WrongUse):
            parts = [error.what, error.why, error.fix]
            message = "; ".join(part for part in parts if part)
            return JSONResponse(error_body(message, "invalid_request_error", error.where or None), 400)
        return JSONResponse(error_body(str(error), "server_error"), 500)


class BodyLimit:
    """Refuses request bodies above `limit` bytes with 413, whether or not they say how long they are."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limit:
            await self._refuse(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                raise HTTPException(413, f"the request body is larger than {self.limit:,} bytes")
            return message

        await self.app(scope, counted, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the request body is larger than {self.limit:,} bytes"
        await JSONResponse(error_body(message, "invalid_request_error"), 413)(scope, receive, send)


# --- running ---


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before any model is loaded. Raises WrongUse when the port is taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio switches Nagle's algorithm off only then: it costs 40 ms a request.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        other_port = "give another port with --port (0 = any free one)"
        fix = {errno.EADDRINUSE: f"stop what is using it, or {other_port}", errno.EACCES: other_port}
        raise WrongUse(
            f"cannot listen on port {port}", where=f"{host}:{port}", why=(error.strerror or str(error)).lower(),
            fix=fix.get(error.errno or 0, "give an address of this machine with --host"),
        ) from error  # fmt: skip
    return listener


class DrainingServer(uvicorn.Server):
    """uvicorn, ending with exit code 0 after a drain instead of dying of the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        yield
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _drain(self) -> None:
        if not self.should_exit:
            say("draining: accepted requests are answered, new ones are not accepted")
        self.force_exit = self.should_exit  # a second signal ends it at once
        self.should_exit = True


def run(models: list[ServedModel], limits: Limits, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    config = uvicorn.Config(
        build_app(models, limits), log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=30, server_header=False, ws="none",
    )  # fmt: skip
    host, port = listener.getsockname()[:2]
    say(
        f"serving {', '.join(model.name for model in models)} at http://{f'[{host}]' if ':' in host else host}:{port}/"
    )
    began_s = time.monotonic()
    try:
        asyncio.run(DrainingServer(config).serve(sockets=[listener]))
    except SystemExit as error:  # of uvicorn, with a code that means something else here
        raise Failed(
            "the server did not start", why="a model failed on its first input; the message is above"
        ) from error
    say(f"served for {time.monotonic() - began_s:.0f} s")
