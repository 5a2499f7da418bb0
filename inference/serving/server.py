"""The endpoints: OpenAI's completions, chat completions and embeddings, fill-mask, classify and rerank,
tokenize, health and metrics, and a page to try them.

No log line holds the text of a request. What stands before the endpoints is in `guard`, the port and the
drain in `listen`, the model in its own process behind `remote`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from .api_types import ModelBody
from .calls import Endpoint, Server, json_response, openapi, post, with_body
from .completions import chat, completions
from .guard import ON_ERROR, Guard
from .limits import Key
from .readings import classify, detokenize, embed, embeddings, fill_mask, rank, rerank, score, tokenize
from .responses import responses

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


def build_app(
    server: Server, keys: Sequence[Key] = (), origins: Sequence[str] = (), hosts: Sequence[str] = ()
) -> Starlette:
    """The application; models start with it and end with it. `origins` are those of web pages that may call, `hosts`
    the names by which it may be called (none: any).
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(server.start())
        yield
        starting.cancel()
        await server.catalogue.close()

    routes = [*(post(server, path, endpoint) for path, endpoint in ENDPOINTS.items()), *_status(server)]
    routes += _management(server) if server.catalogue.directory else []
    schema = json_response(openapi(routes))

    async def described(request: Request) -> Response:
        return schema

    routes.append(Route("/openapi.json", described))
    layers = [Middleware(Guard, server, keys, hosts)]
    if origins:
        allowed: dict[str, Any] = {"allow_origins": origins, "allow_methods": ["GET", "POST"]}
        allowed["allow_headers"] = ["*"]
        layers.insert(0, Middleware(CORSMiddleware, **allowed))
    return Starlette(routes=routes, middleware=layers, exception_handlers=ON_ERROR, lifespan=lifespan)


def _management(server: Server) -> list[Route]:
    """As llama.cpp's server has it, but for the answer to `load`, which waits for the model."""

    async def load(request: Request, body: ModelBody) -> Response:
        """Open a model by the name of its directory or file."""
        await server.catalogue.load(body.model)
        return json_response({"success": True})

    async def unload(request: Request, body: ModelBody) -> Response:
        """End a model when it has answered what it was asked."""
        server.catalogue.unload(body.model)
        return json_response({"success": True})

    return [with_body(server, f"/models/{endpoint.__name__}", endpoint) for endpoint in (load, unload)]


def _status(server: Server) -> list[Route]:
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    async def index(request: Request) -> Response:
        policy = "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def health(request: Request) -> Response:
        """The process answers."""
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        """Every model answers; 503 while one loads or the server drains."""
        waiting = [model.name for model in server.models if not model.ready]
        draining = server.draining.is_set()
        counts = {
            name: {model.name: model.count(name) for model in server.models}
            for name in ("accepted", "queued", "active")
        }
        fit = not waiting and not draining
        state = {"ready": fit, "waiting_for": waiting, "draining": draining, **counts}
        return json_response(state, 200 if fit else 503)

    async def metrics(request: Request) -> Response:
        """Prometheus's text format."""
        return Response(server.telemetry.page(server.models), media_type="text/plain; version=0.0.4")

    async def list_models(request: Request) -> Response:
        """The models, and which endpoints take those that are served."""
        return json_response({"object": "list", "data": server.catalogue.describe()})

    async def one_model(request: Request) -> Response:
        """One served model."""
        return json_response(server.catalogue.find(request.path_params["name"]).describe())

    return [
        Route("/", index, include_in_schema=False),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
    ]
