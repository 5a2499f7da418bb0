"""One request: its body, read from the bytes, the model that answers it, and its deadline."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from inspect import getdoc
from typing import Any, TypeVar, get_type_hints

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.console import say
from ...core.errors import Failed, ThroughlineError, WrongUse
from ...core.hardware import usable_cores
from ...core.version import version
from .bodies import Budget, read
from .catalogue import Catalogue
from .limits import ServerLimits
from .served import ServedModel
from .telemetry import Telemetry, Watch

INLINE = 4000  # characters or numbers, that the event loop reads or writes in a millisecond
# Endpoints that whatever answers another one answers.
SAME = {"/v1/score": "/v1/embeddings", "/embed": "/v1/embeddings", "/rerank": "/v1/rerank"}
SAME |= {"/v1/responses": "/v1/chat/completions"}
_beside = ThreadPoolExecutor(max(1, usable_cores() - 1), "beside")  # each works on a megabyte of text at most
Result = TypeVar("Result")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as an answer; numbers that are not finite become null."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


class Server:
    """The models and what all endpoints share."""

    def __init__(self, catalogue: Catalogue, limits: ServerLimits, telemetry: Telemetry) -> None:
        self.catalogue, self.limits, self.telemetry = catalogue, limits, telemetry
        self.draining, self.bodies = asyncio.Event(), Budget(limits)
        self.failure: ThroughlineError | None = None
        self.place = ""  # where it listens, for people

    @property
    def models(self) -> list[ServedModel]:
        return self.catalogue.models

    async def start(self) -> None:
        """Start all models; says that they serve, or notes the `failure` of one."""
        try:
            await self.catalogue.start()
            names = ", ".join(model.name for model in self.models) or "no model yet"
            say(f"serving {names} at {self.place}")
        except Exception as error:  # whatever it is, nothing is served: the command ends with it
            why = f"{type(error).__name__}: {error}"
            failed = Failed("a model cannot be served", why=why)
            self.failure = error if isinstance(error, ThroughlineError) else failed

    def pick(self, name: str | None, endpoint: str, watch: Watch) -> ServedModel:
        """The model of that name, or the only one that the endpoint fits. Raises HTTPException 404 or
        WrongUse.
        """
        tokens_only = endpoint in ("/tokenize", "/detokenize")
        fitting = [
            model for model in self.models if tokens_only or SAME.get(endpoint, endpoint) in model.endpoints
        ]
        if name is None:
            if len(fitting) != 1:
                if waiting := next((model for model in self.models if not model.ready), None):
                    waiting.free(0)
                names = ", ".join(model.name for model in fitting) or "none"
                why = f"{len(fitting)} models answer {endpoint}: {names}"
                raise WrongUse("which model?", where="model", why=why, fix="give a name from /v1/models")
            found = fitting[0]
        else:
            found = self.catalogue.find(name)
        watch.model = found.name
        # A full queue is known before anything is tokenised.
        found.free(0 if tokens_only else 1)
        if found not in fitting:
            kind = "GPT" if found.causal else "BERT"
            what = f"{found.name} is a {kind} and does not answer {endpoint}"
            chat = SAME.get(endpoint, endpoint) == "/v1/chat/completions"
            why = "it has no chat template" if chat and found.causal else ""
            raise WrongUse(what, where="model", why=why, fix=f"it answers {' and '.join(found.endpoints)}")
        return found


class Call:
    """A request on its way, with the model that answers it."""

    def __init__(self, server: Server, request: Request, model: ServedModel) -> None:
        self.model, self.watch = model, request.state.watch
        self.deadline_s = asyncio.get_running_loop().time() + server.limits.request_s
        self._request = request

    async def beside(self, size: int, work: Callable[[], Result]) -> Result:
        """Long texts are tokenised and large answers made beside the event loop: health checks and others go on."""
        if size <= INLINE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(_beside, work)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the work; give it up when the client goes away, whose slots are then free for others, and with a 504
        after the deadline.
        """
        # The body is read: the next message is that the client left.
        gone = asyncio.ensure_future(self._request.receive())
        try:
            async with asyncio.timeout_at(self.deadline_s) as limit:

                def hurry(_: object) -> None:
                    limit.reschedule(0.0)

                gone.add_done_callback(hurry)
                try:
                    return await work
                finally:
                    gone.remove_done_callback(hurry)
        except TimeoutError:
            if gone.done():
                raise HTTPException(499, "the client went away") from None  # nobody reads it
            raise HTTPException(504, "the answer took longer than this server allows") from None
        finally:
            gone.cancel()


Endpoint = Callable[[Call, Any], Coroutine[Any, Any, Response | dict[str, Any]]]


def post(server: Server, path: str, endpoint: Endpoint) -> Route:
    """The route of an endpoint `(call, body)` that a model answers; the body is what its annotation says."""

    @wraps(endpoint)
    async def answer(request: Request, body: Any) -> Response:
        model = server.pick(body.model, path, request.state.watch)
        model.users += 1
        try:
            found = await endpoint(Call(server, request, model), body)
        finally:
            model.users -= 1
        return found if isinstance(found, Response) else json_response(found)

    return with_body(server, path, answer)


def with_body(server: Server, path: str, endpoint: Callable[..., Coroutine[Any, Any, Response]]) -> Route:
    """The route of an endpoint `(request, body)`."""
    kind: Any = get_type_hints(endpoint)["body"]

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        raw = await server.bodies.take(request)
        # A web page may send any other type to any server without asking it first.
        if not is_json(request.headers.get("content-type", "")):
            fix = "send the header Content-Type: application/json"
            raise WrongUse("the body is not said to be JSON", where="body", fix=fix)
        return await endpoint(request, read(kind, raw, server.limits.queue))

    return Route(path, answer, methods=["POST"])


def is_json(content_type: str) -> bool:
    """Whether this is application/json or a type built on it."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI description of these routes."""
    shown = [route for route in routes if route.include_in_schema]
    kinds = [get_type_hints(route.endpoint).get("body") for route in shown]
    known = [kind for kind in kinds if kind]
    refs, schemas = msgspec.json.schema_components(known, ref_template="#/components/schemas/{name}")
    shapes = dict(zip(known, refs))
    paths: dict[str, Any] = {}
    for route, kind in zip(shown, kinds):
        about: dict[str, Any] = {"summary": route.name.replace("_", " ").capitalize()}
        about["operationId"] = route.name
        about |= {"description": getdoc(route.endpoint), "responses": {"200": {"description": "The answer."}}}
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
