"""The application: the endpoints (OpenAI's completions, chat completions, responses and embeddings, fill-mask,
classify, rerank, tokenize, health and metrics, a page to try them), and what stands before every one of them: request
ids, API keys, errors as JSON, the access log. No log line holds the text of a request.
"""

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from inspect import getdoc
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.artifact import version
from ...core.console import warn
from ...core.errors import ThroughlineError, WrongUse
from .accounts import Watch
from .api_types import LoadBody, ModelBody
from .calls import Endpoint, Server, json_response, post, told, with_body
from .completions import chat, completions, responses
from .keys import Key, find_key
from .readings import classify, detokenize, embed, embeddings, fill_mask, rank, rerank, score, tokenize

OPEN = ("/", "/health", "/ready")  # without a key: the page holds no secret, probes have no key
LINGER_S = 2.0  # for the rest of a body that nobody reads
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# First come what is asked most: routes are tried in turn.
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/embeddings": embeddings,
    "/v1/completions": completions,
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/fill-mask": fill_mask,
    "/v1/classify": classify,
    "/v1/rerank": rerank,
    "/v1/score": score,
    "/embed": embed,
    "/rerank": rank,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


# The scope that a key needs; any valid key may ask for what is neither here nor an endpoint of a model.
SCOPE_OF = {"/metrics": "metrics", "/models/load": "admin", "/models/unload": "admin"}
SCOPE_OF |= dict.fromkeys(ENDPOINTS, "inference")


def build_app(
    server: Server,
    keys: Sequence[Key] = (),
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
    open_metrics: bool = False,
) -> Starlette:
    """The application, with its models' life. `origins` of web pages may call, by the names `hosts` (none: any);
    `open_metrics`: /metrics needs no key. `keys` may change while it runs.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(server.start())
        yield
        starting.cancel()
        await server.catalogue.close()

    routes = [*(post(server, path, endpoint) for path, endpoint in ENDPOINTS.items()), *_status(server)]
    routes += _management(server) if server.catalogue.directory else []
    routes.append(Route("/openapi.json", json_response(openapi(routes)), methods=["GET"]))
    on_error: dict[Any, Any] = dict.fromkeys((HTTPException, ThroughlineError), _failed)
    layers = [Middleware(CORSMiddleware, origins, ["GET", "POST"], ["*"])] if origins else []
    layers.append(Middleware(Guard, server, keys, hosts, routes, open_metrics))
    return Starlette(routes=routes, middleware=layers, exception_handlers=on_error, lifespan=lifespan)


def _management(server: Server) -> list[Route]:
    """As llama.cpp's server has it, but for the answer to `load`, which waits for the model."""

    async def load(request: Request, body: LoadBody) -> Response:
        """Open a model by the name of its directory or file; with `path` in the place of the one that has the name."""
        await server.catalogue.load(body.served_name, body.path)
        return json_response({"success": True})

    async def unload(request: Request, body: ModelBody) -> Response:
        """End a model when it has answered what it was asked."""
        server.catalogue.unload(body.model)
        return json_response({"success": True})

    return [with_body(server, f"/models/{endpoint.__name__}", endpoint) for endpoint in (load, unload)]


def _status(server: Server) -> list[Route]:
    policy = "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    index = HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def health(request: Request) -> Response:
        """The process answers."""
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        """Every model that could be opened answers; 503 while one loads or the server drains."""
        failed = {model.name: model.failure.what for model in server.models if model.failure is not None}
        waiting = [model.name for model in server.models if not model.ready and model.name not in failed]
        draining = server.draining.is_set()
        fit = not waiting and not draining and len(failed) < max(1, len(server.models))
        state: dict[str, Any] = {"ready": fit, "waiting_for": waiting, "draining": draining, "failed": failed}
        state["watch_errors"] = sorted(server.catalogue.watch_errors)  # without reasons, which name places
        for name in ("accepted", "queued", "active"):
            state[name] = {model.name: model.count(name) for model in server.models}
        return json_response(state, 200 if fit else 503)

    async def metrics(request: Request) -> Response:
        """Prometheus's text format."""
        return Response(server.telemetry.page(), media_type="text/plain; version=0.0.4")

    async def list_models(request: Request) -> Response:
        """The models, and which endpoints take those that are served."""
        return json_response({"object": "list", "data": server.catalogue.describe()})

    async def one_model(request: Request) -> Response:
        """One served model."""
        return json_response(server.catalogue.find(request.path_params["name"]).describe())

    return [
        Route("/", index, methods=["GET"], include_in_schema=False),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
    ]


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI description of these routes."""
    shown = [route for route in routes if route.include_in_schema]
    kinds = [get_type_hints(route.endpoint).get("body") for route in shown]
    known = [kind for kind in kinds if kind]
    refs, schemas = msgspec.json.schema_components(known, ref_template="#/components/schemas/{name}")
    shapes = dict(zip(known, refs))
    paths: dict[str, Any] = {}
    for route, kind in zip(shown, kinds):
        about: dict[str, Any] = {"operationId": route.name, "description": getdoc(route.endpoint)}
        about["summary"] = route.name.replace("_", " ").capitalize()
        about["responses"] = {"200": {"description": "The answer."}}
        if route.param_convertors:
            given = {"in": "path", "required": True, "schema": {"type": "string"}}
            about["parameters"] = [{"name": name, **given} for name in route.param_convertors]
        if kind:
            content = {"application/json": {"schema": shapes[kind]}}
            about["requestBody"] = {"required": True, "content": content}
            about["responses"]["4XX"] = {"description": "An error in OpenAI's shape."}
        paths[route.path_format] = {"post" if kind else "get": about}
    info = {"title": "Throughline", "version": version()}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


class Guard:
    """The ASGI layer around the endpoints."""

    def __init__(
        self,
        app: ASGIApp,
        server: Server,
        keys: Sequence[Key],
        hosts: Collection[str],
        routes: Sequence[Route],
        open_metrics: bool,
    ) -> None:
        self.app, self.server, self._keys, self._routes = app, server, keys, routes
        self._everybody = Key()
        self._hosts = {*hosts}  # names by which it may be called, in lower case; none: by any
        self._open = (*OPEN, "/metrics") if open_metrics else OPEN

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
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while (await receive()).get("more_body"):
                            pass
                message = {"type": "http.response.body"}
            await send(message)

        try:
            self._let_in(scope, headers, watch)
            await self.app(scope, receive, answer)
        except HTTPException as error:
            watch.refused(error.detail)
            await told(error)(scope, receive, answer)
        except Exception as error:
            watch.fault = type(error).__name__
            warn(f"request {name}: {watch.fault}")
            if status is None:
                message = f"a fault of the server; its log has the request id {name}"
                await told(HTTPException(500, message))(scope, receive, answer)
        finally:
            self.server.held -= watch.held
            path = getattr(scope.get("route"), "path", None) or self._endpoint(scope)
            client = (scope.get("client") or [None])[0]
            said = {"client": client, "method": scope["method"], "path": path or scope["path"][:200]}
            # 499: the client left before there was an answer
            self.server.telemetry.answered(watch, path or "other", status or 499, id=name, **said)

    def _let_in(self, scope: Scope, headers: Mapping[bytes, bytes], watch: Watch) -> None:
        """Note whose request it is. Raises HTTPException for one that nobody here answers."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and re.sub(r":[0-9]*$", "", host) not in self._hosts:
            raise HTTPException(403, "this server is not called so; --allow-host NAME lets a name in")
        if not self._keys or scope["path"] in self._open or scope["method"] == "OPTIONS":
            return
        key = find_key(self._keys, headers.get(b"authorization", b""))
        if key is None:
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
        watch.key = key
        scope_needed = SCOPE_OF.get(scope["path"])
        if scope_needed is not None:
            key.allow(scope_needed)
        if scope_needed == "inference":
            key.begin()

    def _endpoint(self, scope: Scope) -> str | None:
        """The path of the endpoint that a request was meant for, of one that was refused before it got there."""
        for route in self._routes:
            if route.matches(scope)[0] != Match.NONE:
                return route.path
        return None


async def _failed(request: Request, error: Any) -> Response:
    if getattr(error, "detail", "") == "Not Found":  # Starlette's own: no route
        path = request.url.path[:200]
        error.detail = f"there is no {path}; /openapi.json lists the endpoints, / is a page to try them"
    response, watch = told(error), request.state.watch
    if response.status_code == 500:
        watch.fault = type(error).__name__
    elif isinstance(error, WrongUse):
        watch.refused(error.what, error.where or None)
    else:
        watch.refused(getattr(error, "detail", type(error).__name__))
    return response
